"""Routes for a CPU or a GPU: interpretation, or compilation by Inductor from the fallback decompositions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusion._torch.inductor import inductor_can_build
from fusion._torch.tracing import Boxed, boxed
from fusion.routes.expand import Table
from fusion.routes.inductor import compile_repaired
from fusion.routes.inline import inline


def eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    """Return `gm` interpreted node by node; every operator in it needs a kernel for the device of its inputs."""
    del example_inputs
    return boxed(gm.forward)


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
