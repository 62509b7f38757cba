"""Layout of prepared tensors: find Parameters back to back in the memory of a tensor that is computed from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.operators import short_name
from fusion.graph.launches import is_view

ALIGNMENT = 64  # bytes to which kernels like tensors to be aligned, also parts of a joined tensor
CONSTANT = "a constant"
BY_OPTION = "prepack='copy'"
IN_BLOCKS = "stored in FRACTAL_NZ"
CAST = "cast to {}"
COMPUTED = "computed from Parameters"
PARTS = "parts of Parameters"
REORDERED = "elements in another order, or one Parameter twice"
TAKEN = "another prepared tensor joins one of its Parameters with others"
UNEVEN = "a Parameter of {} bytes: joined ones begin at multiples of {}"

aten = torch.ops.aten
JOINS = frozenset({aten.cat.default, aten.stack.default})
MOVES = JOINS | {aten.clone.default, aten.contiguous.default}
_RESHAPES = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "alias",
        "detach",
    }
)
_CUTS = frozenset({"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "unfold", "diagonal"})
_EXCHANGES = frozenset({"t", "transpose", "swapaxes"})
"""Views that are their own inverse."""


def why_copied(node: fx.Node, closure: Sequence[fx.Node], joined: Collection[fx.Node] | None) -> str:
    """Return why the result of `node` needs memory of its own, "" if the Parameters can become views of it.

    Args:
        node: computes the result.
        closure: `node`, and all nodes that it is computed from.
        joined: the `parts` of `node`: the Parameters of which the result consists, None if it has other elements.
    """
    vals = [each.meta["val"] for each in closure if each.op == "placeholder"]
    work = [each.target for each in closure if each.op == "call_function" and not is_view(each.target)]
    dtype = node.meta["val"].dtype
    if not vals:
        return CONSTANT
    if "npu_format_cast" in map(short_name, work):
        return IN_BLOCKS
    if {each.dtype for each in vals} != {dtype}:
        return CAST.format(dtype)
    if not MOVES.issuperset(work):
        return COMPUTED
    if joined is None or JOINS.isdisjoint(work):
        return REORDERED if _CUTS.isdisjoint(short_name(each.target) for each in closure) else PARTS
    uneven = [size for each in vals if (size := each.numel() * dtype.itemsize) % ALIGNMENT]
    return UNEVEN.format(uneven[0], ALIGNMENT) if uneven else ""


def parts(node: fx.Node) -> list[fx.Node] | None:
    """Return the Parameters that follow each other in the memory of the contiguous result of `node`, in that order.

    None unless each of them is there once, complete and in the order of its own memory.
    """
    val = node.meta["val"]
    parts_of: dict[fx.Node, Tensor] = {}
    if not val.is_contiguous() or not _collect(node, torch.empty(val.shape, dtype=val.dtype, device="meta"), parts_of):
        return None
    return sorted(parts_of, key=lambda each: parts_of[each].storage_offset())


def _collect(node: fx.Node, part: Tensor, parts_of: dict[fx.Node, Tensor]) -> bool:
    """Add to `parts_of` each Parameter that `node` consists of, with its part of `part`, the elements of `node`.

    Return False if `node` has other elements, or one Parameter twice.
    """
    if node.op == "placeholder":
        is_new = node not in parts_of
        parts_of[node] = part
        return is_new and part.is_contiguous() and node.meta["val"].is_contiguous()
    inputs = _inputs(node, part)
    return bool(inputs) and all(_collect(each, inner, parts_of) for each, inner in inputs)


def _inputs(node: fx.Node, part: Tensor) -> list[tuple[fx.Node, Tensor]]:
    """Return the inputs of a call that moves elements, each with its part of the result; none for other calls."""
    if node.target in JOINS:
        several = cast(Sequence[fx.Node], node.args[0])
        if len({each.meta["val"].dim() for each in several}) > 1:
            return []  # `cat` accepts an empty 1-d tensor among others
        dim = cast(int, node.args[1]) if len(node.args) > 1 else 0
        sizes = [each.meta["val"].shape[dim] for each in several] if node.target is aten.cat.default else []
        return list(zip(several, part.split(sizes, dim) if sizes else part.unbind(dim), strict=True))
    given = node.all_input_nodes
    undone = _undone(node, part, given[0]) if len(given) == 1 else None
    return [] if undone is None else [(given[0], undone)]


def _undone(node: fx.Node, part: Tensor, given: fx.Node) -> Tensor | None:
    """Return the part of the input `given` of a view or copy whose result is `part`; None for other calls."""
    name = short_name(node.target)
    if node.target in MOVES:
        return part
    if name in _EXCHANGES:
        target: Any = node.target
        return target(part, *node.args[1:])
    if name == "permute":
        dims = [each % part.dim() for each in cast(Sequence[int], node.args[1])]
        return part.permute([dims.index(each) for each in range(part.dim())])
    if name not in _RESHAPES or node.meta["val"].dtype != part.dtype:
        return None
    try:
        return part.view(given.meta["val"].shape)
    except (RuntimeError, ValueError):  # no view has these strides; fake tensors raise ValueError
        return None


def order_of(node: fx.Node) -> list[int]:
    """Return the dims of a join in the order in which its first Parameter has them in memory, outermost first.

    Dims in which that Parameter has size 1 come first.
    """
    first = node
    while first.target in JOINS:
        first = cast(Sequence[fx.Node], first.args[0])[0]
    if first.meta["val"].dim() != node.meta["val"].dim():
        return list(range(node.meta["val"].dim()))
    strides = first.meta["val"].stride()
    alone = [size == 1 for size in first.meta["val"].shape]
    return sorted(range(len(strides)), key=lambda dim: (not alone[dim], -strides[dim]))
