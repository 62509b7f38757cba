"""Sequences that stand behind positions in memory: the heads of all of them are those of one, and nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.testing import LEVELS, Level
from tests.engine.graphs import numbers
from tests.support.fused import launches

from .lowered import Form, lowerings, tried

S, B, N, M, D = 16, 3, 4, 2, 16
SHARED = torch.ones(S, S, dtype=torch.bool).tril(2)
OWN = torch.stack([torch.ones(S, S, dtype=torch.bool).tril(n) for n in range(B)])[:, None]


def lanes(positions: int = S, heads: int = N, seed: int = 0, sequences: int = B) -> Tensor:
    return numbers(positions, sequences, heads, D, seed=seed)


def given(dtype: torch.dtype, queries: int = S, keys: int = S, shared: int = M, sequences: int = B) -> list[Tensor]:
    made = lanes(queries, sequences=sequences), *(lanes(keys, shared, seed, sequences) for seed in (1, 2))
    return [each.to(dtype) for each in made]


def by_torch(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)
    return out.permute(2, 0, 1, 3).contiguous()


def by_many(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exps as well."""
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    scores = (q @ k.repeat_interleave(N // M, 1).mT).float() * D**-0.5
    out = scores.softmax(-1).to(v.dtype) @ v.repeat_interleave(N // M, 1)
    return out.permute(2, 0, 1, 3).contiguous(), scores.logsumexp(-1, keepdim=True)


FORMS: dict[str, tuple[Form, dict[str, int]]] = {
    "all": (by_torch, {}),
    "causal": (lambda q, k, v: by_torch(q, k, v, is_causal=True), {}),
    "a mask that is shared": (lambda q, k, v: by_torch(q, k, v, attn_mask=SHARED), {}),
    "another number of keys": (by_torch, dict(queries=4)),
    "a head of its own": (by_torch, dict(shared=N)),
    "one head of keys": (by_torch, dict(shared=1)),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_copied(name: str, level: Level):
    form, sizes = FORMS[name]
    t = tried(form, given(torch.bfloat16, **sizes), level)
    assert lowerings(t) == ["as_heads"]
    testing.means_what_it_says(t)
    if level == "composite" and name != "a mask that is shared":
        assert launches(t.fused) == 1


def test_log_sums_are_told_of_each_sequence():
    t = tried(by_many, given(torch.bfloat16))
    assert lowerings(t) == ["as_heads"]
    testing.means_what_it_says(t)


def by_hand(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """The same written out: torch's one call would not become several."""
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k.repeat_interleave(N // M, 2), v.repeat_interleave(N // M, 2)))
    scores = q @ k.mT * D**-0.5
    shares = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)
    return (shares @ v).permute(2, 0, 1, 3).contiguous()


def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Lanes of one tensor: sequences do not stand beside each other."""
    return by_hand(*torch.cat((q, k, v), dim=2).split((N, M, M), dim=2))


OTHERS: dict[str, tuple[Form, dict[str, int]]] = {
    "a mask of each sequence": (lambda q, k, v: by_hand(q, k, v, ~OWN), {}),
    "one query, which lies the same either way": (by_torch, dict(queries=1)),
    "one sequence": (by_torch, dict(sequences=1)),
    "lanes of one tensor": (apart, {}),
    "more heads than the operator takes": (by_hand, dict(sequences=80)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_put_one_beside_the_other(name: str):
    form, sizes = OTHERS[name]
    t = tried(form, given(torch.bfloat16, **sizes))
    assert lowerings(t) == ["batched"]
    testing.means_what_it_says(t)
