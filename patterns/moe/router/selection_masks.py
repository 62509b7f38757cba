"""Masks [.., E] made of top-k indices: one value at the selected experts or groups of experts, another elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion.analysis.constant_folding import COMPARE
from fusion.analysis.rounding import exact
from fusion.graph import Graph, Value

Sides = tuple[Any, Any]
"""Value of a mask where the expert, or its group, is listed, and its value elsewhere."""


@dataclass(frozen=True)
class Selection:
    """The experts or groups that a mask selects in each row.

    Attributes:
        places: indices of the selected; where `is_bound`, the values of the top-k.
        size: number of experts of a group, None where experts are selected, not groups.
        is_bound: true where the mask selects all numbers ≥ the least of the top-k.
    """

    places: Value
    size: Any
    is_bound: bool = False


@dataclass(frozen=True)
class SelectionMask:
    """A mask that has one value where `selection` selects, and another elsewhere."""

    selection: Selection
    sides: Sides


@dataclass(frozen=True)
class Masked:
    """Numbers that are masked where `selection` does not select them.

    Attributes:
        choice: the numbers before the mask, in the shape of the masked value.
        selection: the selected experts or groups.
        by: the op that applies the mask: "where", "mul" or "add".
        fill: the number in place of the masked ones; None where the mask changes them in any other way.
    """

    choice: Value
    selection: Selection
    by: str
    fill: float | None


_MASKS: dict[str, tuple[Sides, float]] = {"mul": ((1, 0), 0.0), "add": ((0, -math.inf), -math.inf)}
"""For each op that masks: the sides of its mask, and the number in place of the masked ones."""


def masked(x: Value, accepts: Callable[[Selection], bool]) -> Masked | None:
    """Read `x` as numbers with a mask, applied by a where, a product or an addition, that is made from a top-k
    selection.

    None if there is no such mask, or if `accepts` is False of the selection.
    """
    if x.op == "where":
        condition, first, second = x.args
        swapped = second.op == "full"
        fill, choice = (second, first) if swapped else (first, second)
        mask = _selection_mask(condition, x)
        if fill.op != "full" or choice.shape != x.shape or mask is None or not accepts(mask.selection):
            return None
        fills = mask.sides == ((True, False) if swapped else (False, True))
        return Masked(choice, mask.selection, x.op, fill.attrs[0] if fills else None)
    for operand, choice in x.operands(*_MASKS):
        mask = _selection_mask(operand, x)
        if mask is not None and accepts(mask.selection) and choice.shape == x.shape:
            sides, fill = _MASKS[x.op]
            return Masked(choice, mask.selection, x.op, fill if mask.sides == sides else None)
    return None


def _selection_mask(mask: Value, over: Value) -> SelectionMask | None:
    """Read `mask` as made from a single selection; None if it is not.

    It has the shape of `over`, the masked numbers, or [.., 1], one element for each group.
    """
    selections: dict[Selection, None] = {}
    if mask.shape == over.shape:
        sides = _sides(mask, selections, None)
    else:
        sides = _sides(mask, selections, over.shape[-1]) if mask.shape == (*over.shape[:-1], 1) else None
    if sides is None or len(selections) != 1:
        return None
    return SelectionMask(next(iter(selections)), sides)


def has_topk(graph: Graph) -> bool:
    """Return True if `graph` computes a top-k, without which no experts are selected."""
    return any(each.op in ("largest", "largest_index", "first_greatest") for each in graph.owners)


def uses_topk(mask: Value) -> bool:
    """Return True if `mask` is computed from top-k indices or a multi-hot encoding, through ops that masks are built
    of.
    """
    below = mask.sources(lambda each: each.args if each.op in _MASK_OPS else ())
    return any(each.op in ("chosen", "largest_index") for each in below)


_MASK_OPS = (
    "reshape", "permute", "expand", "slice", "cast", "cat", "not", "and", "or", "compare", "where", "scale", "shift",
    "any", "mean",
)  # fmt: skip
_CHANGES: dict[str, Callable[[Any, Any], Any]] = {"scale": lambda x, y: x * y, "shift": lambda x, y: x + y}


def _sides(x: Value, selections: dict[Selection, None], size: Any) -> Sides | None:
    """Evaluate the mask `x` at selected experts and at others: return both numbers, or None if they are not two
    constants.

    Each selection from which `x` is made is added to `selections`. An element of `x` is an expert if `size` is None,
    else a group of `size` experts, as below an expand [.., G, 1] → [.., G, size].
    """
    match x.op:
        case "reshape":
            return _sides(x.arg, selections, size)
        case "expand" if size is None and x.arg.shape == (*x.shape[:-1], 1):
            return _sides(x.arg, selections, x.shape[-1])
        case "chosen":
            selections[Selection(x.arg, size)] = None
            return True, False
        case "full":
            return x.attrs[0], x.attrs[0]
        case "not":
            return _each(lambda it: not it, _sides(x.arg, selections, size))
        case "cast":
            to = bool if x.dtype is torch.bool else float
            return _each(to, _sides(x.arg, selections, size))
        case "scale" | "shift":
            return _each(lambda it: _CHANGES[x.op](it, x.attrs[0]), _sides(x.arg, selections, size))
        case "compare" if size is None and (largest := _bounded(x)) is not None:
            selections[Selection(largest, None, is_bound=True)] = None
            return (False, True) if x.attrs == ("lt",) else (True, False)
        case "compare" | "where":
            return _combined(x, [_sides(each, selections, size) for each in x.args])
        case _:
            return None


def _bounded(x: Value) -> Value | None:
    """Return the k largest of some numbers if `x` compares the numbers with the least of these: `<` or `<=`; else
    None.
    """
    numbers, bound = x.args if x.attrs == ("lt",) else x.args[::-1]
    cut = bound.below("reshape", "expand", "cast")
    if x.attrs not in (("lt",), ("le",)) or cut.op not in ("slice", "index") or cut.arg.op != "largest":
        return None
    largest, last = cut.arg, cut.arg.shape[-1] - 1
    if cut.op == "slice":
        is_least = cut.attrs == (largest.rank - 1, last, last + 1, 1)
    else:
        named = cut.args[1].attrs if cut.args[1].op == "constant" else ()
        is_least = cut.attrs == (largest.rank - 1,) and named in (((-1,),), ((last,),))
    same = largest.shape[:-1] == numbers.shape[:-1] and exact(largest.arg) is exact(numbers)
    return largest if is_least and same else None


def _each(change: Callable[[Any], Any], sides: Sides | None) -> Sides | None:
    return None if sides is None else (change(sides[0]), change(sides[1]))


def _combined(x: Value, parts: list[Sides | None]) -> Sides | None:
    """Evaluate `x`, a compare or a where, at selected experts and at others, given `parts`, both numbers of each
    operand.

    None if the numbers of an operand are unknown, or if an operand is broadcast.
    """
    if any(
        each is None or (arg.op != "full" and arg.shape != x.shape) for each, arg in zip(parts, x.args, strict=True)
    ):
        return None
    listed, others = zip(*(each for each in parts if each is not None), strict=True)
    if x.op == "compare":
        return COMPARE[x.attrs[0]](*listed), COMPARE[x.attrs[0]](*others)
    return (listed[1] if listed[0] else listed[2]), (others[1] if others[0] else others[2])
