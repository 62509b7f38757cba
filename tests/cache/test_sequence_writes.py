"""Writes into the sequences of a cache one after the other are one write for all, where nothing forbids it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import testing
from tests.attention.lowered import tried
from tests.engine.graphs import numbers

pytestmark = pytest.mark.rotates(8)

B, M, T, D = 3, 2, 32, 128
LENGTHS = (17, 5, 32)
SLICES = ((0, 1), (1, 6), (6, 7))
Both = tuple[Tensor, Tensor]
Form = Callable[..., Both]


def at_numbers(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    for b, n in enumerate(LENGTHS):
        keys[b, :, n - 1 : n], values[b, :, n - 1 : n] = k[b], v[b]
    return keys * 2, values * 2


def at_tensors(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    for b in range(B):
        keys[b, :, at[b : b + 1]], values[b, :, at[b : b + 1]] = k[b], v[b]
    return keys * 2, values * 2


def positions_first(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    for b in range(B):
        keys[b].index_copy_(0, at[b : b + 1], k[b].transpose(0, 1))
        values[b].index_copy_(0, at[b : b + 1], v[b].transpose(0, 1))
    return keys * 2, values * 2


def several_each(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    for b, (start, end) in enumerate(SLICES):
        last = LENGTHS[b]
        keys[b, last - (end - start) : last], values[b, last - (end - start) : last] = k[start:end], v[start:end]
    return keys * 2, values * 2


def several_of_heads(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    for b, (start, end) in enumerate(SLICES):
        for cache, rows in ((keys, k), (values, v)):
            cache[b, :, LENGTHS[b] - (end - start) : LENGTHS[b]] = rows[start:end].transpose(0, 1)
    return keys * 2, values * 2


def given(*shapes: tuple[int, ...]) -> list[Tensor]:
    rows, cache = shapes
    made = [numbers(*shape, seed=seed).bfloat16() for seed, shape in enumerate((rows, rows, cache, cache))]
    return [*made, torch.tensor(LENGTHS) - 1]


HEADS_FIRST, POSITIONS_FIRST, ROWS, PACKED = (B, M, T, D), (B, T, M, D), (B, M, 1, D), (7, M, D)
FORMS: dict[str, tuple[Form, list[Tensor], int]] = {
    "at numbers": (at_numbers, given(ROWS, HEADS_FIRST), 2),
    "at tensors": (at_tensors, given(ROWS, HEADS_FIRST), 2),
    "positions first": (positions_first, given(ROWS, POSITIONS_FIRST), 1),
    "several each": (several_each, given(PACKED, POSITIONS_FIRST), 1),
    "several each, of heads": (several_of_heads, given(PACKED, HEADS_FIRST), 2),
}


def writes(t: testing.Trial) -> list[Any]:
    return [each for each in t.outcome.chosen if each.match.rule.name == "cache_write"]


@pytest.mark.parametrize("name", FORMS)
def test_all_sequences_are_written_at_once(name: str):
    form, inputs, calls = FORMS[name]
    t = tried(form, inputs)
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert len(writes(t)) == calls


def rows_of_the_write_before(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    """As the layers of a model write into one cache."""
    for b in range(B):
        keys[b, :, 3:4] = k[b]
        k = k + keys[b, :, 3:4].sigmoid()
    return keys * 2, k


def a_sequence_twice(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    for b in (0, 1, 2, 1):
        keys[b, :, at[b : b + 1]] = k[2 - b]
    return keys * 2, v


def all_but_one(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    for b in (0, 2):
        keys[b, :, at[b : b + 1]] = k[b]
    return keys * 2, v


def rows_out_of_order(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Both:
    """Their concatenation would be a copy."""
    for b in range(B):
        keys[b, :, at[b : b + 1]] = k[2 - b]
    return keys * 2, v


@pytest.mark.parametrize("form", [rows_of_the_write_before, a_sequence_twice, all_but_one, rows_out_of_order])
def test_others_stay_writes_of_one_sequence_each(form: Form):
    t = tried(form, given(ROWS, HEADS_FIRST))
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert len(writes(t)) == (4 if form is a_sequence_twice else 2 if form is all_but_one else B)
