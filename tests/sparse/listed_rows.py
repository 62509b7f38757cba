"""Attention over rows that a model gathers by lists of its own: reference functions of FlashMLA, FlashInfer, tilelang,
vLLM and SGLang in their spellings, and code that looks like them.

Rows hold a latent [.., C] and rotated lanes [.., R]; the latent is the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import activations

SCALE = 0.3
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """B sequences of S queries of N heads over T rows, K of them listed; rows of C + R lanes; pages of P rows."""

    b: int = 2
    s: int = 3
    n: int = 4
    t: int = 32
    k: int = 6
    c: int = 16
    r: int = 8
    p: int = 8

    @property
    def d(self) -> int:
        """Lanes of a row."""
        return self.c + self.r


SMALL, ONE, LARGE = Sizes(), Sizes(b=1, s=1), Sizes(b=2, s=2, n=16, t=256, k=64, c=512, r=64, p=64)


def lists(z: Sizes, *rows: int, some: float = 0.3) -> Tensor:
    """Numbers of rows [*rows, K], with -1 anywhere, a list of nothing else, and rows that are named twice."""
    shape, made = (*rows, z.k), torch.Generator().manual_seed(5)
    places = torch.randint(0, z.t, shape, generator=made)
    places = places.masked_fill(torch.rand(shape, generator=made) < some, -1).flatten(0, -2)
    places[-1] = places[-1].masked_fill(torch.tensor(some > 0), -1)
    return places.reshape(shape)


def queries(z: Sizes, *lead: int) -> Tensor:
    return activations(1, *lead, z.n, z.d)


def batched(z: Sizes, some: float = 0.3) -> Inputs:
    """q [B, S, N, D], kv [B, T, D], places [B, S, K]."""
    return queries(z, z.b, z.s), activations(2, z.b, z.t, z.d), lists(z, z.b, z.s, some=some)


def flat(z: Sizes, some: float = 0.3) -> Inputs:
    """q [S, N, D], kv [T, 1, D], places [S, 1, K]."""
    return queries(z, z.s), activations(2, z.t, 1, z.d), lists(z, z.s, 1, some=some)


def beyond(z: Sizes) -> Inputs:
    """As `flat`, with numbers that no row has: one of the last list, and a list of nothing else."""
    q, kv, places = flat(z)
    places[0], places[-1, 0, 1] = z.t + 1, z.t
    return q, kv, places


def steps(z: Sizes) -> Inputs:
    """q [B, N, D], kv [B, T, D], places [B, K]."""
    return queries(z, z.b), activations(2, z.b, z.t, z.d), lists(z, z.b)


def paged(z: Sizes) -> Inputs:
    """q [B, N, D], pages [.., P, D], a table [B, T / P], places [B, K]."""
    count = z.b * z.t // z.p
    table = torch.randperm(count, generator=torch.Generator().manual_seed(3)).reshape(z.b, -1)
    return queries(z, z.b), activations(2, count, z.p, z.d), table, lists(z, z.b)


def paged_apart(z: Sizes) -> Inputs:
    """The same with latents and rotated lanes in pages of their own."""
    q, pages, table, places = paged(z)
    return q, *(each.contiguous() for each in pages.split((z.c, z.r), -1)), table, places


def paged_of_tokens(z: Sizes) -> Inputs:
    """The same with the sequence of each token [B]."""
    *given, table, places = paged_apart(z)
    return *given, table, torch.arange(z.b).flip(0), places


def with_lengths(z: Sizes) -> Inputs:
    """As `flat`, and how many entries of each list count [S]."""
    return *flat(z, some=0.0), torch.tensor([0, z.k, 2, z.k - 1])[: z.s] % (z.k + 1)


def with_positions(z: Sizes) -> Inputs:
    """As `batched`, and the position of each query [B, S]."""
    position = torch.randint(0, z.t, (z.b, z.s), generator=torch.Generator().manual_seed(9))
    return *batched(z, some=0.0), position


def apart(z: Sizes) -> Inputs:
    """q [B, S, N, D], latents [B, T, C], rotated lanes [B, T, R], places."""
    q, kv, places = batched(z, some=0.0)
    return q, kv[..., : z.c].contiguous(), kv[..., z.c :].contiguous(), places


def width(q: Tensor) -> int:
    """Lanes of the latent."""
    return {24: 16, 576: 512}[q.shape[-1]]


# spellings -----------------------------------------------------------------------------------------------------------


def gathered(q, kv, places):
    listed = places.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, kv.shape[-1])
    rows = torch.gather(kv.unsqueeze(1).expand(-1, q.shape[1], -1, -1), 2, listed)
    scores = torch.einsum("bsnd,bskd->bsnk", q.float(), rows.float()) * SCALE
    scores = scores.masked_fill((places < 0)[:, :, None], -math.inf)
    return torch.einsum("bsnk,bskc->bsnc", scores.softmax(-1).to(q.dtype), rows[..., : width(q)])


def by_numbers(q, kv, places):
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    scores = torch.where(places.unsqueeze(2) >= 0, q @ rows.mT * SCALE, -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ rows[..., : width(q)]


def from_the_end(q, kv, places):
    """-1 reads the last row, and hides it."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places]
    scores = (q @ rows.transpose(-1, -2)).float() * SCALE
    scores = scores + torch.zeros_like(places, dtype=torch.float32).masked_fill(places < 0, -math.inf).unsqueeze(2)
    return torch.nan_to_num(scores.softmax(-1)).to(q.dtype) @ rows[..., : width(q)]


