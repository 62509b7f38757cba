"""Rows without keys: what attention gives for a query that sees no key, a fact of how its softmax is written.

-inf hides each key         NaN, or 0 where that is replaced; beside a sink 0, unless -inf is subtracted from -inf
one number hides each key   the mean of all values where the greatest score is subtracted first; what -inf gives
                            where nothing is; beside a sink 0; else what the dtype makes of it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fusion.analysis.dtypes import held_number
from fusion.analysis.equal_rows import counted, on_equal_rows, share
from fusion.analysis.rounding import exact
from fusion.graph import Value

_ALIKE = 2.0**-8
"""How far shares may be from 1/T: as far as bfloat16 rounds them."""


def leaf_of(sink: Value) -> Value:
    """Return the tensor of a sink, before it is cast, scaled or repeated for all rows."""
    return sink.below("reshape", "expand", "permute", "slice", "cast", "scale", "shift")


@dataclass(frozen=True)
class Shift:
    """A number that is added to each row of scores.

    Attributes:
        by: the numbers [*rows, 1].
        scores: the scores [*rows, T].
        factor: what their sum is multiplied by on the way to the softmax.
        sink: a score beside them to which the number is added as well.
    """

    by: Value
    scores: Value
    factor: float
    sink: Value | None = None

    def on(self, row: float, sink: float) -> tuple[float, float] | None:
        """Add the number to a row of one score and to the sink, where both are given behind `factor`."""
        before = dict.fromkeys((self.scores, exact(self.scores)), row / self.factor)
        by = on_equal_rows(self.by, before, {} if self.sink is None else {leaf_of(self.sink): sink})
        moved = None if by is None else held_number(row / self.factor + by, self.scores.dtype)
        if by is None or moved is None:
            return None
        return moved * self.factor, sink if self.sink is None else sink + by


@dataclass(frozen=True)
class Empty:
    """What a softmax makes of rows without a key.

    Attributes:
        softmax: the softmax, over the scores alone or over scores and a sink.
        shifts: what is added to whole rows of the scores that a mask was put on, the last one first.
        sunk: whether there is a sink, a score near 0 that has no value.
    """

    softmax: Value
    shifts: tuple[Shift, ...] = ()
    sunk: bool = False

    def of(self, number: float) -> str:
        """Return what a row of scores that are all `number` gives: "mean" (of all values), "zero", "nan", or "".

        "" stands for anything else, as the sum of all values is, and for what is not known.
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
    """Name what a row gives in which each of so many keys has this weight: "mean", "zero", "nan", or "" for others."""
    if math.isnan(weight):
        return "nan"
    return "zero" if weight == 0 else "mean" if abs(weight * counted(keys) - 1) <= _ALIKE else ""
