"""Masks that are written by assignments: 0 where a condition holds, a low number elsewhere, in either order."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import Example, testing
from fusion.testing import Trial
from patterns.attention.attention import Attention

from .test_empty_rows import LEAST, B, D, N, S, T, as_in_float64, fuses, hidden

INFINITE = -math.inf
Masked = Callable[[Tensor, Tensor], Tensor]
"""Scores [B, N, S, T] and where keys are seen [B, 1, S, T] to masked scores."""


def tried(masked: Masked) -> Trial:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return masked(q @ k.mT * D**-0.5, seen).softmax(-1) @ v

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        rows = (torch.randn(B, N, size, D, generator=generator).to(dtype) for size in (S, T, T))
        return *rows, ~hidden()

    return testing.trial(Attention(), Example("", attend, inputs), torch.float32)


def assigned(scores: Tensor, *parts: tuple[Tensor, float]) -> Tensor:
    """Scores with a mask of no defined numbers to which numbers are assigned where conditions hold."""
    mask = torch.empty(B, 1, S, T, dtype=scores.dtype)
    for condition, number in parts:
        mask[condition] = number
    return scores + mask


def put(scores: Tensor, *parts: tuple[Tensor, float]) -> Tensor:
    """The same by index_put."""
    mask = torch.empty(B, 1, S, T, dtype=scores.dtype)
    for condition, number in parts:
        mask = mask.index_put((condition,), torch.tensor(number, dtype=scores.dtype))
    return scores + mask


def by_numbers(scores: Tensor, seen: Tensor) -> Tensor:
    return assigned(scores, (seen.int() == 1, 0.0), (seen.int() == 0, INFINITE))


def copied(scores: Tensor, seen: Tensor) -> Tensor:
    mask = torch.zeros(B, 1, S, T, dtype=scores.dtype)
    return scores + mask.copy_(torch.where(seen, mask, INFINITE))


def less_than_one(scores: Tensor, seen: Tensor) -> Tensor:
    gone = 1.0 - seen.to(scores.dtype)
    return scores + gone.masked_fill(gone.bool(), LEAST)


def to_scores(scores: Tensor, seen: Tensor) -> Tensor:
    scores = scores.clone()
    scores[(~seen).expand_as(scores)] = INFINITE
    return scores


def by_positions(scores: Tensor, seen: Tensor) -> Tensor:
    """Causal, by contrary comparisons of whole numbers."""
    queries, keys = torch.arange(S)[:, None] + T - S, torch.arange(T)
    mask = torch.empty(S, T, dtype=scores.dtype)
    mask[keys <= queries], mask[keys > queries] = 0.0, INFINITE
    return scores + mask


COMPLEMENTARY: dict[str, Masked] = {
    "seen first": lambda s, seen: assigned(s, (seen, 0.0), (~seen, INFINITE)),
    "hidden first": lambda s, seen: assigned(s, (~seen, INFINITE), (seen, 0.0)),
    "by logical_not": lambda s, seen: assigned(s, (seen, 0.0), (seen.logical_not(), LEAST)),
    "by whole numbers": by_numbers,
    "by index_put": lambda s, seen: put(s, (seen, 0.0), (~seen, INFINITE)),
    "by masked_fill": lambda s, seen: s + torch.empty_like(s[:, :1]).masked_fill(seen, 0.0).masked_fill(~seen, LEAST),
    "by equal numbers": lambda s, seen: (
        s + seen.float().masked_fill(seen.float() == 0, INFINITE).masked_fill(seen.float() == 1, 0.0)
    ),
    "less than 1": less_than_one,
    "copied": copied,
    "to scores": to_scores,
    "by positions": by_positions,
}


@pytest.mark.parametrize("name", COMPLEMENTARY)
@pytest.mark.rotates(4)
def test_a_mask_of_contrary_assignments_is_told(name: str):
    t = tried(COMPLEMENTARY[name])
    assert fuses(t), t.outcome.refusals
    as_in_float64(t)


OTHERS: dict[str, Masked] = {
    "of which a part is not defined": lambda s, seen: (
        s + (s[:, :1] * 0 + 5).masked_fill(seen, 0.0).masked_fill(seen.roll(1, -1), INFINITE)
    ),
    "of which another number is left": lambda s, seen: (
        s + torch.full((B, 1, S, T), 5.0).masked_fill(seen & seen.roll(1, -1), 0.0).masked_fill(~seen, INFINITE)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_mask_of_other_assignments_keeps_its_meaning(name: str):
    testing.means_what_it_says(tried(OTHERS[name]))
