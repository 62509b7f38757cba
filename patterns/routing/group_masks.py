"""Choices of which groups are hidden: filled, multiplied by 0, or lowered by infinity, as a list of groups says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion.analysis.constant_folding import COMPARE
from fusion.graph import Algebra, Value

Sides = tuple[Any, Any]  # of an element of a group that is kept, and of one that is not


@dataclass(frozen=True)
class Masked:
    """What is chosen from: a choice, and what stands outside of the groups that are kept."""

    choice: Value
    groups: Value  # the list of groups
    size: Any  # experts of a group
    fill: float


def hidden_groups(a: Algebra, x: Value, is_choice: Callable[[Value], bool]) -> Masked | str | None:
    """`x` as a choice of which some groups are filled, or why that is another one; None where it is nothing alike."""
    inner = x.below("reshape")
    if inner.op == "where":
        condition, filled, kept = inner.args
        swapped = kept.op == "full"
        fill, choice = (kept, filled) if swapped else (filled, kept)
        if fill.op != "full" or choice.shape != inner.shape:
            return None
        told = _told(condition, inner)
        if told is None:
            looks = _lists(condition) and is_choice(a.reshape(choice, x.shape))
            return "what is filled is not proven to be groups of experts that stand side by side" if looks else None
        if told.sides != ((True, False) if swapped else (False, True)):
            return "what is filled is not the groups that were not chosen"
        return Masked(a.reshape(choice, x.shape), told.groups, told.size, fill.attrs[0])
    if inner.op == "mul":
        for mask, choice in (inner.args, inner.args[::-1]):
            told = _told(mask, inner)
            if told is not None and choice.shape == inner.shape:
                kept_alone = told.sides == (1, 0)
                return Masked(a.reshape(choice, x.shape), told.groups, told.size, 0.0) if kept_alone else _WEIGHED
    if inner.op == "add":
        for mask, choice in (inner.args, inner.args[::-1]):
            told = _told(mask, inner)
            if told is not None and choice.shape == inner.shape:
                others_alone = told.sides == (0, -math.inf)
                return (
                    Masked(a.reshape(choice, x.shape), told.groups, told.size, -math.inf) if others_alone else _RAISED
                )
    return None


_WEIGHED = "the scores of groups that were chosen, or were not, are multiplied by other numbers than 1 and 0"
_RAISED = "other numbers than 0 and -inf are added to the scores of groups that were chosen, or were not"


@dataclass(frozen=True)
class _Told:
    """A mask of groups: the list that it is made of, experts of a group, and what it holds for those listed or not."""

    groups: Value
    size: Any
    sides: Sides


def _told(mask: Value, over: Value) -> _Told | None:
    """What a mask of `over` says of groups, if it speaks of them alone."""
    lists: dict[tuple[Value, Any], None] = {}
    if mask.shape == over.shape:
        sides = _sides(mask, lists, None)
    else:
        sides = _sides(mask, lists, over.shape[-1]) if mask.shape == (*over.shape[:-1], 1) else None
    if sides is None or len(lists) != 1:
        return None
    groups, size = next(iter(lists))
    return _Told(groups, size, sides)


def _lists(mask: Value) -> bool:
    """Whether a mask is made of a list, or of what it chooses."""
    below = mask.sources(lambda each: each.args if each.op in _OF_MASKS else ())
    return any(each.op in ("chosen", "largest_index") for each in below)


_OF_MASKS = (
    "reshape", "permute", "expand", "slice", "cast", "cat", "not", "and", "or", "compare", "where", "scale", "shift",
    "any", "mean",
)  # fmt: skip
_CHANGES: dict[str, Callable[[Any, Any], Any]] = {"scale": lambda x, y: x * y, "shift": lambda x, y: x + y}


def _sides(x: Value, lists: dict[tuple[Value, Any], None], size: Any) -> Sides | None:
    """What `x` holds where its group is listed, and where not; `size`: experts of a group, None where `x` is of those.

    Elements of a mask stand in the order of the experts, through reshapes and functions of single elements, until a dim
    of size 1 behind the groups is expanded: from there on they are the groups themselves.
    """
    match x.op:
        case "reshape":
            return _sides(x.arg, lists, size)
        case "expand" if size is None and x.arg.shape == (*x.shape[:-1], 1):
            return _sides(x.arg, lists, x.shape[-1])
        case "chosen" if size is not None:
            lists[x.arg, size] = None
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
        case "compare" | "where":
            return _joined(x, [_sides(each, lists, size) for each in x.args])
        case _:
            return None


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
