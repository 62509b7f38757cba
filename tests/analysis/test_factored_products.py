"""Factors of products are peeled below floats alone: whole numbers wrap round, and float8 rounds."""

from __future__ import annotations

import pytest
import torch

from fusion.analysis.factored_products import (
    factors_of,
    joined,
    peeled,
    product_of,
    scaled_int8,
    scaled_sum,
    weighted_sum,
)
from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul, swapped


def made(found: Value | None) -> Value:
    assert found is not None
    return found


def product(a: Algebra, name: str, dtype: torch.dtype, held: torch.dtype | None = None) -> Value:
    """q kᵀ [2, 3, 4, 5] of inputs of a dtype, perhaps of their casts."""
    sides = [a.make("input", (), (name + side, 0), (2, 3, rows, 8), dtype) for side, rows in (("q", 4), ("k", 5))]
    q, k = (a.cast(each, held or dtype) for each in sides)
    return made(matmul(a, q, swapped(a, k)))


def test_a_product_of_floats_below_factors():
    a = Algebra()
    x = product(a, "x", torch.bfloat16)
    found = peeled(a, a.scale(a.reshape(a.cast(x, torch.float32), (6, 4, 5)), 0.5), "matmul")
    assert found is not None
    assert (found.value, found.number, found.steps) == (x, 0.5, (("reshape", (6, 4)),))


def test_a_factor_lies_as_the_rows_below_it():
    a = Algebra()
    x = product(a, "x", torch.float32)
    rows, more = (a.make("input", (), (name, 0), shape, torch.float32) for name, shape in (
        ("f", (3, 2, 4, 1)), ("g", (7, 2, 3, 4, 1)),
    ))  # fmt: skip
    found = peeled(a, made(a.mul(a.permute(x, (1, 0, 2, 3)), rows)), "matmul")
    assert found is not None
    assert found.factors == (a.permute(rows, (1, 0, 2, 3)),)
    assert peeled(a, made(a.mul(x, more)), "matmul") is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_a_product_of_whole_numbers_is_none_of_floats(dtype: torch.dtype):
    a = Algebra()
    scores = a.cast(product(a, "x", dtype), torch.float32)
    assert peeled(a, scores, "matmul") is None
    assert joined(a, scores, product(a, "y", torch.int8, torch.float32)) is None


def test_a_cast_to_float8_rounds():
    a = Algebra()
    rounded = a.cast(a.cast(product(a, "x", torch.float32), torch.float8_e4m3fn), torch.float32)
    assert peeled(a, rounded, "matmul") is None
    assert joined(a, rounded, product(a, "y", torch.float32)) is None


def test_whole_numbers_cast_to_booleans_are_none_that_were_rounded():
    a = Algebra()
    rounded = a.unary("round", product(a, "x", torch.float32))
    for dtype, kept in ((torch.int32, True), (torch.bool, False)):
        assert (peeled(a, a.cast(a.cast(rounded, dtype), torch.float32), "round") is not None) == kept


def joins(a: Algebra, left: Value, right: Value) -> bool:
    """Whether a sum is one product, of the width of both."""
    found = joined(a, left, right)
    assert found is None or found.below("scale", "permute", "reshape").arg.shape[-1] == 16
    return found is not None


def test_two_products_are_one_where_both_are_scaled_and_arranged_alike():
    a = Algebra()
    x, y = (product(a, name, torch.float32) for name in "xy")
    f = a.make("input", (), ("f", 0), (2, 3, 4, 1), torch.float32)
    assert joins(a, x, y)
    assert joins(a, a.scale(x, 2), a.scale(y, 2))
    assert joins(a, a.reshape(x, (6, 4, 5)), a.reshape(y, (6, 4, 5)))
    assert not joins(a, a.scale(x, 2), y)
    assert not joins(a, made(a.mul(x, f)), y)
    assert not joins(a, x, made(a.mul(y, f)))
    assert joins(a, x, product(a, "z", torch.int8, torch.float32))
    assert not joins(a, product(a, "u", torch.int8, torch.float32), product(a, "v", torch.int8, torch.float32))


def test_a_product_is_not_joined_with_one_of_which_heads_have_changed_places():
    a = Algebra()
    sides = [a.make("input", (), (name, 0), (3, 3, 4, 8), torch.float32) for name in ("q", "k", "r", "s")]
    x, y = (made(matmul(a, q, swapped(a, k))) for q, k in (sides[:2], sides[2:]))
    assert joins(a, x, y)
    assert not joins(a, a.permute(x, (1, 0, 2, 3)), y)


def test_products_with_one_matrix_are_joined_where_their_rows_are_arranged_otherwise():
    """One token of absorbed queries is [N, 1, C] by the product with W_UK, and [1, N, Dr] in the model."""
    a = Algebra()
    q, r, c, k = (
        a.make("input", (), (str(shape), 0), shape, torch.float32) for shape in ((4, 1, 8), (1, 4, 6), (8, 5), (6, 5))
    )
    x, y = a.reshape(made(matmul(a, q, c)), (1, 4, 5)), made(matmul(a, r, k))
    found = made(joined(a, x, y))
    keys = a.cat([swapped(a, each) for each in (c, k)], -1)
    assert found is made(matmul(a, a.cat([a.reshape(q, (1, 4, 8)), r], -1), swapped(a, keys)))
    several = a.make("input", (), ("several", 0), (4, 8, 5), torch.float32)
    assert joined(a, a.reshape(made(matmul(a, q, several)), (1, 4, 5)), y) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32], ids=str)
