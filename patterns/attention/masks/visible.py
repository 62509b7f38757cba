"""The booleans that are true where a mask of attention hides a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.analysis.constant_folding import COMPARE, NUMBER_STEPS, number_after
from fusion.analysis.number_formulas import zero_at
from fusion.graph import Algebra, Value

MASKED = -9984.0
"""A score lowered by this much is masked: -1e4 as bfloat16. Models use -inf, the lowest of a dtype, -1e9 and -1e4."""


def hidden(
    a: Algebra, mask: Value, factor: float = 1.0, holds_ones: Callable[[Value], bool] = lambda x: False
) -> Value:
    """Return booleans, true where the additive `mask` times `factor` > 0 hides a key: it has 0 or at most `MASKED`.

    `holds_ones` is true for numbers that are known to be 0 or 1.
    """
    if mask.op == "expand":
        return a.expand(hidden(a, mask.arg, factor, holds_ones), mask.shape)
    bound = MASKED / 2 / factor
    condition = by_list(a, mask, lambda number: number < bound) or _by_condition(a, mask, bound)
    condition = condition or _by_truths(a, mask, bound, holds_ones)
    return condition or a.make("below", (mask,), (bound,), mask.shape, torch.bool)


def _by_truths(a: Algebra, mask: Value, bound: float, holds_ones: Callable[[Value], bool]) -> Value | None:
    """Return booleans, true where `mask`, computed from 0 and 1 by casts, sums and products with numbers, is below
    `bound`.

    None unless the source of `mask` is boolean or `holds_ones` is true for the source, and exactly one of 0 and 1 leads
    to a number below `bound`.
    """
    source = mask.below(*NUMBER_STEPS, *_VIEWS)
    if source is mask or not (source.dtype is torch.bool or holds_ones(source)):
        return None
    steps = list[Value]()
    x = mask
    while x is not source:
        steps.insert(0, x)
        x = x.arg
    results = [number_after(number, steps) for number in (0.0, 1.0)]
    below = [number is not None and number < bound for number in results]
    if None in results or below[0] == below[1]:
        return None
    if below[1]:
        condition = a.cast(source, torch.bool)
    elif source.dtype is torch.bool:
        condition = negated(a, source)
    else:
        condition = a.make("below", (source,), (1,), source.shape, torch.bool)
    for each in steps:
        condition = a.seen_as(condition, each) if each.op in _VIEWS else condition
    return condition


def _by_condition(a: Algebra, mask: Value, bound: float) -> Value | None:
    """Return booleans, true where `mask`, a choice of two numbers, is below `bound`: its condition or the negation.

    The numbers are constants, or 0 as of a float that is chosen where it is 0 itself. None unless exactly one of the
    two numbers is below `bound`, and the condition has fewer dims than `mask` or a side of `mask` is such a float.
    """
    if mask.op != "where":
        return None
    zero = zero_at(mask)
    if zero is None and (mask.arg.shape == mask.shape or any(each.op != "full" for each in mask.args[1:])):
        return None
    if any(each.op != "full" for each in mask.args[1:] if each is not zero):
        return None
    yes, no = (each is not zero and each.attrs[0] < bound for each in mask.args[1:])
    return None if yes == no else mask.arg if yes else negated(a, mask.arg)


def by_list(a: Algebra, mask: Value, hides: Callable[[float], bool]) -> Value | None:
    """Return booleans, true where a key is hidden, if `mask` is filled by a list of keys: the list or its negation.

    `mask` is where(list, number, number), or the comparison of such with a number; None for others. The result may have
    fewer dims than `mask`. `hides` tells of a number in `mask` if it hides a key.
    """
    filled = next((each for each in mask.args if each.op != "full"), mask) if mask.op == "compare" else mask
    if filled.op != "where" or filled.arg.op != "chosen" or filled.shape != mask.shape:
        return None
    listed, other = (_is_hidden(mask, filled, each, hides) for each in filled.args[1:])
    return None if listed == other else filled.arg if listed else negated(a, filled.arg)


def _is_hidden(mask: Value, filled: Value, side: Value, hides: Callable[[float], bool]) -> bool:
    """Return True if `mask` hides a key where `filled` has the value `side`, a constant.

    `mask` is `filled` itself, or a comparison of it with a number. `hides` tells of a number in `mask` if it hides.
    """
    sides = [side if each is filled else each for each in mask.args] if mask is not filled else [side]
    if any(each.op != "full" for each in sides):
        return False
    numbers = [each.attrs[0] for each in sides]
    return hides(COMPARE[mask.attrs[0]](*numbers) if mask is not filled else numbers[0])


def negated(a: Algebra, mask: Value) -> Value:
    """Return the negation of the boolean `mask`."""
    return mask.arg if mask.op == "not" else a.make("not", (mask,), (), mask.shape, torch.bool)


def list_in(mask: Value) -> Value | None:
    """Return the list of keys, as booleans or counts, from which `mask` is computed by logic and views; else None."""
    return next((x for x in mask.sources(lambda x: x.args if x.op in _OF_LOGIC else ()) if x.op in _OF_LISTS), None)


def names_keys(listed: Value, keys: Any) -> bool:
    """Return True if `listed` [.., T or more] has an entry for each of `keys` keys; False for a list of blocks.

    It may have one more entry, for empty slots.
    """
    size = listed.shape[-1]
    return size == keys or (isinstance(size, int) and isinstance(keys, int) and size > keys)


_VIEWS = ("reshape", "expand", "permute", "slice")
_OF_LISTS = ("chosen", "counts")
_OF_LOGIC = (
    "not", "and", "or", "where", "compare", "below", "cast", "slice", "reshape", "expand", "permute", "repeat",
)  # fmt: skip
