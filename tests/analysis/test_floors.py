"""What the sum of some of the largest of a softmax is no less than, and what is lost beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sympy import Symbol

from fusion.analysis.lower_bounds import absorbs, is_above
from fusion.graph import Algebra, Value

K, E = 4, 32
SIZE = Symbol("s", positive=True, integer=True)


def best(
    a: Algebra,
    *,
    count: Any = K,
    experts: Any = E,
    empty: str = "nan",
    dim: int = -1,
    dtype: torch.dtype = torch.float32,
) -> Value:
    """The largest of a softmax over rows [2, 3, E]."""
    x = a.make("input", (), ("x",), (2, 3, experts), dtype)
    shares = a.softmax(x, dim, empty)
    return a.make("largest", (shares,), (count,), (2, 3, count), dtype)


def test_a_sum_of_the_largest_is_no_less_than_their_part():
    a = Algebra()
    total = a.sum(best(a), [-1])
    assert total is not None
    assert is_above(total, 0.97 * K / E)
    assert not is_above(total, 0.99 * K / E)
    assert is_above(a.reshape(a.cast(a.cast(total, torch.bfloat16), torch.float32), (6, 1)), 1e-8)
    assert is_above(a.mean(a.reshape(best(a), (6, K)), [-1]), 0.97 / E)
    assert is_above(a.mean(best(a, count=SIZE), [-1]), 0.97 / E)
    assert not is_above(a.reshape(a.unary("cos", total), (6, 1)), -1.0)
    assert not is_above(a.unary("cos", total), 0.0)


@pytest.mark.parametrize(
    "made",
    [
        lambda a: a.scale(a.sum(best(a), [-1]), -1.0),
        lambda a: a.cast(a.cast(a.sum(best(a), [-1]), torch.int32), torch.float32),
        lambda a: a.mean(best(a), [1]),
        lambda a: a.mean(a.reshape(best(a), (3, 2 * K)), [-1]),
        lambda a: a.sum(best(a, count=0), [-1]),
        lambda a: a.mean(best(a, experts=SIZE), [-1]),
        lambda a: a.mean(best(a, empty="zero"), [-1]),
        lambda a: a.mean(best(a, dim=-2), [-1]),
        lambda a: a.mean(best(a, experts=2**15, dtype=torch.float16), [-1]),
        lambda a: a.cast(a.mean(best(a, experts=2**15), [-1]), torch.float16),
        lambda a: a.mean(a.slice(best(a), -1, 1, K), [-1]),
        lambda a: a.mean(a.cast(best(a), torch.int32), [-1]),
    ],
)
def test_of_other_sums_nothing_is_known(made):
    assert not is_above(made(Algebra()), 0.0)


def test_lost_is_what_float64_does_not_tell_either():
    a = Algebra()
    total = a.sum(best(a), [-1])
    assert total is not None
    half = torch.finfo(torch.float64).eps / 4 * K / E
    assert absorbs(total, 0.97 * half)
    assert not absorbs(total, 0.99 * half)
    assert absorbs(total, 1e-20)
    assert not absorbs(total, -1e-20)


def test_what_has_no_floor_may_lie_below_negative_numbers():
    a = Algebra()
    x = a.make("input", (), ("x", 0), (3, 4), torch.float32)
    for number in (-1e30, -5.0, 0.0, 5.0):
        assert not is_above(x, number)
        assert not is_above(a.scale(x, 2.0), number)
