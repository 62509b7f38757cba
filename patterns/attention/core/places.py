"""Which values may be attention, by the nodes that hold them and what these read and give."""

from __future__ import annotations

from fusion.graph import Graph, Value
from patterns.attention.core.divided_late import stripped

ATTENDING = ("matmul", "cast", "reshape", "permute", "mul", "scale")
"""Ops of values that may be attention."""


def is_one_call(graph: Graph, value: Value) -> bool:
    """Whether the model calls attention by its name."""
    return any("scaled_dot_product" in str(node.target) for node in graph.places[value])


def only_arranges(graph: Graph, value: Value) -> bool:
    """Whether a node only passes on a contraction that the node before it holds, in another arrangement."""
    product, _ = stripped(value)
    held = (graph.held.get(source) for source in graph.places[value][0].all_input_nodes)
    return any(isinstance(each, Value) and each.dtype == value.dtype and stripped(each)[0] is product for each in held)


def is_end(graph: Graph, value: Value) -> bool:
    """Whether what uses a value does more than to scale it, to cast it or to arrange it otherwise."""
    held = [graph.held.get(user) for node in graph.places[value] for user in node.users]
    return not any(isinstance(each, Value) and each.op in ATTENDING for each in held)
