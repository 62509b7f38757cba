"""Where a mask of attention hides a key, as booleans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.analysis.constant_folding import COMPARE
from fusion.graph import Algebra, Value

MASKED = -9984.0
"""A score lowered by so much counts as masked: -inf, the least of a dtype, -1e9, -1e4 are in use. -1e4 in bfloat16."""


def hidden(a: Algebra, mask: Value, factor: float = 1.0) -> Value:
    """Where a mask that is added to scores, times a positive factor, hides a key: it holds 0 or at most `MASKED`."""
    if mask.op == "expand":
        return a.expand(hidden(a, mask.arg, factor), mask.shape)
    bound = MASKED / 2 / factor
    told = by_list(a, mask, lambda number: number < bound) or _by_condition(a, mask, bound)
    return told or a.make("below", (mask,), (bound,), mask.shape, torch.bool)


def _by_condition(a: Algebra, mask: Value, bound: float) -> Value | None:
    """The same of two numbers of which a condition chooses, where one is filled in for each head and it is of all."""
    if mask.op != "where" or mask.arg.shape == mask.shape or any(each.op != "full" for each in mask.args[1:]):
        return None
    yes, no = (each.attrs[0] < bound for each in mask.args[1:])
    return None if yes == no else mask.arg if yes else negated(a, mask.arg)


def by_list(a: Algebra, mask: Value, hides: Callable[[float], bool]) -> Value | None:
    """The same of a mask that a list is written to, made of the list alone: it may be filled as scores are shaped.

    Or of what is compared with one number: zeros to which ones are written.
    """
    filled = next((each for each in mask.args if each.op != "full"), mask) if mask.op == "compare" else mask
    if filled.op != "where" or filled.arg.op != "chosen" or filled.shape != mask.shape:
        return None
    listed, other = (_is_hidden(mask, filled, each, hides) for each in filled.args[1:])
    return None if listed == other else filled.arg if listed else negated(a, filled.arg)


def _is_hidden(mask: Value, filled: Value, side: Value, hides: Callable[[float], bool]) -> bool:
    """Whether a mask hides where one number was filled in."""
    sides = [side if each is filled else each for each in mask.args] if mask is not filled else [side]
    if any(each.op != "full" for each in sides):
        return False
    numbers = [each.attrs[0] for each in sides]
    return hides(COMPARE[mask.attrs[0]](*numbers) if mask is not filled else numbers[0])


def negated(a: Algebra, mask: Value) -> Value:
    """Where a mask does not hold."""
    return mask.arg if mask.op == "not" else a.make("not", (mask,), (), mask.shape, torch.bool)


def list_in(mask: Value) -> Value | None:
    """Where a list says True that a mask is made of, or how often, in another arrangement; None where there is none."""
    return next((x for x in mask.sources(lambda x: x.args if x.op in _OF_LOGIC else ()) if x.op in _OF_LISTS), None)


def names_keys(listed: Value, keys: Any) -> bool:
    """Whether a list in a mask is one of so many keys, and perhaps what is none; else it is of blocks of them."""
    size = listed.shape[-1]
    return size == keys or (isinstance(size, int) and isinstance(keys, int) and size > keys)


_OF_LISTS = ("chosen", "counts")
_OF_LOGIC = (
    "not", "and", "or", "where", "compare", "below", "cast", "slice", "reshape", "expand", "permute", "repeat",
)  # fmt: skip
