"""Predicates of the nodes of the user's graph that compute or use a value."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.graph.launches import is_view


def is_computed(graph: Graph, value: Value) -> bool:
    """Return True if the first node with `value` computes it, rather than being a view."""
    return not is_view(graph.places[value][0].target)


def is_handed_out(node: fx.Node) -> bool:
    """Return True if `node`, or a view of it, is an output of the graph: its storage must not be a part of a larger
    one.
    """
    return any(user.op == "output" or (is_view(user.target) and is_handed_out(user)) for user in node.users)


def are_read_by(nodes: Sequence[fx.Node], readers: Collection[fx.Node]) -> bool:
    """Return True if all users of `nodes`, followed through views, are in `readers`."""
    users = [user for node in nodes for user in node.users]
    return all(are_read_by([each], readers) if is_view(each.target) else each in readers for each in users)
