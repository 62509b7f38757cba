"""The few numbers that a tensor consists of, each with the formula of where it stands."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fusion.analysis.affine import Formula, disjunction, negation
from fusion.analysis.dtypes import held_number
from fusion.graph import Value

MOST = 8  # different constants that a mask of floats may have


def of_truth(dtype: torch.dtype | None, formula: Formula) -> dict[float, Formula] | None:
    """1 where the formula holds, else 0."""
    return merged([(1, formula), (0, negation(formula))], dtype)


def merged(pairs: Iterable[tuple[float, Formula]], dtype: torch.dtype | None) -> dict[float, Formula] | None:
    """One formula for each number as the dtype holds it; NaN, as of 0 · ∞, is one of them."""
    found: dict[float, Formula] = {}
    for value, formula in pairs:
        if formula is False:
            continue
        kept = held_number(value, dtype)
        if kept is None:
            return None
        kept = math.nan if math.isnan(kept) else kept
        found[kept] = disjunction(found.get(kept, False), formula)
    return found if len(found) <= MOST else None


def zero_at(choice: Value) -> Value | None:
    """The side of a choice that is 0 wherever it is taken, as in where(bool(m), v, m) and where(m == 0, m, v)."""
    condition, yes, no = choice.args
    test = condition.arg if condition.op == "not" else condition
    if test.op == "compare" and test.attrs[0] in ("eq", "ne"):
        asked = next((x for x, y in (test.args, test.args[::-1]) if y.op == "full" and y.attrs == (0,)), None)
    else:
        asked = test.arg if test.op == "cast" else None
    if asked is None:
        return None
    side = yes if (test.attrs == ("eq",)) != (test is not condition) else no
    return side if side.below("expand") is asked.below("expand") else None


def logarithm(value: float) -> float:
    """Of a number that may be 0 or negative, as torch has it."""
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan
