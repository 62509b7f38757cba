"""Routes for a CPU or a GPU: interpretation, or compilation by Inductor from the fallback decompositions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx

from fusion._torch.inductor import inductor_can_build
from fusion._torch.nested import leaves
from fusion._torch.tracing import Boxed, boxed, outside_modes
from fusion.routes.expand import Table
from fusion.routes.inductor import compile_repaired
from fusion.routes.inline import inline

_log = logging.getLogger(__name__)

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
CALLS_BEFORE_INLINING = 2
"""Calls of a graph before its decompositions are inlined: tracing them takes longer than one or two calls save."""


def eager(gm: fx.GraphModule, example_inputs: Sequence[Any], table: Table | None = None) -> Boxed:
    """Return `gm` interpreted node by node; every operator in it needs a kernel for the device of its inputs.

    From the third call on, operators in `table`, if one is given, are interpreted as the nodes of their decompositions,
    which spares each call the binding and the checks of its arguments. With symbolic sizes they stay calls, because the
    guards of a decomposition would come too late for Dynamo.
    """
    del example_inputs
    table = table or {}
    if not any(node.target in table for node in gm.graph.nodes) or _has_symbolic_sizes(gm):
        return boxed(gm.forward)
    calls, forward = count(), gm.forward

    def run(*inputs: Any) -> Any:
        nonlocal forward
        if next(calls) == CALLS_BEFORE_INLINING:
            forward = _inlined(gm, table)
        return forward(*inputs)

    return boxed(run)


def _inlined(gm: fx.GraphModule, table: Table) -> Callable[..., Any]:
    """Return `gm` with the operators of `table` inlined, or `gm` itself if one cannot be traced."""
    try:
        with outside_modes():
            return inline(gm, table).forward
    except Exception:
        _log.info("a decomposition could not be inlined; its operator stays a call", exc_info=True)
        return gm.forward


def _has_symbolic_sizes(gm: fx.GraphModule) -> bool:
    """Return True if a value of `gm` is a symbolic size, or has one."""
    vals = leaves(*(node.meta.get("val") for node in gm.graph.nodes))
    sizes = (size for val in vals for size in (val.shape if isinstance(val, torch.Tensor) else (val,)))
    return any(isinstance(size, _SYMBOLIC) for size in sizes)


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], table: Table) -> Boxed:
    """Compile `gm` by Inductor for inference; operators in `table` are inlined, so that they fuse with the rest.

    `gm` may have composite operators, symbolic sizes and a `copy_` epilogue: mutated inputs are written in place.
    Intended as the inner compiler of another AOT autograd; `gm` is not changed.
    """
    inlined = inline(gm, table)
    return compile_repaired(inlined, example_inputs)


def has_compiler(device_type: str | None = None) -> bool:
    """Return True if Inductor can build code here: for "cpu" it needs a C++ compiler, for "cuda" Triton.

    Without `device_type`, for the GPU where there is one, else for the CPU.
    """
    return inductor_can_build(device_type or ("cuda" if torch.cuda.is_available() else "cpu"))
