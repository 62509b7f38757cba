"""A loop over sequences whose lengths are data is one call for the batch, over rows or the pages of all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.testing import LEVELS, Level
from tests.attention.lowered import Form, tried
from tests.engine.graphs import numbers
from tests.support.fused import FIA, call, calls

pytestmark = pytest.mark.rotates(8)

B, N, M, D, SIZE, PAGES, BLOCKS = 3, 4, 2, 128, 16, 3, 11
LENGTHS = torch.tensor([37, 5, SIZE * PAGES])
TABLE = torch.tensor([[7, 2, 0], [3, 9, 10], [1, 8, 5]])


def given(queries: int, *page: int) -> list[Tensor]:
    caches = (numbers(BLOCKS, *(page or (SIZE, M, D)), seed=seed).bfloat16() for seed in (1, 2))
    return [numbers(B, N, queries, D).bfloat16(), *caches, TABLE.clone(), LENGTHS.clone()]


def rows(pages: Tensor, table: Tensor) -> Tensor:
    """Rows [1, M, T, D] of the pages [Size, M, D] of one sequence."""
    return pages[table].view(-1, M, D).transpose(0, 1)[None]


def by_sdpa(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One query of each sequence sees the first keys."""
    outs = []
    for b in range(B):
        k, v = rows(keys, table[b]), rows(values, table[b])
        seen = (torch.arange(k.shape[2]) < lengths[b])[None, None, None]
        outs.append(F.scaled_dot_product_attention(q[b : b + 1], k, v, seen, enable_gqa=True))
    return torch.cat(outs)


def in_place_of_batches(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Written out, without a dim of sequences, causal towards the last key; heads joined, then stacked."""
    outs = []
    for b in range(B):
        k, v = (rows(pages, table[b])[0].repeat_interleave(N // M, 0) for pages in (keys, values))
        j, i = torch.arange(k.shape[1]), torch.arange(q.shape[2])[:, None]
        scores = (q[b] @ k.transpose(1, 2)).float() * D**-0.5
        weights = scores.masked_fill(j > i + lengths[b] - q.shape[2], -torch.inf).softmax(-1)
        outs.append((weights.to(v.dtype) @ v).transpose(0, 1).reshape(q.shape[2], -1))
    return torch.stack(outs)


def heads_first(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Pages [M, Size, D]; what a query sees is added."""
    outs = []
    for b in range(B):
        k, v = (pages[table[b]].transpose(0, 1).reshape(1, M, -1, D) for pages in (keys, values))
        bias = torch.zeros(k.shape[2]).masked_fill(torch.arange(k.shape[2]) >= lengths[b], -torch.inf)
        out = F.scaled_dot_product_attention(q[b, None], k, v, bias.to(q.dtype)[None, None, None], enable_gqa=True)
        outs.append(out.transpose(1, 2).flatten(2))
    return torch.cat(outs, 0)


def of_rows(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Caches without pages."""
    outs = []
    for b in range(B):
        k, v = keys[b : b + 1], values[b : b + 1]
        seen = (torch.arange(k.shape[2]) < lengths[b])[None, None, None]
        outs.append(F.scaled_dot_product_attention(q[b : b + 1], k, v, seen, enable_gqa=True))
    return torch.cat(outs)


def in_int8(
    q: Tensor, keys: Tensor, values: Tensor, scales: Tensor, table: Tensor, lengths: Tensor, own: bool = False
) -> Tensor:
    """Pages in int8, with scales of each channel, perhaps twice those for the last sequence."""
    outs = []
    for b in range(B):
        many = 2 if own and b == B - 1 else 1
        k, v = (
            (pages[table[b]].view(-1, M, D).to(q.dtype) * (scale * many)).transpose(0, 1)[None]
            for pages, scale in ((keys, scales[0]), (values, scales[1]))
        )
        seen = (torch.arange(k.shape[2]) < lengths[b])[None, None, None]
        outs.append(F.scaled_dot_product_attention(q[b : b + 1], k, v, seen, enable_gqa=True))
    return torch.cat(outs)


def given_int8() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (BLOCKS, 2 * SIZE, M, D)
    pages = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for _ in range(2))
    scales = (torch.rand(2, M, D, generator=generator) / 64 + 2**-7).bfloat16()
    return [given(1)[0], *pages, scales, TABLE.clone(), LENGTHS.clone()]


def caches() -> list[Tensor]:
    return [numbers(B, M, SIZE * PAGES, D, seed=seed).bfloat16() for seed in (1, 2)]


FORMS: dict[str, tuple[Form, list[Tensor]]] = {
    "sdpa": (by_sdpa, given(1)),
    "written out": (in_place_of_batches, given(1)),
    "several queries": (in_place_of_batches, given(4, 128, M, D)),
    "heads first": (heads_first, given(1, M, SIZE, D)),
    "int8": (in_int8, given_int8()),
    "rows": (of_rows, [given(1)[0], *caches(), LENGTHS]),
}


@pytest.mark.rotates(12)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_they_are_one_call(name: str, level: Level):
    form, inputs = FORMS[name]
    t = tried(form, inputs, level)
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    attention = call(t, FIA)
    assert (attention.kwargs.get("block_table") is not None) == (name != "rows")


def another_scale(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    outs = []
    for b in range(B):
        seen = (torch.arange(keys.shape[2]) < lengths[b])[None, None, None]
        outs.append(
            F.scaled_dot_product_attention(
                q[b : b + 1], keys[b : b + 1], values[b : b + 1], seen, scale=(b + 1) / D, enable_gqa=True
            )
        )
    return torch.cat(outs)


def other_numbers_of_keys(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    outs = []
    for b in range(B):
        k, v = (each[b : b + 1, :, : SIZE * (b + 1)] for each in (keys, values))
        seen = (torch.arange(k.shape[2]) < lengths[b])[None, None, None]
        outs.append(F.scaled_dot_product_attention(q[b : b + 1], k, v, seen, enable_gqa=True))
    return torch.cat(outs)


def turned_otherwise(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    outs = []
    for b in range(B):
        seen = (torch.arange(keys.shape[2]) < lengths[b])[None, None, None]
        y = F.scaled_dot_product_attention(q[b : b + 1], keys[b : b + 1], values[b : b + 1], seen, enable_gqa=True)
        outs.append(y.flatten(1) if b else y.transpose(1, 3).flatten(1))
    return torch.cat(outs)


@pytest.mark.parametrize("form", [another_scale, other_numbers_of_keys, turned_otherwise])
def test_what_is_not_alike_stays_one_by_one(form: Form):
    t = tried(form, [given(1)[0], *caches(), LENGTHS])
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert len(calls(t, FIA)) == B


def test_scales_of_one_sequence_are_not_those_of_all():
    t = tried(partial(in_int8, own=True), given_int8())
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert len(calls(t, FIA)) == B


def one_mask_for_all(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    outs = []
    for b in range(B):
        y = F.scaled_dot_product_attention(q[b : b + 1], keys[b : b + 1], values[b : b + 1], seen, enable_gqa=True)
        outs.append(y)
    return torch.cat(outs)


def test_a_mask_that_all_have_is_not_repeated():
    seen = (torch.rand(1, 1, 1, SIZE * PAGES, generator=torch.Generator().manual_seed(3)) < 0.5).index_fill(
        -1, torch.tensor([0]), True
    )
    t = tried(one_mask_for_all, [given(1)[0], *caches(), seen])
    testing.means_what_it_says(t)
    assert len(calls(t, FIA)) == 1
