"""Stage 11, lower: hand a rewritten graph to the compiler that runs it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx as fx

from fusion import operators
from fusion._torch.tracing import Boxed
from fusion.planning.target import Target
from fusion.routes import host, vendor
from fusion.routes.inline import inline


def route(lower: str) -> str:
    """The compiler that "auto" stands for here: torchair on an NPU, Inductor where it can build code, else none."""
    if lower != "auto":
        return lower
    if Target.detect().is_npu:
        return "torchair"
    return "inductor" if host.has_compiler() else "eager"


def lower(gm: fx.GraphModule, example_inputs: Sequence[Any], by: str) -> Boxed:
    """Compile `gm` as `by` says; operators that only an NPU has are decomposed for a host compiler."""
    gm.recompile()  # for Inductor too, which is given a copy: the report holds this graph
    compilers: Mapping[str, Callable[[], Boxed]] = {
        "eager": lambda: host.eager(gm, example_inputs),
        "inductor": lambda: host.inductor(gm, example_inputs, operators.decompositions()),
        "torchair": lambda: vendor.torchair(gm, example_inputs),
        "npugraph_ex": lambda: vendor.npugraph_ex(gm, example_inputs),
    }
    return compilers[by]()


def handed_on(gm: fx.GraphModule, by: str) -> fx.GraphModule:
    """The graph that `lower` gives to the compiler: for Inductor, with the decompositions inlined."""
    return inline(gm, operators.decompositions()) if by == "inductor" else gm