def test_a_product_is_not_joined_with_one_of_which_rows_were_split_otherwise(dtype: torch.dtype):
    a = Algebra()
    sides = [
        a.make("input", (), (name, 0), (*lead, 4, 8), held)
        for lead, held in (((1, 6), dtype), ((6, 1), torch.float32))
        for name in (f"q{lead}", f"k{lead}")
    ]
    products = (
        matmul(a, *(a.cast(each, torch.float32) for each in (q, swapped(a, k)))) for q, k in (sides[:2], sides[2:])
    )
    x, y = (a.reshape(made(each), (6, 4, 4)) for each in products)
    assert joined(a, x, y) is None


def test_products_of_several_dtypes_are_joined_as_they_were_widened():
    a = Algebra()
    x = product(a, "x", torch.bfloat16, torch.float32)
    assert made(joined(a, x, product(a, "y", torch.bfloat16, torch.float32))).arg.op == "cast"
    assert made(joined(a, x, product(a, "z", torch.float16, torch.float32))).arg.op == "cat"
    assert joined(a, product(a, "u", torch.bfloat16), product(a, "v", torch.float32)) is None


def test_a_sum_of_products_is_scaled_as_a_whole():
    a = Algebra()
    x, y = product(a, "x", torch.int8, torch.float32), product(a, "y", torch.float32)
    rows, one = (a.make("input", (), (name, 0), shape, torch.float32) for name, shape in (("f", (4, 1)), ("g", (1,))))
    whole = made(scaled_sum(a, made(a.mul(made(a.add(x, y)), rows))))
    assert whole.below("scale").arg.shape == (2, 3, 4, 16)
    assert scaled_sum(a, made(a.mul(x, rows))) is None
    for other in (a.mul(rows, one), a.mul(x, y), a.mul(a.unary("tanh", x), rows)):
        assert scaled_sum(a, made(other)) is None


def test_only_factors_of_all_go_to_the_values_of_a_weighted_sum():
    a = Algebra()
    shares = a.make("input", (), ("p", 0), (2, 4, 5), torch.float32)
    values = a.cast(a.make("input", (), ("v", 0), (2, 5, 8), torch.int8), torch.float32)
    one, rows = (a.make("input", (), (name, 0), shape, torch.float32) for name, shape in (("f", (1,)), ("g", (4, 1))))
    product = made(matmul(a, shares, values))
    whole = made(a.mul(product, one))
    found = weighted_sum(a, whole)
    assert found is not None
    assert found[0].args == (shares, a.mul(values, one))
    for other in (a.mul(product, rows), a.cast(a.cast(whole, torch.int32), torch.float32)):
        assert weighted_sum(a, made(other)) is None


# factors -----------------------------------------------------------------------------------------------------------


def test_factors_below_the_line_are_told_one_by_one():
    a = Algebra()
    x, y, z = (a.make("input", (), (name, 0), (4,), torch.float32) for name in "xyz")
    both = made(a.mul(x, y))
    assert factors_of(a, made(a.mul(z, a.power(both, -1)))) == [z, a.power(x, -1), a.power(y, -1)]
    for single in (a.scale(both, -1), a.power(both, 2), a.power(x, -1)):
        assert factors_of(a, single) == [single]


def test_factors_that_do_not_broadcast_have_no_product():
    a = Algebra()
    x, y, z = (a.make("input", (), (name, 0), (size,), torch.float32) for name, size in (("x", 3), ("y", 4), ("z", 1)))
    assert product_of(a, [x, y, z]) is None
    assert product_of(a, []) is None
    assert product_of(a, [x, z]) is a.mul(x, z)


def test_whole_numbers_of_8_bits_are_seen_through_views_of_whole_rows():
    a = Algebra()
    held = a.make("input", (), ("x", 0), (4, 4), torch.int8)
    rows = a.make("input", (), ("f", 0), (4, 1), torch.float32)
    x = made(a.mul(a.cast(held, torch.float32), rows))
    found = scaled_int8(a, a.cut(a.reshape(x, (2, 2, 4)), 0, 1, 2))
    assert found is not None
    assert found.base is a.cut(a.reshape(held, (2, 2, 4)), 0, 1, 2)
    assert found.rows is a.cut(a.reshape(rows, (2, 2, 1)), 0, 1, 2)
    for other in (a.permute(x, (1, 0)), a.cut(x, 1, 0, 2), a.reshape(x, (2, 8)), a.mul(x, a.permute(rows, (1, 0)))):
        assert scaled_int8(a, made(other)) is None
    assert scaled_int8(a, a.cast(held, torch.int32)) is None


def test_a_factor_that_repeats_whole_numbers_is_none_of_their_rows():
    a = Algebra()
    held = a.make("input", (), ("x", 0), (3, 8), torch.int8)
    f = a.make("input", (), ("f", 0), (2, 3, 1), torch.float32)
    assert scaled_int8(a, made(a.mul(a.cast(held, torch.float32), f))) is None
