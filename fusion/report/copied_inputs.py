"""Copies of inputs that a rewritten graph makes at every call: of caches, states and weights, and what avoids them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch.fx as fx

from fusion._torch.operators import has_in_place_form, short_name
from fusion.graph.aliasing import is_written, memory_of
from fusion.graph.launches import is_view
from fusion.operators import operator_of

_COPIES = ("copy_", "clone", "_to_copy")
_WRITES = frozenset({"index_copy", "index_put", "npu_scatter_nd_update", "scatter_update"})
"""Functional writes of rows, which torchair and Inductor make in place where `copy_` brings their result back."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a graph.

    Attributes:
        compiler: the compiler that the graph is planned for.
        names: names in the model, by names in the graph.
        parameters: names in the graph of those that hold Parameters.
        is_guest: True if the pass cannot prepare weights.
    """

    compiler: str = "eager"
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    parameters: frozenset[str] = frozenset()
    is_guest: bool = False


@dataclass(frozen=True)
class CopiedInput:
    """An input that a call copies, or copies to.

    Attributes:
        name: its name in the model where that is known, else in the graph.
        kind: "weight" if it holds a Parameter, "state" if the graph writes to it, else "input".
        cure: what was found, and what avoids the copy.
    """

    name: str
    kind: str
    cure: str


def copied_input(node: fx.Node, inputs: Inputs) -> CopiedInput | None:
    """Return the input that the call `node` copies, or copies to; None if it copies none.

    A cast is a copy of weights alone. A copy that the compiler makes a write in place is none.
    """
    op, first = short_name(node.target), node.args[0] if node.args else None
    if op not in _COPIES or not isinstance(first, fx.Node):
        return None
    place = memory_of(first)
    is_weight = place.name in inputs.parameters
    if place.op != "placeholder" or (op == "_to_copy" and not is_weight) or _is_in_place(node, inputs.compiler):
        return None
    kind = "weight" if is_weight else "state" if is_written(place) else "input"
    cure = _cure_of_write(node) if op == "copy_" else _CURES[kind]
    guest = "; or compile by the backend cann_fusion, which prepares it once" * (is_weight and inputs.is_guest)
    return CopiedInput(inputs.names.get(place.name, place.name), kind, cure + guest)


_CURES = {
    "weight": "computed from the weight alone at every call; store the result as a Parameter, outside of forward",
    "state": "cloned at every call; read it before it is written, or read what the write returns",
    "input": "cloned at every call; hand it over in the layout in which the model reads it",
}


def _is_in_place(copy: fx.Node, compiler: str) -> bool:
    """Return True if `compiler` replaces the write whose result `copy` brings back by a write in place.

    The write must read the input itself, not a view of it, and be the last to read it.
    """
    place, value = copy.args[:2] if short_name(copy.target) == "copy_" else (None, None)
    if not isinstance(place, fx.Node) or not isinstance(value, fx.Node) or place.op != "placeholder":
        return False
    takes = {
        "torchair": short_name(value.target) in _WRITES,
        "inductor": short_name(value.target) in _WRITES,
        "npugraph_ex": short_name(value.target) != "copy" and has_in_place_form(value.target),
    }
    if not takes.get(compiler, False) or value.args[0] is not place:
        return False
    return all(user is copy or user is value or user < value for user in place.users)


def _passed_on(node: fx.Node) -> Any:
    """Return the argument of `node` that it hands on as it is: of a view, a `copy`, a `getitem`; None for any other."""
    if short_name(node.target) == "copy":
        return node.args[1]
    return node.args[0] if is_view(node.target) or node.target is getitem else None


def _cure_of_write(copy: fx.Node) -> str:
    """Describe how `copy`, which writes an input as a whole, becomes a write in place."""
    value: Any = copy.args[1]
    while isinstance(value, fx.Node) and (from_value := _passed_on(value)) is not None:
        value = from_value
    source = short_name(value.target) if isinstance(value, fx.Node) and value.op == "call_function" else "another input"
    operator = operator_of(value.target) if isinstance(value, fx.Node) else None
    if operator is not None and operator.in_place:
        return (
            f"its contents before {source} are read or returned behind {source}, which writes in place where nobody "
            "reads them; read them before the write, or read what the write returns"
        )
    return (
        f"assigned as a whole, from {source}; a write in place requires the rows that change: write "
        "state[:, positions] = rows, or state.index_copy_(dim, positions, rows)"
    )
