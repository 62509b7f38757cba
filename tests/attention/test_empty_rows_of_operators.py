"""Queries that see no key, in every spelling of a softmax, before each operator that attends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import Example, testing
from fusion.testing import captured
from tests.examples import listed_rows
from tests.examples import sparse_attention as sparse
from tests.examples.inputs import Inputs, tensors
from tests.examples.sparse_attention import DR, B, C, D, N, S, T, keys_values

from .test_empty_rows import ALL, HOW, SWALLOWED, Masked, Weights, as_in_float64

Form = Callable[[Weights, Masked], tuple[Callable[..., Any], Inputs]]


def random(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3))


GONE = random(B, 1, S, T) < 0.4
GONE[0, ..., 0], GONE[1, :, :2], GONE[1, :, 2:, 1] = False, True, False
PLACES = random(B, S, T).argsort(-1)[..., :4].masked_fill(GONE[:, 0, :, :4], -1)


def of_latent(weights: Weights, masked: Masked) -> tuple[Callable[..., Any], Inputs]:
    """Keys and values that are expanded from a latent."""

    def attend(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, gone: Tensor) -> Tensor:
        k, v = keys_values(latent, rope, up)
        return weights(masked(q @ k.mT * sparse.SCALE, gone), gone).to(v.dtype) @ v

    return attend, sparse.latents(S, T, GONE)


def absorbed(weights: Weights, masked: Masked) -> tuple[Callable[..., Any], Inputs]:
    """Projections that the model absorbs."""

    def attend(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, gone: Tensor) -> Tensor:
        up_key, up_value = up.unflatten(0, (N, -1)).split((D, sparse.E), 1)
        nope, rotated = q.split((D, DR), -1)
        scores = torch.einsum("bnsc,btc->bnst", torch.einsum("bnsd,ndc->bnsc", nope, up_key), latent)
        scores = (scores + torch.einsum("bnsr,btr->bnst", rotated, rope)) * sparse.SCALE
        seen = torch.einsum("bnst,btc->bnsc", weights(masked(scores, gone), gone).to(latent.dtype), latent)
        return torch.einsum("bnsc,nec->bsne", seen, up_value)

    return attend, sparse.latents(S, T, GONE)


def parts(weights: Weights, masked: Masked) -> tuple[Callable[..., Any], Inputs]:
    """Attention with the log-sum-exps of its scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor, gone: Tensor) -> tuple[Tensor, Tensor]:
        scores = masked(q @ k.mT * 0.25, gone)
        return weights(scores, gone).to(v.dtype) @ v, scores.logsumexp(-1)

    return attend, tensors((B, N, S, 16), (B, N, T, 16), (B, N, T, 16), GONE)


def listed(weights: Weights, masked: Masked) -> tuple[Callable[..., Any], Inputs]:
    """Rows that a list names, with -1 where none is."""

    def attend(q: Tensor, kv: Tensor, places: Tensor) -> Tensor:
        rows, gone = listed_rows.taken(kv, places), (places < 0).unsqueeze(2)
        scores = masked(torch.einsum("bsnd,bskd->bsnk", q, rows) * listed_rows.SCALE, gone)
        return torch.einsum("bsnk,bskc->bsnc", weights(scores, gone).to(q.dtype), rows[..., :C])

    return attend, tensors((B, S, N, C + DR), (B, T, C + DR), PLACES)


def packed(weights: Weights, masked: Masked) -> tuple[Callable[..., Any], Inputs]:
    """Sequences in one row, of which some tokens belong to none."""

    def attend(q: Tensor, k: Tensor, v: Tensor, owners: Tensor) -> Tensor:
        gone = ((owners[:, None] != owners) | (owners < 0))[None]
        scores = masked(torch.einsum("snd,tnd->nst", q, k) * 0.25, gone)
        return torch.einsum("nst,tnd->snd", weights(scores, gone).to(v.dtype), v)

    return attend, tensors((8, N, 16), (8, N, 16), (8, N, 16), torch.tensor([0, 0, 0, 1, 1, -1, -1, 2]))


FORMS: dict[str, Form] = {each.__name__: each for each in (of_latent, absorbed, parts, listed, packed)}


@pytest.mark.rotates
@pytest.mark.parametrize("how", ["-inf", "the least", "-1e4"])
@pytest.mark.parametrize("name", ALL | SWALLOWED)
@pytest.mark.parametrize("form", FORMS)
def test_every_spelling_before_every_operator(form: str, name: str, how: str):
    attend, inputs = FORMS[form]((ALL | SWALLOWED)[name], HOW[how])
    t = testing.trial_of(captured(Example("", attend, inputs), torch.float32))
    assert not t.outcome.failures, t.outcome.failures
    if t.outcome.chosen:
        as_in_float64(t)
