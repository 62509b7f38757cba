"""Which numbers and truths stand at the positions of a mask, and what is left as it is."""

from __future__ import annotations

import math
from types import MappingProxyType

import pytest
import torch

from fusion.analysis.affine import Affine, Formula, Leaf, negation
from fusion.analysis.constant_folding import Folder
from fusion.analysis.mask_formulas import Positions
from fusion.graph import Algebra, Value
from fusion.graph.comparisons import constant

i64, f32, b8 = torch.int64, torch.float32, torch.bool


def given(a: Algebra, name: str, dtype: torch.dtype) -> Value:
    return a.make("input", (), (name, 0), (4, 3), dtype)


def alone(x: Value, places: Positions) -> Affine:
    """The element of `x` at each position, not followed any further."""
    return Affine(MappingProxyType({Leaf(x, places.of(x)): 1}))


@pytest.mark.parametrize("dtype", [f32, b8], ids=str)
def test_numbers_that_are_cast_to_whole_ones_are_followed_no_further(dtype: torch.dtype):
    a, places = Algebra(), Positions((4, 3), Folder())
    cast = a.cast(given(a, "x", dtype), i64)
    assert places.affine(cast, places.of(cast)) == alone(cast, places)


def test_a_sum_is_one_number():
    """It is written as a mean times its count, of which the mean of whole numbers is none."""
    a, places = Algebra(), Positions((4, 3), Folder())
    summed = a.sum(given(a, "x", i64), (-1,))
    assert summed is not None
    assert places.affine(summed, places.of(summed)) == alone(summed, places)


def test_a_sum_is_true_where_it_is_not_0():
    a, places = Algebra(), Positions((4, 3), Folder())
    x = a.add(given(a, "x", i64), given(a, "y", i64))
    assert x is not None
    truth = places.truth(a.cast(x, b8), places.origin)
    assert truth == negation(("eq", places.affine(x, places.origin)))


def test_a_mask_that_is_added_is_true_where_it_hides():
    """0 shows a key, and is false."""

    def shows(mask: Value, at: object) -> Formula | None:
        return ("le", places.axis(0)) if mask.op == "input" else None

    a, places = Algebra(), Positions((4, 3), Folder(), shows)
    shown = ("le", places.axis(0))
    assert places.truth(a.cast(given(a, "x", i64), b8), places.origin) == shown
    assert places.truth(a.cast(given(a, "y", f32), b8), places.origin) == negation(shown)


def test_two_of_three_dims_that_are_indexed_are_followed_no_further():
    a = Algebra()
    source = a.make("input", (), ("x", 0), (4, 3, 5), i64)
    for axes, shape in (((0, 1), (3, 5)), ((1,), (4, 3, 5))):
        indices = [a.make("arange", (), (0, 1), (3,), i64) for _ in axes]
        places = Positions(shape, Folder())
        indexed = a.make("index", (source, *indices), axes, shape, i64)
        followed = Affine(MappingProxyType({Leaf(source, places.origin): 1}))
        assert places.affine(indexed, places.origin) == (followed if len(axes) == 1 else alone(indexed, places))


@pytest.mark.parametrize(
    ("numbers", "picked"),
    [((0.0, -math.inf), True), ((-math.inf, -1.0), False), ((0.0, -math.inf, -1.0), False), ((0.0,), False)],
)
def test_entries_of_a_table_are_told_apart_where_it_has_two_numbers_and_one_is_0(numbers, picked):
    a, places = Algebra(), Positions((4, 3), Folder())
    table = a.cat([a.make("full", (), (each,), (2,), f32) for each in numbers], 0)
    entry = a.make("index", (table, given(a, "i", i64)), (0,), (4, 3), f32)
    found = places.constants(entry, places.origin)
    stands = ("is", Leaf(entry, places.origin))
    assert found == ({0.0: negation(stands), -math.inf: stands} if picked else None)


def test_entries_that_two_indices_name_are_followed_no_further():
    a, places = Algebra(), Positions((4, 3), Folder())
    table = a.make("full", (), (0.0,), (2, 2), f32)
    entry = a.make("index", (table, given(a, "i", i64), given(a, "j", i64)), (0,), (4, 3), f32)
    assert places.constants(entry, places.origin) is None


@pytest.mark.parametrize(("first", "goes_on"), [(-1, True), (0, False)])
def test_numbers_that_are_joined_are_one_expression_where_they_go_on(first: int, goes_on: bool):
    a, places = Algebra(), Positions((5,), Folder())
    counted = a.make("arange", (), (0, 1), (4,), i64)
    joined = a.make("cat", (constant(a, first, (1,)), counted), (0,), (5,), i64)
    one = places.affine(joined, places.origin)
    assert (one == places.axis(0).plus(-1)) == goes_on
    assert goes_on or one == alone(joined, places)
