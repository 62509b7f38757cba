"""Sparse attention over pages as serving code spells the work of its sequences, whose tokens are packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

HIDDEN, HEADS, RANK, LATENT, NOPE, ROPE, VALUE = 1024, 4, 1536, 512, 128, 64, 128
INDEX_HEADS, INDEX, LISTED, SIZE, BLOCKS = 8, 128, 8, 16, 12
SCALE, EPS = (NOPE + ROPE) ** -0.5, 1e-6
TABLE = torch.tensor([[4, 1], [0, 5], [3, 2], [9, 7]])
Parts = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Given:
    """What attention is computed from.

    Attributes:
        query: absorbed queries [T, H, C] and rotated lanes [T, H, R].
        index: queries [T, N, D] of the indexer, and weights [T, N].
        pages: of latents, of rotated lanes and of the indexer's keys [Block, Size, D].
        told: what the engine tells.
    """

    query: Parts
    index: Parts
    pages: tuple[Tensor, ...]
    told: tuple[Any, ...]


class Block(nn.Module):
    """One block from hidden states [T, H] on; `attend` gives [T, H, C]."""

    def __init__(self, attend: Callable[[Given], Tensor]) -> None:
        super().__init__()
        shapes = dict(
            dq=(RANK, HIDDEN), uq=(HEADS * (NOPE + ROPE), RANK), dkv=(LATENT + ROPE, HIDDEN),
            up=(HEADS * (NOPE + VALUE), LATENT), out=(HIDDEN, HEADS * VALUE), iq=(INDEX_HEADS * INDEX, RANK),
            ik=(INDEX, HIDDEN), iw=(INDEX_HEADS, HIDDEN),
        )  # fmt: skip
        torch.manual_seed(1)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5, requires_grad=False))
        for name, size in (("gain", HIDDEN), ("gain_q", RANK), ("gain_kv", LATENT), ("gain_k", INDEX)):
            setattr(self, name, nn.Parameter(1 + torch.randn(size) / 8, requires_grad=False))
        self.bias_k = nn.Parameter(torch.randn(INDEX) / 8, requires_grad=False)
        self.attend = attend

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, *more: Any) -> Parts:
        pages, slots, told = more[:3], more[3], more[4:]
        residual = x + residual
        x = norm(residual, self.gain)
        low = norm(linear(x, self.dq), self.gain_q)
        nope, q_rope = linear(low, self.uq).view(-1, HEADS, NOPE + ROPE).split((NOPE, ROPE), -1)
        latent, rope = linear(x, self.dkv).split((LATENT, ROPE), -1)
        key = layer_norm(linear(x, self.ik), (INDEX,), self.gain_k, self.bias_k, EPS).unsqueeze(1)
        rows = (
            norm(latent, self.gain_kv),
            pairs(rope.unsqueeze(1), cos, sin).squeeze(1),
            first(key, cos, sin).squeeze(1),
        )
        for held, new in zip(pages, rows, strict=True):
            held.view(-1, held.shape[-1])[slots] = new
        query = first(linear(low, self.iq).view(-1, INDEX_HEADS, INDEX), cos, sin)
        up_key, up_value = self.up.view(HEADS, NOPE + VALUE, LATENT).split((NOPE, VALUE), 1)
        absorbed = torch.einsum("thd,hdc->thc", nope, up_key)
        index = query, linear(x, self.iw) * (INDEX_HEADS * INDEX) ** -0.5
        y = self.attend(Given((absorbed, pairs(q_rope, cos, sin)), index, pages, told))
        return linear(torch.einsum("thc,hvc->thv", y, up_value).flatten(1), self.out), residual


def norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours, which come out in halves."""
    low, high = x[..., ::2], x[..., 1::2]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first lanes rotated in halves."""
    low, high, rest = x.split((ROPE // 2, ROPE // 2, INDEX - ROPE), -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def told(sequences: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Of every new token its sequence and its position."""
    request = torch.cat([torch.full((count,), number) for number, (_, count) in enumerate(sequences)])
    return request, torch.cat([torch.arange(start, start + count) for start, count in sequences])


