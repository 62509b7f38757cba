"""Rows without keys: the output of attention for a query that sees no key, which depends on the spelling of softmax.

keys hidden by -inf         NaN, or 0 where NaN is replaced; with a sink 0, unless -inf is subtracted from -inf
keys hidden by a number     the mean of all values if the row maximum is subtracted first; as for -inf if nothing is
                            subtracted; with a sink 0; else the result of rounding in the dtype
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fusion.analysis.dtypes import rounded_number
from fusion.analysis.equal_rows import counted, on_equal_rows, share
from fusion.analysis.rounding import exact
from fusion.graph import Value

_ALIKE = 2.0**-8
"""Tolerance of shares around 1/T, relative: the rounding of bfloat16."""


def leaf_of(sink: Value) -> Value:
    """Return the tensor that `sink` is a cast, a view, a multiple or a shift of."""
    return sink.below("reshape", "expand", "permute", "slice", "cast", "scale", "shift")


@dataclass(frozen=True)
class Shift:
    """The addition of one number to each row of scores.

    Attributes:
        by: the numbers [*rows, 1].
        scores: the scores [*rows, T].
        factor: the factor of the sum on the way to the softmax.
        sink: a score [*rows, 1] to which the number is added as well; None without one.
    """

    by: Value
    scores: Value
    factor: float
    sink: Value | None = None

    def on(self, row: float, sink: float) -> tuple[float, float] | None:
        """Return what `row` and `sink` become by the addition, for a row whose scores are all `row` and whose sink is
        `sink`.

        `row` and the first result are multiplied by `factor`, as at the softmax. None if the number that is added, or
        the rounded sum, is not known.
        """
        before = dict.fromkeys((self.scores, exact(self.scores)), row / self.factor)
        by = on_equal_rows(self.by, before, {} if self.sink is None else {leaf_of(self.sink): sink})
        moved = None if by is None else rounded_number(row / self.factor + by, self.scores.dtype)
        if by is None or moved is None:
            return None
        return moved * self.factor, sink if self.sink is None else sink + by


@dataclass(frozen=True)
class Empty:
    """The behaviour of a softmax on rows without a key.

    Attributes:
        softmax: the softmax, over the scores alone or over scores and a sink.
        shifts: additions to rows of masked scores, the last one first.
        sunk: True if there is a sink, a score near 0 without a value.
    """

    softmax: Value
    shifts: tuple[Shift, ...] = ()
    sunk: bool = False

    def of(self, number: float) -> str:
        """Name the output for a row whose masked scores are all `number`: "mean" (of all values), "zero" or "nan".

        Returns "" for any other output, such as the sum of all values, and for one that is not known.
        """
        row, sink = number, 0.0
        for each in reversed(self.shifts):
            moved = each.on(row, sink)
            if moved is None:
                return ""
            row, sink = moved
        _, guarded, less = self.softmax.attrs
        if less == "unknown" or (guarded == "zero" and math.isnan(row)):
            return ""
        keys = counted(self.softmax.shape[-1] - int(self.sunk))
        return result(share(self.softmax, row, keys, sink if self.sunk else None), keys)


def result(weight: float, keys: Any) -> str:
    """Name the output for a row whose weights of all `keys` keys are `weight`: "mean" (of all values), "zero" or "nan".

    Returns "" if the weights are none of 1 / `keys`, 0 and NaN.
    """
    if math.isnan(weight):
        return "nan"
    return "zero" if weight == 0 else "mean" if abs(weight * counted(keys) - 1) <= _ALIKE else ""
