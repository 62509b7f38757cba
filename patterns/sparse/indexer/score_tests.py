"""Conditions on the scores of a list by which a model finds the entries whose key is hidden.

    v == −inf      isfinite(v)      isinf(v) & (v < 0)      v > finfo.min      v <= −1e9

As everywhere, a visible score is taken to be above the large negative numbers by which masks hide a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from fusion.analysis.constant_folding import COMPARE
from fusion.analysis.dtypes import rounded_number
from fusion.analysis.rounding import is_float
from fusion.graph import Value
from patterns.attention.masks.mask_terms import numbers_of
from patterns.attention.masks.masks import Masks
from patterns.attention.masks.visible import MASKED

_ARITHMETIC = {"scale", "shift", "cast", "reshape", "permute", "add", "where", "mul"}
_TEST_OPS = {"reshape", "expand", "cast", "abs", "isnan", "compare", "not", "and", "or", "mul"}


def asks_for_hidden(condition: Value, places: Value, masks: Masks, hides: bool) -> bool:
    """Return True if `condition` holds for scores of hidden keys alone, or without `hides` for those of visible keys
    alone.

    Args:
        condition: elementwise condition on the values that `topk` returns.
        places: indices that `topk` returns, of masked scores.
        masks: all masks of the scores.
        hides: True to ask for hidden keys, False for visible ones.
    """
    steps: dict[Value, None] = {}
    low, dtype = None if _are_shares(places.arg) else _lowered(places.arg, masks), places.arg.dtype
    if low is None or dtype is None or not _is_made_of(condition, places, steps):
        return False
    compared = {float(number) for each in steps if each.op == "full" and (number := _number(each)) is not None}
    bounds = sorted({*compared, MASKED / 2, 0.0, torch.finfo(dtype).max})
    between = [(x + y) / 2 for x, y in pairwise(bounds)]
    seen = [each for each in (*bounds, *between) if MASKED / 2 <= each < math.inf]
    wanted = [(low, hides), (seen, not hides)]
    return all(_holds(condition, steps, places, each) is truth for numbers, truth in wanted for each in numbers)


def _are_shares(scores: Value) -> bool:
    """Return True if `scores` are made from a softmax: hidden keys then have 0, as visible keys of low scores may
    have.
    """
    steps = scores.sources(lambda each: each.args if each.op in _ARITHMETIC else ())
    return any(each.op == "softmax" for each in steps)


def _lowered(scores: Value, masks: Masks) -> list[float] | None:
    """Return the numbers that the scores of hidden keys may be; None if they are not known.

    Masks of -inf give -inf, whatever ops are behind them. A finite number is known only if there is one mask, and no op
    but a reshape behind it. If the mask adds its number, half and twice the number are returned too, as the score that
    it is added to is unknown.
    """
    numbers = {number for number in numbers_of(masks.positions, masks.terms) if number > -math.inf}
    if not numbers:
        return [-math.inf]
    (term, *others), dtype = masks.terms, scores.dtype
    if others or dtype is None or term.scores is not scores.below("reshape"):
        return None
    exact = [rounded_number(number, dtype) for number in numbers]
    if None in exact:
        return None
    values = [number for number in exact if number is not None]
    if term.how != "add":
        return values
    least = torch.finfo(dtype).min
    return [max(number * factor, least) for number in values for factor in (0.5, 1.0, 2.0)]


def _is_made_of(x: Value, places: Value, steps: dict[Value, None]) -> bool:
    """Return True if `x` is computed from constants and the scores of the list `places` alone.

    Then `x` and the values from which it is computed are added to `steps`, operands first.
    """
    if x in steps:
        return True
    is_known = _are_scores(x, places) or x.op == "full"
    if not is_known and not (x.op in _TEST_OPS and all(_is_made_of(each, places, steps) for each in x.args)):
        return False
    steps[x] = None
    return True


def _holds(condition: Value, steps: Iterable[Value], places: Value, score: float) -> float | bool | None:
    """Evaluate `condition` for one `score` of the list `places`; None if an op on the way is unknown.

    `steps` are `condition` and the values from which it is computed, operands first.
    """
    values: dict[Value, float | bool | None] = {}
    for x in steps:
        if _are_scores(x, places):
            values[x] = score
        else:
            values[x] = _number(x) if x.op == "full" else _given(x, [values[each] for each in x.args])
    return values[condition]


def _given(x: Value, parts: Sequence[float | bool | None]) -> float | bool | None:
    """Evaluate `x` with the numbers `parts` as its operands; None if one of them is None, or if the op is not known
    here.
    """
    if None in parts:
        return None
    first, *more = (each for each in parts if each is not None)
    match x.op:
        case "reshape" | "expand":
            return first
        case "cast" if x.dtype is torch.bool:
            return bool(first)
        case "cast" if is_float(x):
            return rounded_number(first, x.dtype)
        case "abs":
            return abs(first)
        case "isnan":
            return math.isnan(first)
        case "compare":
            return COMPARE[x.attrs[0]](first, more[0])
        case "not":
            return not first
        case "and" | "mul" if x.dtype is torch.bool:
            return bool(first and more[0])
        case "or" if x.dtype is torch.bool:
            return bool(first or more[0])
        case _:
            return None


def _number(x: Value) -> float | None:
    """Return the constant `x`, a "full", as rounded to its dtype; None if it is NaN."""
    number = rounded_number(x.attrs[0], x.dtype)
    return None if number is None or math.isnan(number) else number


def _are_scores(x: Value, places: Value) -> bool:
    """Return True if `x` is the values of the `topk` whose indices are `places`."""
    return x.op == "largest" and x.args == places.args and x.attrs == places.attrs