def inputs(sequences: list[tuple[int, int]], *more: Any) -> tuple[Any, ...]:
    """The arguments of a block whose sequences have so many tokens, and get so many; `more` the engine tells."""
    request, positions = told(sequences)
    generator = torch.Generator().manual_seed(len(request))
    x, residual = (torch.randn(len(request), HIDDEN, generator=generator) for _ in range(2))
    pages = [torch.randn(BLOCKS, SIZE, width, generator=generator) for width in (LATENT, ROPE, INDEX)]
    angles = positions[:, None, None] / 100.0 ** (torch.arange(ROPE // 2) * 2 / ROPE)
    slots = TABLE[request].gather(1, positions[:, None] // SIZE).squeeze(1) * SIZE + positions % SIZE
    return x, residual, angles.cos(), angles.sin(), *pages, slots, *more


# how the keys of sequences are read ----------------------------------------------------------------------------------


def attended(query: Parts, rows: Parts, seen: Tensor, lanes: str) -> Tensor:
    """Queries [T, H, ..] over rows [T, L, ..] or [L, ..], as `lanes` says, of which `seen` [T, L] are seen."""
    scores = sum(torch.einsum(f"thd,{lanes}d->thl", *each) for each in zip(query, rows, strict=True)) * SCALE
    weights = scores.float().masked_fill(~seen[:, None], -math.inf).softmax(-1).to(query[0].dtype)
    return torch.einsum(f"thl,{lanes}c->thc", weights, rows[0])


def best(index: Parts, keys: Tensor, seen: Tensor, lanes: str) -> Any:
    products = torch.einsum(f"thd,{lanes}d->thl", index[0], keys).relu()
    scores = (products.float() * index[1].float().unsqueeze(-1)).sum(1)
    return scores.masked_fill(~seen, -math.inf).topk(min(LISTED, scores.shape[-1]), -1)


def shown(seen: Tensor, places: Tensor) -> Tensor:
    return seen & torch.zeros_like(seen).scatter(-1, places, True)


def own_tables(g: Given) -> Tensor:
    """Every token has its row of the table, and sees up to its position."""
    table, positions = g.told
    latent, rope, keys = (each[table].flatten(1, 2) for each in g.pages)
    seen = torch.arange(keys.shape[1]) <= positions[:, None]
    return attended(g.query, (latent, rope), shown(seen, best(g.index, keys, seen, "tl").indices), "tl")


def by_request(g: Given) -> Tensor:
    """The table is that of sequences, and every token names its own."""
    table, request, positions = g.told
    return own_tables(Given(g.query, g.index, g.pages, (table[request], positions)))


def by_lengths(g: Given) -> Tensor:
    """A token of every sequence, of which the length is told, that may be 0."""
    table, lengths = g.told
    latent, rope, keys = (each[table].flatten(1, 2) for each in g.pages)
    seen = torch.arange(keys.shape[1]) < lengths[:, None]
    return attended(g.query, (latent, rope), shown(seen, best(g.index, keys, seen, "tl").indices), "tl")


def listed_slots(g: Given) -> Tensor:
    """Rows are gathered by slots that a list and the table of a token give, -1 for what is not seen."""
    table, positions = g.told
    keys = g.pages[2][table].flatten(1, 2)
    seen = torch.arange(keys.shape[1]) <= positions[:, None]
    scores, places = best(g.index, keys, seen, "tl")
    places = places.masked_fill(scores == -math.inf, -1)
    listed = places.clamp(min=0)
    slots = table.gather(1, listed // SIZE) * SIZE + listed % SIZE
    latent, rope = (each.view(-1, each.shape[-1])[slots] for each in g.pages[:2])
    return attended(g.query, (latent, rope), places >= 0, "tl")


def one_after_the_other(g: Given) -> Tensor:
    """A loop over sequences, whose lengths are numbers of Python."""
    table, sequences = g.told
    found, end = [], 0
    for number, (start, count) in enumerate(sequences):
        if not count:
            continue
        mine, end = slice(end, end + count), end + count
        latent, rope, keys = (each[table[number]].flatten(0, 1)[: start + count] for each in g.pages)
        seen = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        places = best(tuple(each[mine] for each in g.index), keys, seen, "l").indices
        found.append(attended(tuple(each[mine] for each in g.query), (latent, rope), shown(seen, places), "l"))
    return torch.cat(found)


def beside_each_other(g: Given) -> Tensor:
    """As many tokens of every sequence, in dims of their own, the last of them at the end of the sequence."""
    table, lengths = g.told
    count = g.query[0].shape[0] // table.shape[0]
    return by_places(Given(g.query, g.index, g.pages, (table, torch.arange(count) - count + lengths[:, None])))


def by_places(g: Given) -> Tensor:
    """The same, each up to its position."""
    table, positions = g.told
    batch = table.shape[0]
    latent, rope, keys = (each[table].flatten(1, 2) for each in g.pages)
    query = [each.unflatten(0, (batch, -1)) for each in g.query]
    iq, weights = (each.unflatten(0, (batch, -1)) for each in g.index)
    seen = torch.arange(keys.shape[1]) <= positions[..., None]
    scores = torch.einsum("bshd,bld->bshl", iq, keys).relu().float()
    scores = torch.einsum("bshl,bsh->bsl", scores, weights.float()).masked_fill(~seen, -math.inf)
    seen = shown(seen, scores.topk(LISTED, -1).indices)
    scores = torch.einsum("bshc,blc->bshl", query[0], latent) + torch.einsum("bshr,blr->bshl", query[1], rope)
    weights = (scores.float() * SCALE).masked_fill(~seen.unsqueeze(2), -math.inf).softmax(-1).to(latent.dtype)
    return torch.einsum("bshl,blc->bshc", weights, latent).flatten(0, 1)


def by_own_list(g: Given) -> Tensor:
    """Over a list that the model has from elsewhere, as far as each token sees it; 0 where it sees none of it."""
    table, positions, places = g.told
    latent, rope = (each[table].flatten(1, 2) for each in g.pages[:2])
    query = [each.unflatten(0, (table.shape[0], -1)) for each in g.query]
    seen = shown(torch.arange(latent.shape[1]) <= positions[..., None], places)
    scores = torch.einsum("bshc,blc->bshl", query[0], latent) + torch.einsum("bshr,blr->bshl", query[1], rope)
    weights = (scores.float() * SCALE).masked_fill(~seen.unsqueeze(2), -math.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("bshl,blc->bshc", weights.to(latent.dtype), latent).flatten(0, 1)


def behind_a_prefix(g: Given) -> Tensor:
    """A chunk of one sequence behind what there is of it, each token up to its position."""
    table, positions = g.told
    latent, rope, keys = (each[table].flatten(0, 1) for each in g.pages)
    seen = torch.arange(keys.shape[0]) <= positions[:, None]
    return attended(g.query, (latent, rope), shown(seen, best(g.index, keys, seen, "l").indices), "l")


def by_ranges(g: Given) -> Tensor:
    """Rows of all sequences behind each other, of which every token sees a range."""
    table, start, stop = g.told
    latent, rope, keys = (each[table.flatten()].flatten(0, 1) for each in g.pages)
    at = torch.arange(keys.shape[0])
    seen = (at >= start[:, None]) & (at < stop[:, None])
    return attended(g.query, (latent, rope), shown(seen, best(g.index, keys, seen, "l").indices), "l")


def of_the_next(g: Given) -> Tensor:
    """A token attends to what is listed for the one behind it."""
    table, positions = g.told
    latent, rope, keys = (each[table].flatten(1, 2) for each in g.pages)
    seen = torch.arange(keys.shape[1]) <= positions[:, None]
    places = best(g.index, keys, seen, "tl").indices
    return attended(g.query, (latent, rope), seen & shown(seen, places).roll(1, 0), "tl")


Form = Callable[[Given], Tensor]
MIXED = [(0, 20), (17, 1), (0, 0), (9, 3)]
ONE_EACH = [(20, 1), (17, 1), (0, 1), (9, 1)]
TWO_EACH = [(20, 2), (17, 2), (8, 2), (9, 2)]


def of_tokens(sequences: list[tuple[int, int]]) -> tuple[Any, ...]:
    request, positions = told(sequences)
    return inputs(sequences, TABLE[request], positions)


def of_ranges(sequences: list[tuple[int, int]]) -> tuple[Any, ...]:
    request, positions = told(sequences)
    start = request * TABLE.shape[1] * SIZE
    return inputs(sequences, TABLE, start, start + positions + 1)


SPELLINGS: dict[Form, tuple[Any, ...]] = {
    own_tables: of_tokens(MIXED),
    by_request: inputs(MIXED, TABLE, *told(MIXED)),
    by_lengths: inputs(ONE_EACH, TABLE, torch.tensor([21, 18, 1, 10])),
    listed_slots: of_tokens(MIXED),
    one_after_the_other: inputs(MIXED, TABLE, MIXED),
    beside_each_other: inputs(TWO_EACH, TABLE, torch.tensor([22, 19, 10, 11])),
    by_places: inputs(TWO_EACH, TABLE, told(TWO_EACH)[1].view(-1, 2)),
    behind_a_prefix: inputs([(5, 20)], TABLE[0], told([(5, 20)])[1]),
}

OWN_LIST = inputs(
    TWO_EACH,
    TABLE,
    told(TWO_EACH)[1].view(-1, 2),
    torch.randint(32, (4, 2, 8), generator=torch.Generator().manual_seed(1)),
)

LOOKALIKES: dict[Form, tuple[tuple[Any, ...], str]] = {
    of_the_next: (of_tokens(MIXED), "a query may see fewer keys than topk lists"),
}
