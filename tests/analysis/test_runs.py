"""Positions that count by one, from a start that is told, and others that do not."""

from __future__ import annotations

import torch

from fusion.analysis.consecutive_positions import Run, iota, run
from fusion.graph import Algebra, Value

LONG = torch.int64


def start(a: Algebra, name: str, *shape: int) -> Value:
    return a.make("input", (), (name,), shape, LONG)


def listed(a: Algebra, *numbers: int, shape: tuple[int, ...] | None = None) -> Value:
    return a.make("constant", (), (numbers,), (len(numbers),) if shape is None else shape, LONG)


def counted(a: Algebra, first: int = 0, step: int = 1) -> Value:
    return a.make("arange", (), (first, step), (4,), LONG)


def test_what_counts_by_one():
    a = Algebra()
    s, t, of_rows = start(a, "s"), start(a, "t", 1), start(a, "rows", 3, 1)
    assert run(a, counted(a, 2)) == Run(None, 2)
    assert run(a, listed(a, 3, 4, 5)) == Run(None, 3)
    assert run(a, a.shift(a.add(counted(a), s), 2)) == Run(s, 2)
    assert run(a, a.reshape(a.add(t, counted(a)), (1, 4))) == Run(a.reshape(t, ()), 0)
    assert run(a, a.add(counted(a, 1), of_rows)) == Run(a.reshape(of_rows, (3,)), 1)


def test_what_does_not_count_by_one():
    a = Algebra()
    s, t, each = start(a, "s"), start(a, "t"), start(a, "each", 4)
    assert iota(counted(a, 0, 2)) is None
    assert iota(listed(a, 5, shape=())) is None
    assert run(a, listed(a, 0, 1, 2, 3, shape=(2, 2))) is None
    for numbers in ((3, 5, 7), (3, 2, 1), (3, 4, 4)):
        assert iota(listed(a, *numbers)) is None
    for other in (a.add(a.add(counted(a), s), t), a.add(counted(a), each), a.scale(counted(a), 2), each):
        assert run(a, other) is None
    assert run(a, a.expand(a.add(counted(a), s), (3, 4))) is None
    assert run(a, a.expand(listed(a, 3), (4,))) is None
