"""Numbers are folded as torch computes them, or not at all."""

from __future__ import annotations

import torch

from fusion.analysis.constant_folding import Folder
from fusion.graph import Algebra, Value


def counted(a: Algebra, first: int, step: int, size: int, factor: float) -> Value:
    """first · factor, (first + step) · factor, … in float32."""
    numbers = a.make("arange", (), (first, step), (size,), torch.int64)
    return a.scale(a.cast(numbers, torch.float32), factor)


def test_a_factor_that_float32_rounds_is_another_one():
    """There 25 · 0.3 is 7.5000005."""
    a = Algebra()
    assert Folder().fold(counted(a, 25, 20, 2, 0.3)) is None
    assert (torch.tensor([25.0, 45.0]) * 0.3 != torch.tensor([7.5, 13.5])).all()


def test_fractions_are_cut_off_and_whole_numbers_wrap_round():
    a = Algebra()
    halves = Folder().fold(a.cast(counted(a, 0, 1, 4, 0.5), torch.int64))
    bytes_ = Folder().fold(a.cast(a.make("arange", (), (255, 1), (2,), torch.int64), torch.uint8))
    assert halves is not None
    assert bytes_ is not None
    assert (halves.tolist(), bytes_.tolist()) == ([0, 0, 1, 1], [255, 0])


def power_of(a: Algebra, base: float, x: Value) -> Value:
    """Base ** x."""
    return a.make("power_of", (x,), (base,), x.shape, x.dtype)


def test_powers_of_two_are_what_they_are():
    """Slopes of four heads: 1 / 2 ** 2, 1 / 2 ** 4, …"""
    a = Algebra()
    slopes = Folder().fold(a.power(power_of(a, 2.0, counted(a, 2, 2, 4, 1)), -1))
    assert slopes is not None
    assert slopes.tolist() == [0.25, 0.0625, 2**-6, 2**-8]


def test_powers_that_are_rounded_are_not_known():
    """Slopes of sixteen heads hold a root of 2; a third of 2 is as inexact."""
    a = Algebra()
    assert Folder().fold(power_of(a, 2.0, counted(a, 1, 1, 4, 0.5))) is None
    assert Folder().fold(power_of(a, 3.0, counted(a, 1, 1, 4, 1))) is None
    assert Folder().fold(a.power(counted(a, 2, 1, 2, 1), -1)) is None
    assert Folder().fold(a.power(counted(a, 2, 0, 2, 1), 0.5)) is None


def test_rows_are_written_from_a_known_position_on_into_the_first_sequences():
    a = Algebra()
    cache, rows = (a.make("full", (), (float(n),), (n, n), torch.float32) for n in (4, 2))
    for start in (0, 1, 2):
        number = a.make("number", (cache,), (start,), (), torch.int64)
        made = Folder().fold(a.make("write", (cache, rows, number), (1,), (4, 4), torch.float32))
        want = torch.full((4, 4), 4.0)
        want[:2, start : start + 2] = 2.0
        assert made is not None
        assert made.tolist() == want.tolist()
    beyond = a.make("number", (cache,), (3,), (), torch.int64)
    assert Folder().fold(a.make("write", (cache, rows, beyond), (1,), (4, 4), torch.float32)) is None
    given = a.make("input", (), ("place", 0), (), torch.int64)
    assert Folder().fold(a.make("write", (cache, rows, given), (1,), (4, 4), torch.float32)) is None
