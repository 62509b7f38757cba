"""Lanes that are written out several times over are seen below views of other dims, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.graph import Algebra, Value
from fusion.language.table_terms import unrepeated


def given(a: Algebra, *shape: int) -> Value:
    return a.make("input", (), ("x",), shape, torch.float32)


def written_out(a: Algebra, x: Value, times: int = 2) -> Value:
    """Each lane so many times over."""
    opened = a.expand(a.reshape(x, (*x.shape, 1)), (*x.shape, times))
    return a.reshape(opened, (*x.shape[:-1], x.shape[-1] * times))


def test_what_is_repeated_is_seen_below_views_of_other_dims():
    a = Algebra()
    x = given(a, 2, 3, 4)
    assert unrepeated(a, written_out(a, x), 2) is x
    assert unrepeated(a, written_out(a, x, 3), 3) is x
    assert unrepeated(a, a.reshape(written_out(a, x), (6, 8)), 2) is a.reshape(x, (6, 4))
    assert unrepeated(a, a.cut(written_out(a, x), 0, 1, 2), 2) is a.cut(x, 0, 1, 2)
    assert unrepeated(a, a.reshape(a.cut(written_out(a, x), 0, 1, 2), (3, 8)), 2) is a.reshape(
        a.cut(x, 0, 1, 2), (3, 4)
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda a, x: x,
        lambda a, x: a.reshape(x, (2, 12)),
        lambda a, x: a.cut(x, 0, 1, 2),
        lambda a, x: a.cut(written_out(a, x), 2, 1, 5),
        lambda a, x: a.reshape(written_out(a, x), (2, 24)),
        lambda a, x: a.reshape(written_out(a, x), (2, 3, 4, 2)),
        lambda a, x: written_out(a, x, 3),
        lambda a, x: a.cat([x, x], -1),
        lambda a, x: a.reshape(a.expand(a.reshape(x, (2, 3, 1, 4)), (2, 3, 2, 4)), (2, 3, 8)),
        lambda a, x: a.reshape(a.expand(a.reshape(x, (2, 3, 4, 1)), (5, 2, 3, 4, 2)), (5, 2, 3, 8)),
    ],
)
def test_other_lanes_are_not(other: Any):
    a = Algebra()
    assert unrepeated(a, other(a, given(a, 2, 3, 4)), 2) is None
