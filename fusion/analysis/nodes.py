"""Questions about the user's own nodes that hold a value."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.graph.launches import is_view


def is_computed(graph: Graph, value: Value) -> bool:
    """Whether the first node that holds a value computes it, and does not only show another in its shape."""
    return not is_view(graph.places[value][0].target)


def is_handed_out(node: fx.Node) -> bool:
    """Whether a caller gets this memory: it must not be a part of a larger one."""
    return any(user.op == "output" or (is_view(user.target) and is_handed_out(user)) for user in node.users)


def are_read_by(nodes: Sequence[fx.Node], readers: Collection[fx.Node]) -> bool:
    """Whether all users of some nodes are among `readers`, through views."""
    users = [user for node in nodes for user in node.users]
    return all(are_read_by([each], readers) if is_view(each.target) else each in readers for each in users)
