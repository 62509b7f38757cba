"""Nesting: calls that are written inside the expression of the call that reads them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import leaves
from fusion._torch.operators import short_name
from fusion.frontend.port.expressions import is_fused
from fusion.frontend.port.frames import Frame, is_item
from fusion.frontend.port.names import Names
from fusion.graph.aliasing import is_write, memory_of, written_by
from fusion.graph.launches import is_view

aten = torch.ops.aten
_DEEPEST = 3
"""Calls that one expression nests at most."""
_LIGHT = {
    "_to_copy", "neg", "cos", "sin", "mul", "add", "sub", "rsqrt", "pow", "mean", "sigmoid", "silu", "exp", "lt", "le",
    "eq", "ge", "gt", "ne", "abs", "div", "sqrt", "reciprocal", "log", "floor_divide",
}  # fmt: skip
"""Operators of aten, beside views, that are nested in the call that reads them."""

_MADE = {"linear", "embedding", "cat", "stack", "where", "index"}
"""Operators of aten that are nested in a view or a cast."""


def nested(frame: Frame, names: Names) -> set[fx.Node]:
    """Return the calls of `frame` that are written inside another: short ones that one call reads, without a name."""
    place = {node: number for number, node in enumerate(frame.items)}
    depth: dict[fx.Node, int] = {}
    for node in place:
        if not isinstance(node, fx.Node) or not _may_nest(node, place):
            continue
        (reader,) = node.users
        deep = 1 + max((depth.get(each, 0) for each in node.all_input_nodes), default=0)
        if is_increment(reader) or (deep <= _DEEPEST and not names.assigned(node) and _fits(node, reader)):
            depth[node] = deep
    return {node for node in depth if is_view(node.target) or not _passes_write(node, frame, place, depth)}


def _passes_write(node: fx.Node, frame: Frame, place: Any, nested_calls: Any) -> bool:
    """Return True if a write comes between `node` and the statement in which it is written."""
    (end,) = node.users
    while end in nested_calls:
        (end,) = end.users
    return not is_increment(end) and any(
        isinstance(each, Frame) or is_write(each) for each in frame.items[place[node] : place[end]]
    )


def _may_nest(node: fx.Node, place: Any) -> bool:
    """Return True if `node` gives one tensor, which one call of the frame reads once, and writes nothing."""
    reader = next(iter(node.users), None)
    if len(node.users) != 1 or reader not in place or is_write(node) or is_item(node) or is_fused(node):
        return False
    reads = [each for each in leaves(reader.args, reader.kwargs) if each is node]  # pyright: ignore
    return len(reads) == 1 and isinstance(node.meta["val"], torch.Tensor)


def _fits(node: fx.Node, reader: fx.Node) -> bool:
    """Return True if `node` reads well inside `reader`."""
    name = short_name(node.target)
    if is_view(node.target):
        return True
    if name in _MADE:
        return is_view(reader.target) or short_name(reader.target) == "_to_copy"
    return name in _LIGHT and (name == "_to_copy" or not is_fused(reader))


def is_increment(node: fx.Node) -> bool:
    """Return True if `node` copies x + c over x, is the only write to x, and the only reader of x + c."""
    made = node.args[1] if node.target is aten.copy_.default else None
    if not isinstance(made, fx.Node) or made.target is not aten.add.Tensor or made.kwargs or len(made.users) > 1:
        return False
    memory = memory_of(node.args[0])  # pyright: ignore[reportArgumentType]
    writes = [each for each in node.graph.nodes if any(memory_of(one) is memory for one in written_by(each))]
    return made.args[0] is node.args[0] and writes == [node]
