"""Tensors of a few different numbers, as number -> formula of the positions that have it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fusion.analysis.affine import Formula, disjunction, negation
from fusion.analysis.dtypes import rounded_number
from fusion.graph import Value

MOST = 8
"""The largest count of different numbers for which a tensor is described so."""


def indicator(dtype: torch.dtype | None, formula: Formula) -> dict[float, Formula] | None:
    """Describe the tensor in `dtype` that is 1 where `formula` holds, else 0, as `merged` does; None if torch leaves
    that open.
    """
    return merged([(1, formula), (0, negation(formula))], dtype)


def merged(pairs: Iterable[tuple[float, Formula]], dtype: torch.dtype | None) -> dict[float, Formula] | None:
    """Convert the numbers of (number, formula) `pairs` to `dtype`, and join the formulas of equal ones by "or".

    NaN is one number. None if torch leaves a conversion open, or if there are more than `MOST` numbers.
    """
    formulas: dict[float, Formula] = {}
    for value, formula in pairs:
        if formula is False:
            continue
        number = rounded_number(value, dtype)
        if number is None:
            return None
        number = math.nan if math.isnan(number) else number  # one object, as NaN is not equal to itself
        formulas[number] = disjunction(formulas.get(number, False), formula)
    return formulas if len(formulas) <= MOST else None


def zero_at(choice: Value) -> Value | None:
    """Return the operand of the where `choice` that is 0 wherever it is selected; None if neither is.

    where(bool(m), v, m) and where(m == 0, m, v) return m.
    """
    condition, yes, no = choice.args
    test = condition.arg if condition.op == "not" else condition
    if test.op == "compare" and test.attrs[0] in ("eq", "ne"):
        tested = next((x for x, y in test.operands() if y.op == "full" and y.attrs == (0,)), None)
    else:
        tested = test.arg if test.op == "cast" else None
    if tested is None:
        return None
    side = yes if (test.attrs == ("eq",)) != (test is not condition) else no
    return side if side.below("expand") is tested.below("expand") else None


def logarithm(value: float) -> float:
    """Compute log(value) as torch does: -inf of 0, NaN of negative numbers."""
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan
