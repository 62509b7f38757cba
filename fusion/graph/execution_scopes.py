"""Scopes of an FX graph in which calls run with attributes of their own: streams, core limits, super kernels."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from fusion._torch.operators import OpOverload, short_name

_ENTERS = ("scope_enter", "super_kernel_scope_begin")
_EXITS = ("scope_exit", "super_kernel_scope_end")
STREAM = "stream_label"
"""Key in `node.meta` of the stream that npugraph_ex runs a node on."""


def is_scope_boundary(node: fx.Node) -> bool:
    """Return True if a scope begins or ends at the call `node`."""
    return isinstance(node.target, OpOverload) and short_name(node.target) in (*_ENTERS, *_EXITS)


def enters_scope(node: fx.Node) -> bool:
    """Return True if a scope begins at the call `node`."""
    return isinstance(node.target, OpOverload) and short_name(node.target) in _ENTERS


def scopes(source: fx.Graph) -> dict[fx.Node, Any]:
    """Map each node of `source` to a key of the scope and stream that it runs in; empty if all run in none."""
    keys: dict[fx.Node, Any] = {}
    inside: list[fx.Node] = []
    for node in source.nodes:
        if is_scope_boundary(node):
            inside = [*inside, node] if enters_scope(node) else inside[:-1]
        keys[node] = (tuple(inside), node.meta.get(STREAM))
    return keys if any(key != ((), None) for key in keys.values()) else {}


def is_parted(first: fx.Node, last: fx.Node) -> bool:
    """Return True if a scope begins or ends between `first` and `last`, a later node, or they run on two streams."""
    node = first
    while node is not last and not is_scope_boundary(node):
        node = node.next
    return node is not last or first.meta.get(STREAM) != last.meta.get(STREAM)
