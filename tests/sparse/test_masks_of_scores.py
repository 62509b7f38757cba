"""Attention behind a mask that the scores of an indexer make: by a list in other words, and by what is no list."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu

import fusion
from fusion.runtime.verification import relative_error

B, S, T, N, C, R, HEADS, D, LISTED = 2, 4, 256, 16, 512, 64, 8, 128, 32
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}
SPARSE, INDEXER = "npu::npu_sparse_flash_attention", "npu::npu_lightning_indexer"
Masked = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attention(masked: Masked) -> Callable[..., Tensor]:
    """Of absorbed queries over a latent, whose scores [B, N, S, T] are `masked` by those of an indexer."""

    def form(iq: Tensor, ik: Tensor, w: Tensor, q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        seen = torch.arange(T) <= torch.arange(T - S, T)[:, None]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        of_heads = relu(torch.einsum("bshd,btd->bhst", iq, ik)).to(wide) * w.to(wide).mT[..., None]
        index = of_heads.sum(1).masked_fill(~seen, -math.inf)
        products = torch.einsum("bshc,btc->bhst", q, latent) + torch.einsum("bshr,btr->bhst", q_rope, rope)
        weights = masked(products.to(wide) * 0.07, index, index.topk(LISTED, -1).indices, seen).softmax(-1)
        return torch.einsum("bhst,btc->bshc", weights.to(q.dtype), latent)

    return form


def scattered(index: Tensor, places: Tensor) -> Tensor:
    return torch.zeros_like(index).scatter(-1, places, 1.0)


def multiplied(scores: Tensor, index: Tensor, places: Tensor, seen: Tensor) -> Tensor:
    """As the first GPT-2 hides keys."""
    kept = (scattered(index, places) * seen)[:, None]
    return scores * kept - 1e9 * (1 - kept)


def compared(scores: Tensor, index: Tensor, places: Tensor, seen: Tensor) -> Tensor:
    kept = (places[..., None] == torch.arange(T)).sum(-2).bool() & seen
    return scores.masked_fill(~kept[:, None], -math.inf)


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    shapes = ((B, S, HEADS, D), (B, T, D), (B, S, HEADS), (B, S, N, C), (B, S, N, R), (B, T, C), (B, T, R))
    made = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=made).bfloat16().to(dtype) for shape in shapes)


@pytest.mark.parametrize("masked", [multiplied, compared], ids=lambda each: each.__name__)
def test_a_list_in_other_words_is_one(masked: Masked):
    report = fusion.explain(attention(masked), *inputs(), options=OPTIONS)
    assert (report.launches[1], set(report.ops)) == (2, {SPARSE, INDEXER}), report


def test_scores_that_are_multiplied_by_what_is_listed_are_as_exact():
    """With every key listed, as lists of rounded scores may differ."""

    def all_of_them(scores: Tensor, index: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        return multiplied(scores, index, index.topk(T, -1).indices, seen)

    form = attention(all_of_them)
    torch.compiler.reset()
    fused = torch.compile(form, backend="cann_fusion", options=OPTIONS)(*inputs())
    plain, truth = form(*inputs()), form(*inputs(torch.float64))
    assert relative_error(fused, truth) <= 1.5 * relative_error(plain, truth) + torch.finfo(torch.bfloat16).eps


def reaching_the_least(scores: Tensor, index: Tensor, places: Tensor, seen: Tensor) -> Tensor:
    least = index.topk(LISTED, -1).values[..., -1:]
    return scores.masked_fill(~((index >= least) & seen)[:, None], -math.inf)


def test_keys_that_reach_the_least_of_the_largest_scores_may_be_more():
    report = fusion.explain(attention(reaching_the_least), *inputs(), options=OPTIONS)
    assert SPARSE not in report.ops
    assert any("it shows keys whose scores reach the k-th" in each.reason for each in report.refusals)
