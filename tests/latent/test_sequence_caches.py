"""A loop over the sequences of a cached latent, which it writes and reads one by one, is one call over the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.graph.launches import is_launch
from tests.attention.lowered import tried
from tests.engine.graphs import numbers

pytestmark = pytest.mark.rotates(5)

B, N, T, D, R, C, E = 3, 4, 48, 128, 64, 512, 128
SCALE = (D + R) ** -0.5
LENGTHS = (37, 5, 48)


def given(queries: int = 1, joint: bool = False) -> list[Tensor]:
    """Queries, latents and rotated keys of the step, W_UK beside W_UV, and the caches, which may be one."""
    caches = ((C + R,),) if joint else ((C,), (R,))
    shapes = [(B, queries, N, D + R), (B, queries, C), (B, queries, R), (N * (D + E), C), *((B, T, *w) for w in caches)]
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    inputs[3] *= C**-0.5
    return [each.bfloat16() for each in inputs]


def ups(up: Tensor) -> tuple[Tensor, ...]:
    return up.view(N, D + E, C).split((D, E), 1)


def shares(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal towards the last key; scores [S, N, T]."""
    queries, _, keys = scores.shape
    mask = torch.full((queries, keys), -math.inf).triu(keys - queries + 1)
    return (scores.float() * SCALE + mask[:, None]).softmax(-1).to(dtype)


def attended(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=SCALE, **how)


def projected(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Attention of one sequence, q [S, N, D + R], over keys and values that are projected from `latent` [T, C]."""
    k, v = F.linear(latent, up).view(-1, N, D + E).split((D, E), -1)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1)), -1)
    return attended(*(each.transpose(0, 1)[None] for each in (q, k, v))).transpose(1, 2)


def by_einsum(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
    """Each sequence absorbs W_UK and multiplies by W_UV itself."""
    (up_k, up_v), outs, size = ups(up), [], q.shape[1]
    for b, n in enumerate(LENGTHS):
        latents[b, n - size : n], ropes[b, n - size : n] = latent[b], rope[b]
        nope, turn = q[b].split((D, R), -1)
        absorbed = torch.einsum("snd,ndc->snc", nope, up_k)
        scores = torch.einsum("snc,tc->snt", absorbed, latents[b, :n])
        scores = scores + torch.einsum("snr,tr->snt", turn, ropes[b, :n])
        context = torch.einsum("snt,tc->snc", shares(scores, q.dtype), latents[b, :n])
        outs.append(torch.einsum("snc,nec->sne", context, up_v))
    return torch.stack(outs)


def by_matmul(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
    """W_UK and W_UV are applied to the batch; heads first."""
    up_k, up_v = ups(up)
    nope, turn = q.transpose(1, 2).split((D, R), -1)
    absorbed, outs, size = nope @ up_k, [], q.shape[1]
    for b, n in enumerate(LENGTHS):
        latents[b, n - size : n], ropes[b, n - size : n] = latent[b], rope[b]
        scores = absorbed[b] @ latents[b, :n].T + turn[b] @ ropes[b, :n].T
        outs.append(shares(scores.transpose(0, 1), q.dtype).transpose(0, 1) @ latents[b, :n])
    return torch.stack(outs) @ up_v.mT


def expanded(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
    """Keys and values of each sequence are projected from what it has cached."""
    outs = []
    for b, n in enumerate(LENGTHS):
        latents[b, n - 1 : n], ropes[b, n - 1 : n] = latent[b], rope[b]
        outs.append(projected(q[b], latents[b, :n], ropes[b, :n], up))
    return torch.cat(outs)


def in_one_cache(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, cache: Tensor) -> Tensor:
    up_k, up_v = ups(up)
    nope, turn = q.transpose(1, 2).split((D, R), -1)
    absorbed, outs = torch.cat((nope @ up_k, turn), -1), []
    for b, n in enumerate(LENGTHS):
        cache[b, n - 1 : n] = torch.cat((latent[b], rope[b]), -1)
        keys = cache[b : b + 1, None, :n]
        outs.append(attended(absorbed[b : b + 1], keys, keys[..., :C], enable_gqa=True))
    return torch.cat(outs) @ up_v.mT


FORMS: dict[str, tuple[Callable[..., Tensor], list[Tensor], int]] = {
    "by einsum": (by_einsum, given(), 6),
    "chunks by einsum": (by_einsum, given(4), 6),
    "by matmul": (by_matmul, given(), 6),
    "expanded": (expanded, given(), 6),
    "in one cache": (in_one_cache, given(joint=True), 6),
}
"""What is written, its inputs, and the most launches: writes, W_UK, attention, and W_UV with a transpose."""


def launches(t: testing.Trial) -> int:
    return sum(is_launch(each) for each in t.fused.graph.nodes if "copy_" not in str(each.target))


def attentions(t: testing.Trial) -> list[Any]:
    return [each for each in t.fused.graph.nodes if "npu_fused_infer_attention_score" in str(each.target)]


@pytest.mark.parametrize("name", FORMS)
def test_they_are_one_call_over_the_latent(name: str):
    form, inputs, most = FORMS[name]
    t = tried(form, inputs)
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    (call,) = attentions(t)
    assert call.kwargs["actual_seq_kvlen"] == [*LENGTHS]
    assert launches(t) <= most


def of_another(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *caches: Tensor, order: Sequence[int]) -> Tensor:
    """The rotated keys of one sequence beside the latent of another."""
    latents, ropes = caches
    return by_einsum(q, latent, rope, up, latents, ropes[[*order]])


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1)])
def test_keys_of_two_sequences_are_no_keys_of_one(order: tuple[int, ...]):
    t = tried(partial(of_another, order=order), given())
    assert not t.outcome.failures
    testing.means_what_it_says(t)


def own_projection(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
    """Each sequence has a matrix of its own: no expression of the batch."""
    outs = []
    for b, n in enumerate(LENGTHS):
        latents[b, n - 1 : n], ropes[b, n - 1 : n] = latent[b], rope[b]
        outs.append(projected(q[b], latents[b, :n], ropes[b, :n], up * (b + 1)))
    return torch.cat(outs)


def summed_rows(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
    """Keys are mixed along positions, of which a sequence has its own number: no product of the batch."""
    outs = []
    for b in range(B):
        n, mix = 16, torch.tril(torch.ones(16, 16, dtype=q.dtype)) / 16
        latents[b, n - 1 : n], ropes[b, n - 1 : n] = latent[b], rope[b]
        outs.append(projected(q[b], mix @ latents[b, :n], ropes[b, :n], up))
    return torch.cat(outs)


@pytest.mark.parametrize("form", [own_projection, summed_rows], ids=lambda each: each.__name__)
def test_other_expressions_of_a_sequence_are_computed_as_they_are(form: Callable[..., Tensor]):
    t = tried(form, given())
    assert not t.outcome.failures
    testing.means_what_it_says(t)