def selected(q, kv, places):
    """One sequence, and what is outside counts as hidden."""
    places = places[:, 0]
    wrong = (places < 0) | (places >= kv.shape[0])
    rows = kv.index_select(0, places.masked_fill(wrong, 0).flatten())
    rows = rows.reshape(*places.shape, kv.shape[-1]).float()
    scores = (q.float() @ rows.transpose(1, 2)).masked_fill(wrong.unsqueeze(1), -math.inf) * SCALE
    weights = torch.exp(scores - scores.logsumexp(-1, keepdim=True))
    return (weights @ rows[..., : width(q)]).to(q.dtype)


def in_twos(q, kv, places):
    """Exponentials of base 2."""
    places = places.squeeze(1)
    wrong = (places < 0) | (places >= kv.shape[0])
    rows = kv.squeeze(1)[torch.where(wrong, 0, places)]
    scores = (q @ rows.mT).float().masked_fill(wrong.unsqueeze(1), -math.inf) * (SCALE * math.log2(math.e))
    lse = torch.logsumexp(scores * math.log(2), -1) * math.log2(math.e)
    return torch.exp2(scores - lse.unsqueeze(-1)).to(q.dtype) @ rows[:, :, : width(q)]


def along(q, kv, places):
    """Heads first."""
    q = q.transpose(1, 2)
    rows = torch.take_along_dim(kv[:, None], places.clamp(min=0)[..., None], 2)
    scores = torch.einsum("bnsd,bskd->bnsk", q, rows) * SCALE
    scores = scores.masked_fill((places < 0)[:, None], -math.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("bnsk,bskc->bsnc", weights, rows[..., : width(q)])


def by_sdpa(q, kv, places):
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    seen = (places >= 0)[:, :, None]
    return F.scaled_dot_product_attention(q, rows, rows[..., : width(q)], attn_mask=seen, scale=SCALE)


def of_one_table(q, kv, places):
    """All sequences behind each other; a query without rows gives the mean of what its list names."""
    first = (torch.arange(kv.shape[0]) * kv.shape[1])[:, None, None]
    rows = kv.flatten(0, 1)[places.clamp(min=0) + first]
    scores = torch.einsum("bsnd,bskd->bsnk", q, rows) * SCALE
    scores = scores.masked_fill((places < 0)[:, :, None], torch.finfo(scores.dtype).min)
    return torch.einsum("bsnk,bskc->bsnc", scores.softmax(-1), rows[..., : width(q)])


def safely(q, kv, places):
    """A log-sum-exp of -inf is one of inf, so that nothing is seen of what is hidden in whole."""
    rows = kv.view(-1, kv.shape[-1])[places.squeeze(1).clamp(min=0)]
    hidden = (places < 0).expand(-1, q.shape[1], -1)
    scores = (torch.einsum("tnd,tkd->tnk", q, rows).float() * SCALE).masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, math.inf, lse).unsqueeze(-1))
    return weights.to(q.dtype) @ rows[..., : width(q)]


