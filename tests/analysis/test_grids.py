"""Floats that int8 stand for are found in one walk."""

from __future__ import annotations

import torch

from fusion.analysis.dequantised import grid_of
from fusion.graph import Algebra, Value


def chain(a: Algebra, x: Value, length: int) -> Value:
    """x (x + s), so many times over: x is reached in two ways at each step."""
    other = a.make("input", (), ("s", 0), (8,), torch.float32)
    for _ in range(length):
        x = a.make("mul", (x, a.make("add", (x, other), (), x.shape, x.dtype)), (), x.shape, x.dtype)
    return x


def test_what_is_reached_in_many_ways_is_read_once():
    a = Algebra()
    assert grid_of(a, chain(a, a.make("input", (), ("x", 0), (4, 8), torch.float32), 60)) is None
    whole = a.make("input", (), ("n", 0), (4, 8), torch.int8)
    found = grid_of(a, chain(a, a.cast(whole, torch.float32), 60))
    assert found is not None
    assert found.base is whole
