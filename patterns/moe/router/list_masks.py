"""Masks that are made of a list: what they hold where an expert, or its group, is listed, and where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion.analysis.constant_folding import COMPARE
from fusion.analysis.rounding import exact
from fusion.graph import Graph, Value

Sides = tuple[Any, Any]  # of an element that is listed, or whose group is, and of one that is not


@dataclass(frozen=True)
class Listed:
    """What a mask is made of.

    Attributes:
        places: the list; where `is_bound`, the largest of which the least is a bound for what is masked.
        size: how many experts a group has, None where experts themselves are listed.
        is_bound: whether numbers are compared with that bound.
    """

    places: Value
    size: Any
    is_bound: bool = False


@dataclass(frozen=True)
class Told:
    """A mask of a list."""

    of: Listed
    sides: Sides


@dataclass(frozen=True)
class Masked:
    """Numbers, those of which are hidden that a list does not name, or whose group it does not.

    Attributes:
        choice: the numbers, of the shape of the value that is masked.
        of: the list.
        by: the op that hides: "where", "mul" or "add".
        fill: what stands in their place; None where the mask does anything else.
    """

    choice: Value
    of: Listed
    by: str
    fill: float | None


_HIDES: dict[str, tuple[Sides, float]] = {"mul": ((1, 0), 0.0), "add": ((0, -math.inf), -math.inf)}


def masked(x: Value, speaks: Callable[[Listed], bool]) -> Masked | None:
    """Numbers that a mask of a list hides, if the list is one that `speaks`."""
    if x.op == "where":
        condition, filled, kept = x.args
        swapped = kept.op == "full"
        fill, choice = (kept, filled) if swapped else (filled, kept)
        found = told(condition, x)
        if fill.op != "full" or choice.shape != x.shape or found is None or not speaks(found.of):
            return None
        hides = found.sides == ((True, False) if swapped else (False, True))
        return Masked(choice, found.of, x.op, fill.attrs[0] if hides else None)
    for mask, choice in (x.args, x.args[::-1]) if x.op in _HIDES else ():
        found = told(mask, x)
        if found is not None and speaks(found.of) and choice.shape == x.shape:
            sides, fill = _HIDES[x.op]
            return Masked(choice, found.of, x.op, fill if found.sides == sides else None)
    return None


def told(mask: Value, over: Value) -> Told | None:
    """What a mask of `over` says of a list, if it speaks of one alone."""
    lists: dict[Listed, None] = {}
    if mask.shape == over.shape:
        sides = _sides(mask, lists, None)
    else:
        sides = _sides(mask, lists, over.shape[-1]) if mask.shape == (*over.shape[:-1], 1) else None
    if sides is None or len(lists) != 1:
        return None
    return Told(next(iter(lists)), sides)


def lists_largest(graph: Graph) -> bool:
    """Whether the largest of anything are taken, without which no list chooses experts."""
    return any(each.op in ("largest", "largest_index") for each in graph.owners)


def is_of_list(mask: Value) -> bool:
    """Whether a mask is made of a list, or of what it chooses."""
    below = mask.sources(lambda each: each.args if each.op in _OF_MASKS else ())
    return any(each.op in ("chosen", "largest_index") for each in below)


_OF_MASKS = (
    "reshape", "permute", "expand", "slice", "cast", "cat", "not", "and", "or", "compare", "where", "scale", "shift",
    "any", "mean",
)  # fmt: skip
_CHANGES: dict[str, Callable[[Any, Any], Any]] = {"scale": lambda x, y: x * y, "shift": lambda x, y: x + y}


def _sides(x: Value, lists: dict[Listed, None], size: Any) -> Sides | None:
    """What `x` holds where its expert or group is listed, and where not; `size`: of a group, None where `x` is of
    experts.

    Elements of a mask stand in the order of the experts, through reshapes and functions of single elements, until a dim
    of size 1 behind the groups is expanded: from there on they are the groups themselves.
    """
    match x.op:
        case "reshape":
            return _sides(x.arg, lists, size)
        case "expand" if size is None and x.arg.shape == (*x.shape[:-1], 1):
            return _sides(x.arg, lists, x.shape[-1])
        case "chosen":
            lists[Listed(x.arg, size)] = None
            return True, False
        case "full":
            return x.attrs[0], x.attrs[0]
        case "not":
            return _each(lambda it: not it, _sides(x.arg, lists, size))
        case "cast":
            to = bool if x.dtype is torch.bool else float
            return _each(to, _sides(x.arg, lists, size))
        case "scale" | "shift":
            return _each(lambda it: _CHANGES[x.op](it, x.attrs[0]), _sides(x.arg, lists, size))
        case "compare" if size is None and (largest := _bounded(x)) is not None:
            lists[Listed(largest, None, is_bound=True)] = None
            return (False, True) if x.attrs == ("lt",) else (True, False)
        case "compare" | "where":
            return _joined(x, [_sides(each, lists, size) for each in x.args])
        case _:
            return None


def _bounded(x: Value) -> Value | None:
    """The largest of numbers, where these are compared with the least of them: x < bound, or bound ≤ x."""
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


def _joined(x: Value, parts: list[Sides | None]) -> Sides | None:
    """Of operands that are alike, or the same everywhere."""
    if any(
        each is None or (arg.op != "full" and arg.shape != x.shape) for each, arg in zip(parts, x.args, strict=True)
    ):
        return None
    listed, others = zip(*(each for each in parts if each is not None), strict=True)
    if x.op == "compare":
        return COMPARE[x.attrs[0]](*listed), COMPARE[x.attrs[0]](*others)
    return (listed[1] if listed[0] else listed[2]), (others[1] if others[0] else others[2])
