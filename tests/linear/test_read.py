"""A linear layer is read with all that is added to it, and multiplied by what its weight holds."""

from __future__ import annotations

import pytest
import torch

from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul, swapped
from patterns.kit.linear_layers import linear


def layer(a: Algebra, *shape: int) -> tuple[Value, Value, Value]:
    """x, W and x Wᵀ."""
    x, weight = (a.make("input", (), (name, 0), size, torch.float32) for name, size in (("x", shape), ("w", (5, 4))))
    product = matmul(a, x, swapped(a, weight))
    assert product is not None
    return x, weight, product


def plus(a: Algebra, value: Value, *names: str) -> Value:
    for name in names:
        found = a.add(value, a.make("input", (), (name, 0), (5,), torch.float32))
        assert found is not None
        value = found
    return value


@pytest.mark.parametrize("names", [(), ("b",)])
def test_a_bias_belongs_to_a_layer(names: tuple[str, ...]):
    a = Algebra()
    x, weight, product = layer(a, 2, 3, 4)
    found = linear(a, {}, plus(a, product, *names))
    assert found is not None
    assert found[:2] == (x, weight)
    assert (found[2] is not None) == bool(names)


def test_what_differs_from_row_to_row_is_no_bias():
    a = Algebra()
    product = layer(a, 2, 3, 4)[2]
    for shape in ((2, 3, 5), (3, 1), (1,)):
        other = a.add(product, a.make("input", (), ("r", 0), shape, torch.float32))
        assert other is not None
        assert linear(a, {}, other) is None


def test_of_two_biases_none_is_lost():
    a = Algebra()
    assert linear(a, {}, plus(a, layer(a, 2, 3, 4)[2], "b", "c")) is None


@pytest.mark.parametrize(("names", "held", "is_one"), [((), True, True), ((), False, False), (("b",), True, False)])
def test_a_number_outside_is_that_of_a_weight_of_the_model(names: tuple[str, ...], held: bool, is_one: bool):
    a = Algebra()
    _, weight, product = layer(a, 2, 3, 4)
    places = {a.scale(weight, 2.0): ()} if held else {}
    assert (linear(a, places, a.scale(plus(a, product, *names), 2.0)) is not None) == is_one
