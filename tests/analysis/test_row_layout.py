"""Rows are followed through reshapes and permutes, and what stands in other places is not taken for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sympy import Symbol

from fusion.analysis.row_layout import (
    arranged,
    arrangement,
    broadcast_arranged,
    named,
    once,
    rearranged,
    row_step,
    unwidened,
)
from fusion.graph import Algebra, Value

from .numbers import leaf
from .test_exponentials import computed

SIZE, MORE = (Symbol(name, positive=True, integer=True) for name in "st")


@pytest.mark.parametrize(
    ("shape", "into"),
    [
        ((6,), (2, 3)),
        ((2, 3), (6,)),
        ((4, 3), (2, 6)),
        ((SIZE, 4), (SIZE, 2, 1, 2)),
        ((1, 4), (4, 1)),
        ((4, 1), (1, 4)),
        ((4, 0), (0,)),
        ((2 * SIZE,), (2, SIZE)),
        ((SIZE * 4, 6), (SIZE, 4, 6)),
        ((SIZE, 4), (2 * SIZE, 2)),
        ((SIZE * MORE, 4), (MORE, SIZE, 4)),
    ],
)
def test_rows_are_split_and_joined(shape: Any, into: Any):
    assert arrangement(shape, [("reshape", into)]) is not None


@pytest.mark.parametrize(
    ("shape", "into"),
    [
        ((4, 6), (3, 8)),
        ((SIZE, 4), (4, SIZE)),
        ((2 * SIZE,), (4, SIZE)),
        ((SIZE,), (2, SIZE)),
        ((SIZE, MORE), (MORE, SIZE)),
        ((SIZE + 4,), (4, SIZE)),
        ((4, 0), (0, 5)),
        ((0, 4), (0,)),
        ((0, 3), (3, 0)),
    ],
)
def test_rows_that_are_broken_elsewhere_are_not_followed(shape: Any, into: Any):
    assert arrangement(shape, [("reshape", into), ("permute", range(len(into)))]) is None


def test_of_several_sizes_without_a_name_none_is_told():
    steps = [("reshape", (SIZE, MORE, 4))]
    assert named(steps, {}) is None
    assert named(steps, {SIZE: "S"}) == (("reshape", ("S", -1, 4)),)


def test_a_number_has_no_rows():
    a = Algebra()
    one, _ = leaf(a, "one")
    assert row_step(a.reshape(one, (1, 1))) is None
    assert row_step(a.reshape(leaf(a, "x", 1)[0], ())) is None


def test_what_has_other_rows_is_not_carried():
    a = Algebra()
    found = arrangement((2, 3), [("permute", (1, 0))])
    assert found is not None
    for lead, known in (((2, 3), 1), ((1, 3), 1), ((2, 1), 1), ((2,), 0), ((2, 3, 1), 0), ((2, 2), 0)):
        assert (rearranged(a, leaf(a, "x", *lead, 4, 5)[0], found, found.before, found.after) is not None) == known


def test_what_all_rows_share_and_repeat_is_carried_as_it_is():
    a = Algebra()
    found = arrangement((2, 3), [("reshape", (6,))])
    assert found is not None
    x, numbers = leaf(a, "x", 1, 1, 5)
    made = rearranged(a, a.expand(x, (1, 4, 5)), found, found.after, found.before)
    assert made is not None
    assert torch.equal(computed(made, {x: numbers}), numbers.expand(1, 1, 4, 5))


@pytest.mark.parametrize(
    ("have", "steps", "becomes"),
    [
        ((1, 1, 4, 5), [("reshape", (6, 4))], (1, 4, 5)),
        ((2, 3, 1, 5), [("reshape", (6, 4))], (6, 1, 5)),
        ((2, 1, 1, 5), [("reshape", (6, 4))], (6, 1, 5)),
        ((3, 1, 5), [("reshape", (6, 4))], (6, 1, 5)),
        ((4, 5), [("permute", (1, 0, 2)), ("reshape", (6, 4))], (1, 4, 5)),
        ((2, 1, 4, 5), [("permute", (1, 2, 0)), ("reshape", (3, 8))], (1, 8, 5)),
        ((2, 1, 4, 1), [("reshape", (6, 2, 2))], (6, 2, 2, 5)),
        ((1, 1, 1, 5), [("reshape", (24,))], (1, 5)),
        ((1, 1, 4, 5), [("reshape", (8, 3))], (8, 3, 5)),
    ],
)
def test_what_broadcasts_is_repeated_no_more_than_rows_are_mixed(have: Any, steps: Any, becomes: Any):
    a, rows = Algebra(), (2, 3, 4, 5)
    x, numbers = leaf(a, "x", *have)
    found = broadcast_arranged(a, x, rows, steps)
    assert found.shape == becomes
    wide, same = (computed(each, {x: numbers}) for each in (arranged(a, a.expand(x, rows), steps), found))
    torch.testing.assert_close(same.expand_as(wide), wide, rtol=0, atol=0)


def test_rows_of_one_are_in_no_dim_of_those_behind():
    a = Algebra()
    x, numbers = leaf(a, "x", 1, 4, 6, 5)
    found = broadcast_arranged(a, x, x.shape, [("permute", (0, 2, 1)), ("reshape", (6, 4))])
    assert torch.equal(computed(found, {x: numbers}), numbers[0].transpose(0, 1))


def test_repeated_heads_are_taken_once_where_no_head_is_cut():
    a = Algebra()
    kv, _ = leaf(a, "kv", 2, 2, 1, 6, 4)
    wide = a.reshape(a.expand(kv, (2, 2, 3, 6, 4)), (2, 6, 6, 4))
    assert once(a, wide) is a.reshape(kv, (2, 2, 6, 4))
    assert once(a, a.cut(wide, 2, 0, 3)) is a.cut(a.reshape(kv, (2, 2, 6, 4)), 2, 0, 3)
    for heads in ((0, 2), (0, 3, 2)):
        assert once(a, a.cut(wide, 1, *heads)) is a.cut(wide, 1, *heads)
    rows = a.expand(leaf(a, "rows", 1, 6, 4)[0], (3, 6, 4))
    assert once(a, rows) is rows
    for other in (a.reshape(a.expand(kv, (2, 2, 3, 6, 4)), (2, 36, 4)), a.reshape(wide, (12, 6, 4))):
        assert once(a, other) is other


@pytest.mark.parametrize(
    ("held", "to", "narrow"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.int8, torch.float32, False),
        (torch.float32, torch.int8, False),
    ],
)
def test_only_what_was_widened_is_seen_before_its_cast(held: torch.dtype, to: torch.dtype, narrow: bool):
    a = Algebra()
    x = a.make("input", (), ("x",), (2, 3), held)

    def turned(each: Value) -> Value:
        return a.permute(each, (1, 0))

    assert (unwidened(a, turned(a.cast(x, to))) is turned(x)) == narrow
    assert (unwidened(a, turned(a.cast(x, to)), held) is turned(x)) == narrow
    assert unwidened(a, turned(a.cast(x, to)), torch.float16) is turned(a.cast(x, to))
