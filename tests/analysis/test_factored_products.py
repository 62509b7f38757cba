"""Factors of products are peeled below floats alone: whole numbers wrap round, and float8 rounds."""

from __future__ import annotations

import pytest
import torch

from fusion.analysis.factored_products import joined, peeled
from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul, swapped


def product(a: Algebra, name: str, dtype: torch.dtype, held: torch.dtype | None = None) -> Value:
    """q kᵀ [2, 3, 4, 5] of inputs of a dtype, perhaps of their casts."""
    sides = [a.make("input", (), (name + side, 0), (2, 3, rows, 8), dtype) for side, rows in (("q", 4), ("k", 5))]
    q, k = (a.cast(each, held or dtype) for each in sides)
    made = matmul(a, q, swapped(a, k))
    assert made is not None
    return made


def test_a_product_of_floats_below_factors():
    a = Algebra()
    x = product(a, "x", torch.bfloat16)
    found = peeled(a, a.scale(a.reshape(a.cast(x, torch.float32), (6, 4, 5)), 0.5), "matmul")
    assert found is not None
    assert (found.value, found.number, found.steps) == (x, 0.5, (("reshape", (6, 4)),))


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