def one_step(q, kv, places):
    rows = kv[torch.arange(kv.shape[0])[:, None], places.clamp(min=0)]
    scores = torch.einsum("bnd,bkd->bnk", q, rows) * SCALE
    scores = scores.masked_fill((places < 0)[:, None], -math.inf)
    weights = scores.softmax(-1, dtype=torch.float32).masked_fill((places < 0).all(-1)[:, None, None], 0)
    return weights.to(q.dtype) @ rows[..., : width(q)]


def until(q, kv, places, lengths):
    """A list counts up to a length, which may be 0."""
    rows = kv.view(-1, kv.shape[-1]).index_select(0, places.view(-1)).view(*places.squeeze(1).shape, kv.shape[-1])
    scores = torch.einsum("tnd,tkd->tnk", q, rows) * SCALE
    hidden = torch.arange(places.shape[-1]) >= lengths[:, None]
    return scores.masked_fill(hidden[:, None], -math.inf).softmax(-1) @ rows[..., : width(q)]


def behind(q, kv, places, lengths):
    """A list counts from a length on."""
    rows = kv.squeeze(1)[places.squeeze(1)]
    hidden = torch.arange(places.shape[-1]) < lengths[:, None]
    scores = (q @ rows.mT * SCALE).masked_fill(hidden[:, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def not_later(q, kv, places, positions):
    """What stands behind a query is hidden."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places]
    scores = torch.einsum("bsnd,bskd->bsnk", q, rows) * SCALE
    hidden = (places > positions[..., None]).unsqueeze(2)
    return torch.einsum("bsnk,bskc->bsnc", scores.masked_fill(hidden, -math.inf).softmax(-1), rows[..., : width(q)])


def all_of_it(q, latent, rope, places):
    """Both parts by themselves, and nothing hidden."""
    c, each = latent.shape[-1], places.unsqueeze(-1)
    rows, turned = (
        x.unsqueeze(1).expand(-1, q.shape[1], -1, -1).gather(2, each.expand(-1, -1, -1, x.shape[-1]))
        for x in (latent, rope)
    )
    scores = torch.einsum("bsnc,bskc->bsnk", q[..., :c], rows) + torch.einsum("bsnr,bskr->bsnk", q[..., c:], turned)
    return torch.einsum("bsnk,bskc->bsnc", (scores * SCALE).softmax(-1), rows)


def values_apart(q, kv, places):
    """Keys and values by one list each, which is the same."""
    keys, values = kv.squeeze(1)[places.squeeze(1)], kv.squeeze(1)[..., : width(q)][places.squeeze(1)]
    return torch.einsum("tnk,tkc->tnc", (torch.einsum("tnd,tkd->tnk", q, keys) * SCALE).softmax(-1), values)


def first_row_for_none(q, kv, places):
    """What is not there reads, and sees, the first row."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    return (q @ rows.mT * SCALE).softmax(-1) @ rows[..., : width(q)]


def other_rows_for_none(q, kv, places):
    """What is not there reads a row of its own, and is hidden."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], torch.where(places < 0, torch.arange(places.shape[-1]), places)]
    scores = (q @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def last_row_for_none(q, kv, places):
    """What is not there reads, and sees, the last row."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places]
    return (q @ rows.mT * SCALE).softmax(-1) @ rows[..., : width(q)]


def last_row_for_most(q, kv, places):
    """What is below -1 is hidden, of which there is nothing."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places]
    scores = (q @ rows.mT * SCALE).masked_fill((places < -1)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def first_row_hidden(q, kv, places):
    """The first row is hidden too."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    scores = (q @ rows.mT * SCALE).masked_fill((places <= 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def of_others(q, kv, places):
    """Rows of the sequences in another order."""
    rows = kv[torch.arange(kv.shape[0]).flip(0)[:, None, None], places.clamp(0)]
    scores = (q @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def hidden_by_others(q, kv, places):
    """An entry is hidden where the one of the next query is."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    scores = (q @ rows.mT * SCALE).masked_fill((places.roll(1, 1) < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def clamped_elsewhere(q, kv, places):
    """What is below 2 reads the third row, and is seen but for -1."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(2)]
    scores = (q @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def chosen_elsewhere(q, kv, places):
    """What is even reads the first row, and is seen."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], torch.where(places % 2 == 0, 0, places)]
    scores = (q @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def by_table(q, pages, table, places):
    """Slots by a table of pages."""
    size, listed = pages.shape[1], places.clamp(min=0)
    slots = table.gather(1, listed // size) * size + listed % size
    rows = pages.view(-1, pages.shape[-1])[slots]
    scores = (torch.einsum("bnd,bkd->bnk", q, rows) * SCALE).masked_fill((places < 0)[:, None], -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ rows[..., : width(q)]


def by_page_and_offset(q, pages, table, places):
    size, listed = pages.shape[1], places.clamp(min=0)
    rows = pages[table[torch.arange(table.shape[0])[:, None], listed // size], listed % size]
    scores = (torch.einsum("bnd,bkd->bnk", q, rows) * SCALE).masked_fill((places < 0)[:, None], -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ rows[..., : width(q)]


def by_table_apart(q, latents, ropes, table, places):
    """Slots of pages of latents and of rotated lanes, of entries that are seen; -1 reads the last row."""
    size, hidden = latents.shape[1], places < 0
    listed = places.clamp(min=0)
    slots = torch.where(hidden, -1, table.gather(1, listed // size) * size + listed % size)
    rows = latents.view(-1, latents.shape[-1])[slots]
    scores = torch.einsum("bnc,bkc->bnk", q[..., : width(q)], rows)
    scores = scores + torch.einsum("bnr,bkr->bnk", q[..., width(q) :], ropes.view(-1, ropes.shape[-1])[slots])
    scores = (scores * SCALE).masked_fill(hidden[:, None], -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ rows


def by_table_of_tokens(q, latents, ropes, tables, sequence, places):
    """The table of each token is that of its sequence."""
    size, listed = latents.shape[1], places.clamp(min=0)
    slots = tables[sequence[:, None], listed // size] * size + listed % size
    rows = torch.cat([each.flatten(0, 1).index_select(0, slots.flatten()) for each in (latents, ropes)], -1)
    rows = rows.view(*slots.shape, -1)
    scores = torch.einsum("bnd,bkd->bnk", q, rows) * SCALE
    weights = scores.masked_fill((places < 0)[:, None], -math.inf).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ rows[..., : width(q)]


def from_the_end_of_pages(q, latents, ropes, tables, sequence, places):
    """-1 reads the last row of the last page, and counts."""
    size = latents.shape[1]
    slots = tables[sequence[:, None], places // size] * size + places % size
    rows = torch.cat([each.flatten(0, 1)[slots] for each in (latents, ropes)], -1)
    weights = (torch.einsum("bnd,bkd->bnk", q, rows) * SCALE).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ rows[..., : width(q)]


def by_slots_of_all_rows(q, latents, ropes, table, places):
    """A table of the slots of all rows that there are."""
    every = (table[:, :, None] * latents.shape[1] + torch.arange(latents.shape[1])).flatten(1)
    slots = every.gather(1, places.clamp(min=0))
    rows = torch.cat([each.view(-1, each.shape[-1])[slots] for each in (latents, ropes)], -1)
    scores = (torch.einsum("bnd,bkd->bnk", q, rows) * SCALE).masked_fill((places < 0)[:, None], -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ rows[..., : width(q)]


def by_pages_of_others(q, latents, ropes, table, places):
    """The page of one place and the row of the next: what is read is no run of pages."""
    size, listed = latents.shape[1], places.clamp(min=0)
    slots = table.gather(1, listed // size) * size + (listed + 1) % size
    rows = torch.cat([each.view(-1, each.shape[-1])[slots] for each in (latents, ropes)], -1)
    scores = (torch.einsum("bnd,bkd->bnk", q, rows) * SCALE).masked_fill((places < 0)[:, None], -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ rows[..., : width(q)]


Form = Callable[..., Any]
IN_PAGES = (by_table_apart, by_table_of_tokens, by_slots_of_all_rows, from_the_end_of_pages)
"""Spellings that are attention over pages by a block table."""
SPELLINGS: dict[Form, Callable[[Sizes], Inputs]] = {
    gathered: batched, by_numbers: batched, from_the_end: batched, selected: beyond, in_twos: beyond, along: batched,
    by_sdpa: batched, of_one_table: batched, safely: flat, one_step: steps, until: with_lengths, behind: with_lengths,
    not_later: with_positions, all_of_it: apart, values_apart: lambda z: flat(z, some=0.0),
    first_row_for_none: batched, last_row_for_none: batched, last_row_for_most: batched, first_row_hidden: batched,
    of_others: batched, hidden_by_others: batched, clamped_elsewhere: batched, chosen_elsewhere: batched,
    by_table: paged, by_page_and_offset: paged, other_rows_for_none: batched, by_table_apart: paged_apart,
    by_table_of_tokens: paged_of_tokens, by_slots_of_all_rows: paged_apart, by_pages_of_others: paged_apart,
    from_the_end_of_pages: paged_of_tokens,
}  # fmt: skip


# look-alikes ---------------------------------------------------------------------------------------------------------


def two_lists(q, kv, places):
    """Values of other rows than the keys."""
    number = torch.arange(kv.shape[0])[:, None, None]
    keys, values = kv[number, places.clamp(0)], kv[number, places.roll(1, -1).clamp(0)]
    scores = (q @ keys.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ values[..., : width(q)]


def other_lanes(q, kv, places):
    """Values that are lanes in the middle."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    scores = (q @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., 4 : 4 + width(q)]


def hidden_from_heads(q, kv, places):
    """A mask for each head."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    hidden = (places[:, :, None] - torch.arange(q.shape[2])[:, None]) < 0
    return (q @ rows.mT * SCALE).masked_fill(hidden, -math.inf).softmax(-1) @ rows[..., : width(q)]


def lowered(q, kv, places):
    """A bias that is no mask."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    return (q @ rows.mT * SCALE + places[:, :, None].to(q.dtype)).softmax(-1) @ rows[..., : width(q)]


def rounded(q, kv, places):
    """Rows that are rounded when they have been gathered."""
    rows = kv.double()[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)].to(q.dtype)
    scores = (q @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def scaled(q, kv, places):
    """Rows that are doubled when they have been gathered."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)] * 2
    scores = (q @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def wide_result(q, kv, places):
    """A result in float32 of rows in bfloat16."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)].float()
    scores = (q.float() @ rows.mT * SCALE).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def sunk(q, kv, places):
    """A sink beside the rows."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    sink = torch.ones(q.shape[2], 1, dtype=q.dtype).expand(*q.shape[:-1], 1)
    return torch.cat((q @ rows.mT * SCALE, sink), -1).softmax(-1)[..., :-1] @ rows[..., : width(q)]


def scaled_by_queries(q, kv, places):
    """Scores that are multiplied by a number of each query."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)]
    scores = (q @ rows.mT * q[..., :1].abs()).masked_fill((places < 0)[:, :, None], -math.inf)
    return scores.softmax(-1) @ rows[..., : width(q)]


def in_five_dims(q, kv, places):
    """Heads in three dims."""
    rows = kv[torch.arange(kv.shape[0])[:, None, None], places.clamp(0)][:, :, None, None]
    scores = q.unflatten(2, (1, 2, -1)) @ rows.mT * SCALE
    return (scores.softmax(-1) @ rows[..., : width(q)]).flatten(2, 4)


LOOKALIKES: dict[Form, str] = {
    two_lists: "if its heads are queries that gather keys of their own",
    other_lanes: "are no latent with rotated lanes",
    hidden_from_heads: "differs from head to head",
    lowered: "what is added to the scores is not proven",
    scaled: "if its heads are queries that gather keys of their own",
    wide_result: "their dtypes differ",
    sunk: "it stands beside scores of listed rows",
    scaled_by_queries: "those of listed rows are multiplied by a",
    in_five_dims: "more than five dims",
}
