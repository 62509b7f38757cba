"""A block of DeepSeek-V3.2 over packed tokens [T, H] and pages, in the many ways in which serving code spells it.

A spelling names one way for every part; whatever they are, the block means the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS, SIZE = 16, 16
TABLE = torch.tensor([[3, 6, 1], [0, 5, 2], [9, 10, 11]], dtype=torch.int32)
NEW = ((39, 2), (18, 1), (23, 3))
"""Where the new tokens of every sequence begin, and how many there are."""


@dataclass(frozen=True)
class Sizes:
    hidden: int = 1024
    heads: int = 4
    q_lora: int = 1536
    latent: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    index_heads: int = 8
    index: int = 128
    listed: int = 24


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# rotations of lanes by tables [T, 1, R] whose halves are alike -------------------------------------------------------


def by_joined_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (left, right), c, s = x.chunk(2, -1), half(cos), half(sin)
    return torch.cat((left * c - right * s, right * c + left * s), -1)


def by_wide_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(wide(x), wide(cos), wide(sin)).to(x.dtype)


def pairs_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right, c, s = x[..., ::2], x[..., 1::2], half(cos), half(sin)
    return torch.cat((left * c - right * s, right * c + left * s), -1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right, c, s = x[..., ::2], x[..., 1::2], half(cos), half(sin)
    return torch.stack((left * c - right * s, right * c + left * s), -1).flatten(-2)


def complex_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)).contiguous()) * torch.complex(
        wide(half(cos)).contiguous(), wide(half(sin)).contiguous()
    )
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def half(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2]


ROTATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        each.__name__: each
        for each in (by_joined_halves, by_halves, by_wide_halves, pairs_to_halves, pairs, complex_pairs)
    }
)

# parts -> the ways to spell them, the plainest first
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "index_rotation": ("by_joined_halves", "by_halves", "by_wide_halves", "pairs_to_halves", "pairs"),
        "rotation": ("pairs_to_halves", "complex_pairs"),
        "index_lanes": ("split", "slices", "written"),
        "index_norm": ("torch", "wide", "written"),
        "norm": ("written", "torch"),
        "products": ("einsum", "matmul", "bmm", "by_weights"),
        "factor": ("weights", "query", "scores"),
        "mask": ("fill", "add", "where"),
        "write": ("index", "index_copy", "place", "scatter"),
        "read": ("pages", "index_select", "rows"),
        "tables": ("given", "looked_up"),
        "weights": ("narrow", "wide"),
        "attention": (
            "mask",
            "added_mask",
            "rows",
            "rows_by_scores",
            "flat",
            "flat_by_scores",
            "minus_one",
            "slots",
            "all_slots",
        ),
    }
)
Spelling = Mapping[str, str]
PLAIN: Spelling = MappingProxyType({part: ways[0] for part, ways in PARTS.items()})
EACH: tuple[Spelling, ...] = tuple({part: way} for part, ways in PARTS.items() for way in ways[1:])
"""All that differ from the plainest in one part."""


def any_spelling(seed: int) -> Spelling:
    chosen = Random(seed)
    return {part: chosen.choice(ways) for part, ways in PARTS.items()}


class Block(nn.Module):
    """From the residual add before the norm to the last projection."""

    def __init__(self, of: Sizes, spelling: Spelling) -> None:
        super().__init__()
        self.of, self.spelt = of, PLAIN | dict(spelling)
        shapes = dict(
            q_a=(of.q_lora, of.hidden), q_b=(of.heads * (of.nope + of.rope), of.q_lora),
            kv_a=(of.latent + of.rope, of.hidden), kv_b=(of.heads * (of.nope + of.value), of.latent),
            out=(of.hidden, of.heads * of.value), index_q=(of.index_heads * of.index, of.q_lora),
            index_k=(of.index, of.hidden), index_w=(of.index_heads, of.hidden),
        )  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5, requires_grad=False))
        for name, size in dict(gain=of.hidden, q_gain=of.q_lora, kv_gain=of.latent, k_gain=of.index).items():
            setattr(self, name, nn.Parameter(torch.rand(size) + 0.5, requires_grad=False))
        self.k_bias = nn.Parameter(torch.randn(of.index) / 8, requires_grad=False)

    def forward(
        self, x: Tensor, residual: Tensor, tables: tuple[Tensor, Tensor], caches: tuple[Tensor, ...], slots: Tensor,
        table: Tensor, positions: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        of, residual = self.of, residual + x
        looked_up = self.spelt["tables"] == "looked_up"
        cos, sin = (each[positions][:, None] if looked_up else each for each in tables)
        x = self.normed(residual, self.gain)
        low = self.normed(F.linear(x, self.q_a), self.q_gain)
        nope, q_rope = F.linear(low, self.q_b).view(-1, of.heads, of.nope + of.rope).split((of.nope, of.rope), -1)
        latent, rope = F.linear(x, self.kv_a).split((of.latent, of.rope), -1)
        turn = ROTATIONS[self.spelt["rotation"]]
        rope = turn(rope[:, None], cos, sin).squeeze(1)
        key = self.index_turned(self.index_normed(F.linear(x, self.index_k))[:, None], cos, sin).squeeze(1)
        for pages, rows in zip(caches, (self.normed(latent, self.kv_gain), rope, key), strict=True):
            self.write(pages, rows, slots)
        latents, ropes, keys = (self.read(pages, table) for pages in caches)
        seen = torch.arange(keys.shape[1]) <= positions[:, None]
        best, places = self.scores(x, low, cos, sin, keys, seen).topk(of.listed, -1)
        up_key, up_value = self.kv_b.view(of.heads, -1, of.latent).split((of.nope, of.value), 1)
        q = torch.einsum("thd,hdc->thc", nope, up_key), turn(q_rope, cos, sin)
        if self.spelt["attention"] in ("mask", "added_mask"):
            rows = latents, ropes
            hidden = ~(seen & torch.zeros_like(seen).scatter(-1, places, True))
        else:
            rows, hidden = self.listed((latents, ropes), caches, table, (best, places), positions)
        y = self.attended(q, rows, hidden)
        return F.linear(torch.einsum("thc,hec->the", y, up_value).flatten(1), self.out), residual

    def normed(self, x: Tensor, gain: Tensor) -> Tensor:
        if self.spelt["norm"] == "torch":
            return F.rms_norm(x, x.shape[-1:], gain, 1e-6)
        return gain * (wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def index_normed(self, x: Tensor) -> Tensor:
        match self.spelt["index_norm"]:
            case "torch":
                return F.layer_norm(x, x.shape[-1:], self.k_gain, self.k_bias, 1e-6)
            case "wide":
                return F.layer_norm(wide(x), x.shape[-1:], wide(self.k_gain), wide(self.k_bias), 1e-6).to(x.dtype)
            case _:
                apart = wide(x) - wide(x).mean(-1, keepdim=True)
                turned = apart * torch.rsqrt(apart.pow(2).mean(-1, keepdim=True) + 1e-6)
                return (turned * wide(self.k_gain) + wide(self.k_bias)).to(x.dtype)

    def index_turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn, lanes = ROTATIONS[self.spelt["index_rotation"]], self.of.rope
        match self.spelt["index_lanes"]:
            case "split":
                rope, rest = x.split((lanes, self.of.index - lanes), -1)
                return torch.cat((turn(rope, cos, sin), rest), -1)
            case "slices":
                return torch.cat((turn(x[..., :lanes], cos, sin), x[..., lanes:]), -1)
            case _:
                x = x.clone()
                x[..., :lanes] = turn(x[..., :lanes], cos, sin)
                return x

    def write(self, pages: Tensor, rows: Tensor, slots: Tensor) -> None:
        flat = pages.view(-1, pages.shape[-1])
        match self.spelt["write"]:
            case "index":
                flat[slots] = rows
            case "index_copy":
                flat.index_copy_(0, slots, rows)
            case "place":
                pages[slots // SIZE, slots % SIZE] = rows
            case _:
                flat.scatter_(0, slots[:, None].expand(-1, pages.shape[-1]), rows)

    def read(self, pages: Tensor, table: Tensor) -> Tensor:
        match self.spelt["read"]:
            case "pages":
                return pages[table].flatten(1, 2)
            case "index_select":
                return pages.index_select(0, table.flatten()).view(table.shape[0], -1, pages.shape[-1])
            case _:
                return pages.view(-1, pages.shape[-1])[all_slots(table)]

    def scores(self, x: Tensor, low: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        of, factor = self.of, (self.of.index_heads * self.of.index) ** -0.5
        query = self.index_turned(F.linear(low, self.index_q).view(-1, of.index_heads, of.index), cos, sin)
        narrow = self.spelt["weights"] == "narrow"
        weights = wide(F.linear(x, self.index_w)) if narrow else F.linear(wide(x), wide(self.index_w))
        weights = weights * factor if self.spelt["factor"] == "weights" else weights
        query = query * factor if self.spelt["factor"] == "query" else query
        match self.spelt["products"]:
            case "einsum":
                scores = torch.einsum("thl,th->tl", wide(torch.einsum("thd,tld->thl", query, keys).relu()), weights)
            case "matmul":
                scores = (F.relu(torch.matmul(wide(query), wide(keys).mT)) * weights[..., None]).sum(1)
            case "bmm":
                scores = (wide(torch.bmm(query, keys.mT)).clamp(min=0) * weights.unsqueeze(-1)).sum(-2)
            case _:
                scores = (weights[:, None] @ wide(F.relu(query @ keys.mT))).squeeze(1)
        scores = scores * factor if self.spelt["factor"] == "scores" else scores
        match self.spelt["mask"]:
            case "fill":
                return scores.masked_fill(~seen, -math.inf)
            case "add":
                return scores + torch.zeros(seen.shape, dtype=scores.dtype).masked_fill(~seen, -math.inf)
            case _:
                return torch.where(seen, scores, -math.inf)

    def listed(
        self, rows: tuple[Tensor, ...], caches: tuple[Tensor, ...], table: Tensor, found: tuple[Tensor, Tensor],
        positions: Tensor,
    ) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
        """The rows [T, K, D] that are listed, and which entries count for nothing."""
        how, (best, places) = self.spelt["attention"], found
        hidden = best == -math.inf if how.endswith("by_scores") else places > positions[:, None]
        if how == "minus_one":
            places = places.masked_fill(hidden, -1)
            hidden, places = places < 0, places.clamp(min=0)
        tokens = torch.arange(places.shape[0])[:, None]
        match how:
            case "slots":
                slots = table.long().gather(1, places // SIZE) * SIZE + places % SIZE
            case "all_slots":
                slots = all_slots(table).gather(1, places)
            case "flat" | "flat_by_scores":
                flat = places + tokens * rows[0].shape[1]
                return tuple(each.reshape(-1, each.shape[-1])[flat] for each in rows), hidden
            case _:
                return tuple(each[tokens, places] for each in rows), hidden
        return tuple(each.view(-1, each.shape[-1])[slots] for each in caches[:2]), hidden

    def attended(self, q: tuple[Tensor, Tensor], rows: tuple[Tensor, ...], hidden: Tensor) -> Tensor:
        scores = torch.einsum("thc,tlc->thl", q[0], rows[0]) + torch.einsum("thr,tlr->thl", q[1], rows[1])
        scores = scores * (self.of.nope + self.of.rope) ** -0.5
        if self.spelt["attention"] == "added_mask":
            scores = wide(scores) + torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)[:, None]
        else:
            scores = scores.masked_fill(hidden[:, None], -math.inf)
        weights = scores.softmax(-1, dtype=wide(scores).dtype).to(rows[0].dtype)
        return torch.einsum("thl,tlc->thc", weights, rows[0])


def all_slots(table: Tensor) -> Tensor:
    """The slots of all rows that a table names."""
    return (table[:, :, None].long() * SIZE + torch.arange(SIZE)).flatten(1)


class Model(nn.Module):
    """Some blocks, without what stands between."""

    def __init__(self, layers: int, spelling: Spelling, of: Sizes = Sizes()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(of, spelling) for _ in range(layers))

    def forward(self, x: Tensor, residual: Tensor, tables: Any, caches: Any, *of_tokens: Tensor) -> Any:
        for layer, own in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, tables, own, *of_tokens)
        return x, residual


def inputs(model: Model, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    """New tokens of three sequences, and pages that hold what was before."""
    block: Any = model.layers[0]
    of, made = block.of, torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).bfloat16().to(dtype)

    sequence = torch.cat([torch.full((count,), number) for number, (_, count) in enumerate(NEW)])
    positions = torch.cat([torch.arange(first, first + count) for first, count in NEW])
    at = torch.arange(64) if block.spelt["tables"] == "looked_up" else positions
    angles = (at[:, None] / 10000.0 ** (torch.arange(0, of.rope, 2) / of.rope)).repeat(1, 2)
    angles = angles if block.spelt["tables"] == "looked_up" else angles[:, None]
    tables = tuple(each.bfloat16().to(dtype) for each in (angles.cos(), angles.sin()))
    caches = [tuple(numbers(BLOCKS, SIZE, w) for w in (of.latent, of.rope, of.index)) for _ in model.layers]
    table = TABLE[sequence]
    slots = table.long().gather(1, positions[:, None] // SIZE).squeeze(1) * SIZE + positions % SIZE
    x, residual = numbers(len(positions), of.hidden), numbers(len(positions), of.hidden)
    return x, residual, tables, caches, slots, table, positions
