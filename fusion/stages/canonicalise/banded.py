"""Buffers that hold a band, read as if the graph computed it from positions."""

from __future__ import annotations

from typing import Any

import torch

from fusion.facts import Band
from fusion.graph import Algebra, Value
from fusion.graph.logic import compare, constant, moved, negated, pointwise, positions, where
from fusion.graph.proof import proof, proven


@proof
def banded(a: Algebra, band: Band, shape: tuple[Any, ...], dtype: torch.dtype) -> Value:
    """What a buffer [*ones, R, C] holds."""
    row, column = positions(a, shape[-2], 2, -2), positions(a, shape[-1], 2, -1)
    bounds = [] if band.low is None else [(proven(moved(a, row, band.low)), column)]
    bounds += [] if band.high is None else [(column, proven(moved(a, row, band.high)))]
    first, *others = (proven(compare(a, "le", *each)) for each in bounds)
    inside = proven(pointwise(a, "and", (first, *others), (), torch.bool)) if others else first
    if dtype is torch.bool:
        return proven(a.reshape(inside if band.inside else negated(a, inside), shape))
    number, other = (constant(a, each, (), dtype) for each in (band.inside, band.outside))
    return proven(a.reshape(proven(where(a, inside, number, other, dtype)), shape))
