"""No element of a value passes the magnitude that is told of it."""

from __future__ import annotations

import math

import torch

from fusion.analysis.upper_bounds import largest
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import proven


def positions(a: Algebra, first: int, size: int, dtype: torch.dtype = torch.float32) -> Value:
    """first, first + 1, … as floats."""
    return a.cast(a.make("arange", (), (first, 1), (size,), torch.int64), dtype)


def power_of(a: Algebra, base: float, x: Value) -> Value:
    """Base ** x."""
    return a.make("power_of", (x,), (base,), x.shape, x.dtype)


def test_slopes_times_positions():
    a = Algebra()
    bias = proven(a.mul(power_of(a, 0.7, positions(a, 1, 8)), positions(a, 0, 8)))
    assert 7 <= largest(bias) < 7.1
    assert 14 <= largest(a.scale(bias, -2)) < 14.1
    assert 7 <= largest(a.cast(bias, torch.float16)) < 7.1


def test_what_may_be_any_number_has_none():
    a = Algebra()
    given = a.make("input", (), ("x", 0), (8,), torch.float32)
    for unknown in (
        given,
        power_of(a, 1.5, positions(a, 1, 8)),
        power_of(a, 0.5, positions(a, -1, 8)),
        power_of(a, 0.5, given),
        a.mul(given, positions(a, 0, 8)),
        a.add(given, positions(a, 0, 8)),
    ):
        assert largest(proven(unknown)) == math.inf


def test_what_a_dtype_does_not_hold_is_infinite():
    a = Algebra()
    assert largest(positions(a, 0, 65505)) < 70000
    assert largest(positions(a, 0, 65505, torch.float16)) == math.inf
    assert largest(proven(a.mul(*[positions(a, 0, 300, torch.float16)] * 2))) == math.inf
