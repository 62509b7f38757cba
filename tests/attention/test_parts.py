"""Attention over parts of the keys and their merge, as serving code chunks a context or splits a latent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import fusion
from fusion.runtime.verification import relative_error

N, D, C, R, SIZE, SCALE = 8, 128, 512, 64, 128, 192**-0.5
FIA, UPDATE = "npu::npu_fused_infer_attention_score_v2", "npu::npu_attention_update"
Parts = tuple[Tensor, Tensor]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def attended(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Parts:
    """[B, S, N, D] over [B, T, N, D] → [B, S, N, E] and [B, N, S]."""
    scores = torch.einsum("bsnd,btnd->bnst", q, k).float() * SCALE
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("bnst,btne->bsne", scores.softmax(-1).to(v.dtype), v), lse


def merged(before: Parts, now: Parts) -> Parts:
    """The two as one, in the dtype of the model."""
    lse = torch.logaddexp(before[1], now[1])
    old, new = ((each - lse).exp().transpose(1, 2).unsqueeze(-1) for each in (before[1], now[1]))
    return (before[0] * old + now[0] * new).to(before[0].dtype), lse


class Chunks(nn.Module):
    """The new tokens of a prompt, and the pages before them chunk by chunk, all expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(normal(3, N * 2 * D, C) / C**0.5, requires_grad=False)

    def expanded(self, latent: Tensor, rope: Tensor) -> Parts:
        k, v = linear(latent, self.up).unflatten(-1, (N, -1)).split((D, D), -1)
        return torch.cat((k, rope.unsqueeze(2).expand(-1, -1, N, -1)), -1), v

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, pages: Tensor, ropes: Tensor, table: Tensor) -> Tensor:
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        found = attended(q, *self.expanded(latent, rope), later)
        for chunk in table.split(1, dim=1):
            rows, turned = (each[chunk].flatten(1, 2) for each in (pages, ropes))
            found = merged(found, attended(q, *self.expanded(rows, turned)))
        return found[0].flatten(2)


class Split(nn.Module):
    """A step over a latent that is read in two halves, as it lies on two devices."""

    def forward(self, q: Tensor, turned: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        outs: list[Tensor] = []
        sums: list[Tensor] = []
        for part, lanes in zip(latent.chunk(2, dim=1), rope.chunk(2, dim=1), strict=True):
            scores = torch.einsum("bnc,btc->bnt", q, part) + torch.einsum("bnr,btr->bnt", turned, lanes)
            scores = scores.float() * SCALE
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            outs.append(torch.einsum("bnt,btc->bnc", weights.to(q.dtype), part).float() / total)
            sums.append((top + total.log()).squeeze(-1))
        shares = torch.stack(sums).softmax(0)
        return torch.einsum("pbn,pbnc->bnc", shares, torch.stack(outs)).to(q.dtype)


class Paged(nn.Module):
    """A step over the pages of a cache in two parts, each up to its own length, as context parallelism splits them."""

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        found: list[Parts] = []
        for number, pages in enumerate(table.chunk(2, dim=1)):
            k, v = (each[pages].flatten(1, 2) for each in (keys, values))
            there = torch.arange(k.shape[1]) < lengths[:, number, None]
            out, lse = attended(q, k, v, ~there[:, None, None])
            found.append((out.nan_to_num(0.0), lse))
        return merged(found[0], found[1])[0]


def paged() -> tuple[Tensor, ...]:
    shapes = ((2, 1, N, D), (9, SIZE, N, D), (9, SIZE, N, D))
    table = torch.tensor([[3, 1, 4, 2], [5, 8, 6, 7]])
    return *(normal(seed, *shape) for seed, shape in enumerate(shapes)), table, torch.tensor([[256, 0], [256, 77]])


def chunks() -> tuple[Tensor, ...]:
    table = torch.tensor([[3, 1, 4]])
    shapes = ((1, 32, N, D + R), (1, 32, C), (1, 32, R), (6, SIZE, C), (6, SIZE, R))
    return *(normal(seed, *shape) for seed, shape in enumerate(shapes)), table


def split() -> tuple[Tensor, ...]:
    shapes = ((2, N, C), (2, N, R), (2, 256, C), (2, 256, R))
    return tuple(normal(seed, *shape) for seed, shape in enumerate(shapes))


CASES = [
    pytest.param(Chunks, chunks(), 4, 20, id="chunks"),
    pytest.param(Split, split(), 2, 6, id="split"),
    pytest.param(Paged, paged(), 2, 14, id="paged"),
]


@pytest.mark.parametrize(("model", "given", "parts", "most"), CASES)
@pytest.mark.rotates(4)
def test_every_part_is_one_call_and_all_are_merged_by_one(model: Any, given: Any, parts: int, most: int):
    report = fusion.explain(model(), *given, options={"target": "ascend910_93"})
    assert (report.ops[FIA], report.ops[UPDATE]) == (parts, 1), report
    assert report.launches[1] <= most, report
    called = {str(node.target) for gm in report.graphs for node in gm.graph.nodes}
    assert not {"aten._softmax.default", "aten.softmax.int", "aten.exp.default"} & called


@pytest.mark.parametrize(("model", "given", "parts", "most"), CASES)
@pytest.mark.rotates(3)
def test_numbers(model: Any, given: Any, parts: int, most: int):
    torch.compiler.reset()
    own, exact = model(), model().double()
    compiled = torch.compile(own, backend="cann_fusion", options={"target": "ascend910_93", "lower": "eager"})
    with torch.no_grad():
        wide = [each.double() if each.is_floating_point() else each for each in given]
        have, plain, want = compiled(*given), own(*given), exact(*wide)
    assert relative_error(have, want) <= 1.5 * relative_error(plain, want) + torch.finfo(torch.bfloat16).eps
