"""Selection of values that may be attention, by the inputs and users of their nodes."""

from __future__ import annotations

from fusion.graph import Graph, Value
from patterns.attention.core.divided_late import stripped

ATTENDING = ("matmul", "cast", "reshape", "permute", "mul", "scale")
"""Ops of values that may be attention."""


def may_attend(graph: Graph, value: Value) -> bool:
    """Return True if `value` has an op of `ATTENDING` and is no mere arrangement of attention that is read already."""
    return value.op in ATTENDING and not only_arranges(graph, value)


def is_one_call(graph: Graph, value: Value) -> bool:
    """Return True if a node of `value` is a call of scaled_dot_product_attention."""
    return any("scaled_dot_product" in str(node.target) for node in graph.places[value])


def only_arranges(graph: Graph, value: Value) -> bool:
    """Return True if the node of `value` only reshapes or permutes its input, and that is a result of attention as
    well.

    The input then has the same dtype, and ends in the same product with values.
    """
    product, _ = stripped(value)
    feeds = (graph.value_of.get(source) for source in graph.places[value][0].all_input_nodes)
    return any(isinstance(each, Value) and each.dtype == value.dtype and stripped(each)[0] is product for each in feeds)


def is_end(graph: Graph, value: Value) -> bool:
    """Return True if no user of `value` may be attention: a product, a multiple, a cast or a view."""
    users = [graph.value_of.get(user) for node in graph.places[value] for user in node.users]
    return not any(isinstance(each, Value) and each.op in ATTENDING for each in users)
