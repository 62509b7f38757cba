"""Stage lower: compile a rewritten graph with the compiler that runs it here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.fx as fx

from fusion import operators
from fusion._torch.tracing import Boxed
from fusion.planning.target import Target
from fusion.routes import cpu_gpu, vendor
from fusion.routes.inline import inline

_is_fused: ContextVar[bool] = ContextVar("is_fused", default=False)


@contextmanager
def guests_idle() -> Generator[None]:
    """Compile inside the context without guests: the graph is fused already."""
    token = _is_fused.set(True)
    try:
        yield
    finally:
        _is_fused.reset(token)


def is_guest_idle() -> bool:
    """Return True if the compiler that runs now has its graph from the backend of this package."""
    return _is_fused.get()


def route(lower: str) -> str:
    """Return the compiler that the option `lower` names.

    "auto" is torchair on an NPU, Inductor where it can build code, else "eager".
    """
    if lower != "auto":
        return lower
    if Target.detect().is_npu:
        return "torchair"
    return "inductor" if cpu_gpu.has_compiler() else "eager"


def lower(gm: fx.GraphModule, example_inputs: Sequence[Any], by: str, settings: Any = None) -> Boxed:
    """Compile `gm` for `example_inputs` with the compiler `by`; return the compiled callable.

    "eager" and "inductor" decompose the operators that only an NPU has. `settings` are those of a vendor's compiler: a
    `torchair.CompilerConfig`, or options of npugraph_ex by name; None for its defaults.
    """
    gm.recompile()  # even for Inductor, which compiles a copy: the report shows this graph
    table = operators.decompositions
    compilers: Mapping[str, Callable[[], Boxed]] = {
        "eager": lambda: cpu_gpu.eager(gm, example_inputs, {} if Target.detect().is_npu else table()),
        "inductor": lambda: cpu_gpu.inductor(gm, example_inputs, table()),
        "torchair": lambda: vendor.torchair(gm, example_inputs, config=settings),
        "npugraph_ex": lambda: vendor.npugraph_ex(gm, example_inputs, options=settings),
    }
    return compilers[by]()


def handed_on(gm: fx.GraphModule, by: str) -> fx.GraphModule:
    """Return the graph that `lower` hands to the compiler `by`: `gm`, for Inductor with the decompositions inlined."""
    return inline(gm, operators.decompositions()) if by == "inductor" else gm
