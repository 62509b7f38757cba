"""A claimed rotation is the one that is computed, in random spellings; what only resembles one is told apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion.graph import Algebra, Reading, Value
from patterns.rotary.read import rotation
from tests.analysis.test_lanes import SIZE, computed, leaf

ORDERS = ("half", "interleaved")


def pair(order: str, side: int, a: Algebra, x: Value) -> Value:
    size = int(x.shape[-1])
    return (
        a.slice(x, -1, side * size // 2, (side + 1) * size // 2) if order == "half" else a.slice(x, -1, side, size, 2)
    )


def join(order: str, a: Algebra, first: Value, second: Value) -> Value:
    if order == "half":
        return a.cat([first, second], -1)
    lead, size = first.shape[:-1], int(first.shape[-1])
    return a.reshape(a.cat([a.reshape(each, (*lead, size, 1)) for each in (first, second)], -1), (*lead, 2 * size))


def rotated(a: Algebra, x: Value, cos: Value, sin: Value, source: str, result: str, sign: float = 1.0) -> Value:
    first, second = pair(source, 0, a, x), pair(source, 1, a, x)
    low = a.add(a.mul(first, cos), a.scale(a.mul(second, sin), -sign))
    high = a.add(a.mul(second, cos), a.scale(a.mul(first, sin), sign))
    return join(result, a, low, high)


@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("result", ORDERS)
@given(batch=st.sampled_from([(2, 3), (1,), (2, 4, 3)]), half=st.integers(1, 6), scale=st.sampled_from([1.0, 0.5, 3.0]))
@settings(max_examples=25, deadline=None)
def test_a_claimed_rotation_is_the_one_that_is_computed(source, result, batch, half, scale):
    a = Algebra()
    (x, data), (cos, c), (sin, s) = (
        leaf(a, name, *shape, seed=seed)
        for seed, (name, shape) in enumerate((("x", (*batch, 2 * half)), ("cos", (half,)), ("sin", (half,))))
    )
    value = rotated(a, x, a.scale(cos, scale), a.scale(sin, scale), source, result)
    reading = rotation(a, value)
    if half == 1 and isinstance(reading, Reading):  # one pair: both orders are the same
        source, result = reading.captures["source"], reading.captures["result"]
    assert isinstance(reading, Reading)
    assert (reading.op, reading.captures["source"], reading.captures["result"]) == ("rotation", source, result)
    numbers = {x: data, cos: c, sin: s}
    q, wide_cos, wide_sin = (computed(reading.captures[name], numbers) for name in ("x", "cos", "sin"))
    assert wide_cos.shape[-1] == 2 * half
    claimed = reference(q, wide_cos, wide_sin, source, result)
    torch.testing.assert_close(claimed, computed(value, numbers), rtol=1e-12, atol=1e-12)


def reference(x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str) -> Tensor:
    """The rotation that a reading stands for: tables are read at the lanes of the result."""
    half = x.shape[-1] // 2
    lanes = {"half": (slice(None, half), slice(half, None)), "interleaved": (slice(0, None, 2), slice(1, None, 2))}
    (x1, x2), out = (x[..., each] for each in lanes[source]), torch.empty_like(x)
    low, high = lanes[result]
    out[..., low] = x1 * cos[..., low] - x2 * sin[..., low]
    out[..., high] = x2 * cos[..., high] + x1 * sin[..., high]
    return out


@pytest.mark.parametrize("source", ORDERS)
def test_the_negative_angle_is_told_apart(source):
    a = Algebra()
    x, cos, sin = (leaf(a, name, *shape)[0] for name, shape in (("x", (3, 8)), ("cos", (4,)), ("sin", (4,))))
    assert rotation(a, rotated(a, x, cos, sin, source, source, sign=-1.0)) == (
        "the sine has the opposite sign: this rotates by the negative angle"
    )


@given(st.permutations(range(SIZE)))
@settings(max_examples=60, deadline=None)
def test_a_permuted_partner_is_a_rotation_only_if_it_is_paired(order):
    """x·cos + (permutation of x, signed)·sin: a rotation for the two pairings alone."""
    a = Algebra()
    x, cos, sin = (leaf(a, name, 3, SIZE)[0] for name in ("x", "cos", "sin"))
    half = SIZE // 2
    sign = [-1 if lane < half else 1 for lane in range(SIZE)]
    partner = a.cat([a.scale(a.slice(x, -1, lane, lane + 1), s) for lane, s in zip(order, sign, strict=True)], -1)
    outcome = rotation(a, a.add(a.mul(x, cos), a.mul(partner, sin)))
    paired = list(order) == [*range(half, SIZE), *range(half)]
    assert isinstance(outcome, Reading) == paired
