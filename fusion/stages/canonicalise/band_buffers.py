"""Banded buffers: translate a buffer that is known to be a band matrix to the formula of its positions."""

from __future__ import annotations

from typing import Any

import torch

from fusion.facts import Band
from fusion.graph import Algebra, Value
from fusion.graph.comparisons import compare, constant, moved, negated, pointwise, positions, where
from fusion.graph.proof_steps import proof, proven


@proof
def banded(a: Algebra, band: Band, shape: tuple[Any, ...], dtype: torch.dtype) -> Value:
    """Build a buffer [*ones, R, C] with the numbers of `band`.

    These are `inside` where low <= column - row <= high, else `outside`; a bound that is None always holds.
    """
    row, column = positions(a, shape[-2], 2, -2), positions(a, shape[-1], 2, -1)
    conditions = [] if band.low is None else [(proven(moved(a, row, band.low)), column)]
    conditions += [] if band.high is None else [(column, proven(moved(a, row, band.high)))]
    first, *others = (proven(compare(a, "le", *each)) for each in conditions)
    inside = proven(pointwise(a, "and", (first, *others), (), torch.bool)) if others else first
    if dtype is torch.bool:
        return proven(a.reshape(inside if band.inside else negated(a, inside), shape))
    number, other = (constant(a, each, (), dtype) for each in (band.inside, band.outside))
    return proven(a.reshape(proven(where(a, inside, number, other, dtype)), shape))
