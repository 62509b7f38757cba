"""Predicates of the nodes of the user's graph that compute or use a value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.graph.launches import is_view


def is_computed(graph: Graph, value: Value) -> bool:
    """Return True if the first node with `value` computes it, rather than being a view."""
    return not is_view(graph.places[value][0].target)


def is_handed_out(node: fx.Node) -> bool:
    """Return True if the graph returns `node` or a view of it: its storage must not be a part of a larger one."""
    return any(user.op == "output" or (is_view(user.target) and is_handed_out(user)) for user in node.users)


def are_read_by(nodes: Sequence[fx.Node], readers: Collection[fx.Node]) -> bool:
    """Return True if all users of `nodes`, followed through views, are in `readers`."""
    users = [user for node in nodes for user in node.users]
    return all(are_read_by([each], readers) if is_view(each.target) else each in readers for each in users)


def sorted_by_scores(graph: Graph, places: Value) -> bool:
    """Return True if `places` are computed by `topk` or `sort` calls that sort: the largest scores come first."""
    source = places.below("cast", "reshape", "expand", "permute")
    nodes = graph.places.get(source, ())
    calls = [node.args[0] if node.target is operator.getitem else node for node in nodes]
    return bool(calls) and all(isinstance(each, fx.Node) and _is_sorted(each) for each in calls)


def _is_sorted(call: fx.Node) -> bool:
    given = (*call.args[4:], call.kwargs.get("sorted", True))
    return call.target in (torch.ops.aten.topk.default, torch.ops.aten.sort.default) and bool(given[0])
