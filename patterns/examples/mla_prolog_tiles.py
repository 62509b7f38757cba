"""What stands before attention over lines of bytes, as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.latent_attention_whole import in_line
from patterns.examples.mla_prolog import DR, HE, B, D, E, N, norm, tables, turned
from patterns.examples.mla_prolog_quantised import multiplied, whole
from patterns.examples.quantisation import quantised

BLOCKS, SIZE, HCQ, C, TILE = 9, 4, 48, 256, 128
TABLE = torch.tensor([[3, 8, 1], [5, 2, 7]])
LENGTHS = torch.tensor([6, 11])
SCALE = (D + DR) ** -0.5


def width(tile: int = TILE) -> int:
    """Bytes of a line."""
    return C + 2 * DR + 4 * (C // tile)


def inputs(queries: int, all_layers: bool, *heads: int, tile: int = TILE) -> Inputs:
    """Hidden states, layers and scales, gains, W_ukv, tables, the cache, its block table, lengths, slots."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        sizes = ((HCQ, HE), (N * (D + DR), HCQ), (C + DR, HE))
        layers = [whole(20 + 2 * number, *size) for number, size in enumerate(sizes)]
        floats = [(normal(number, *size) / 8).to(dtype) for number, size in enumerate(sizes)]
        kept = [each for number, pair in enumerate(layers) for each in (
            pair if all_layers or number == 1 else (floats[number], pair[1]))]  # fmt: skip
        gains = 1 + normal(4, HCQ) / 8, 1 + normal(5, C) / 8, normal(3, N * (D + E), C) / 8
        fixed = [*kept, *(each.to(dtype) for each in gains)]
        x, cos, sin = (each.to(dtype) for each in (normal(8, B, queries, HE), *tables((B, queries))))
        at = LENGTHS[:, None] - queries + torch.arange(queries)
        slots = (TABLE.gather(1, at // SIZE) * SIZE + at % SIZE).flatten()
        parameters = (torch.nn.Parameter(each, requires_grad=False) for each in fixed)
        cache = lines(normal(9, BLOCKS, SIZE, C), normal(10, BLOCKS, SIZE, DR), tile)
        return x, *parameters, cos, sin, cache.reshape(BLOCKS, SIZE, *heads, -1), TABLE.clone(), LENGTHS.clone(), slots

    return make


Line = Callable[[Tensor, Tensor], Tensor]
Write = Callable[[Tensor, Tensor, Tensor], None]


def tiled(latent: Tensor, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """Whole numbers [.., C] and a scale of each tile [.., C / tile]."""
    tiles = latent.float().unflatten(-1, (-1, tile))
    scale = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (tiles / scale).round().clamp(-128, 127).to(torch.int8).flatten(-2), scale.squeeze(-1)


def lines(latent: Tensor, rope: Tensor, tile: int = TILE) -> Tensor:
    """Lines of bytes."""
    numbers, scale = tiled(latent, tile)
    return torch.cat((numbers, rope.to(torch.bfloat16).view(torch.int8), scale.view(torch.int8)), dim=-1)


def by_inverse(latent: Tensor, rope: Tensor) -> Tensor:
    """Times the inverse of the scale, which is bounded itself; bytes of each tile's scale."""
    tiles = latent.reshape(-1, C // TILE, TILE).float()
    scale = torch.clamp(tiles.abs().max(dim=-1, keepdim=True).values / 127, min=1e-10)
    numbers = torch.round(tiles * (1.0 / scale)).to(torch.int8).view(-1, C)
    key = rope.reshape(-1, DR).to(torch.bfloat16).contiguous().view(torch.int8)
    return torch.cat([numbers, key, scale.view(torch.int8).flatten(1)], dim=-1).view(*latent.shape[:-1], -1)


def model(write: Write, line: Line = lines, all_layers: bool = True, tile: int = TILE) -> Callable[..., Tensor]:
    """A function that writes the lines of some tokens and attends to the cache."""

    def forward(
        x: Tensor, dq: Tensor, dq_scale: Tensor, uq: Tensor, uq_scale: Tensor, dkv: Tensor, dkv_scale: Tensor,
        gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, table: Tensor,
        lengths: Tensor, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        queries = x.shape[1]
        if all_layers:
            rows = quantised(x)
            low, both = (multiplied(rows, *each, x.dtype) for each in ((dq, dq_scale), (dkv, dkv_scale)))
        else:
            low, both = linear(x, dq), linear(x, dkv)
        q = multiplied(quantised(norm(low, gain_q)), uq, uq_scale, x.dtype).view(B, queries, N, -1).transpose(1, 2)
        nope, rope = q.split((D, DR), dim=-1)
        rope = turned(rope, cos.unsqueeze(-3), sin.unsqueeze(-3))
        latent, turning = both.split((C, DR), dim=-1)
        write(cache, line(norm(latent, gain_kv), turned(turning, cos, sin)).flatten(0, 1), slots)
        latent, k_rope = (each.to(x.dtype).unsqueeze(1) for each in read(cache, table, tile))
        up = ukv.unflatten(0, (N, -1))[:, :D]
        scores = (nope @ up @ latent.mT + rope @ k_rope.mT) * SCALE
        seen = in_line(lengths, queries, latent.shape[2])
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ latent

    return forward


def read(cache: Tensor, table: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Latents in float32 and rotated keys in bfloat16 of the pages that a table names."""
    rows = cache[table].reshape(B, -1, cache.shape[-1])
    numbers, key, scale = rows.split((C, 2 * DR, rows.shape[-1] - C - 2 * DR), dim=-1)
    latent = numbers.float().unflatten(-1, (-1, tile)) * scale.contiguous().view(torch.float32).unsqueeze(-1)
    return latent.flatten(-2), key.contiguous().view(torch.bfloat16)


def viewed(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows of all pages by their number."""
    cache.view(-1, rows.shape[-1])[slots] = rows


def of_a_head(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The same of pages [Block, Size, 1, Line]."""
    cache.view(-1, 1, rows.shape[-1])[slots] = rows.unsqueeze(1)


def by_block(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A block and a place in it."""
    cache[slots // SIZE, slots % SIZE] = rows.view(-1, *cache.shape[2:])


def short_tiles(latent: Tensor, rope: Tensor) -> Tensor:
    """A scale of each 64 lanes."""
    return lines(latent, rope, 64)


def in_float16(latent: Tensor, rope: Tensor) -> Tensor:
    """The rotated key in another dtype of two bytes."""
    numbers, scale = tiled(latent)
    return torch.cat((numbers, rope.to(torch.float16).view(torch.int8), scale.view(torch.int8)), dim=-1)


def scales_first(latent: Tensor, rope: Tensor) -> Tensor:
    """The scales before the rotated key, which then has as many lanes as there are bytes."""
    numbers, scale = tiled(latent)
    rope = rope.to(torch.bfloat16).view(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8), rope), dim=-1)


def joined_numbers(latent: Tensor, rope: Tensor) -> Tensor:
    """Whole numbers of the rotated key too."""
    numbers, scale = tiled(latent)
    key, _ = tiled(rope, DR)
    return torch.cat((numbers, key, key, scale.view(torch.int8)), dim=-1)


def other_scales(latent: Tensor, rope: Tensor) -> Tensor:
    """Scales that are twice those of the numbers."""
    numbers, scale = tiled(latent)
    return torch.cat((numbers, rope.to(torch.bfloat16).view(torch.int8), (scale * 2).view(torch.int8)), dim=-1)


def cut_off(latent: Tensor, rope: Tensor) -> Tensor:
    """Numbers that are cut off toward zero."""
    tiles = latent.float().unflatten(-1, (-1, TILE))
    scale = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    numbers = (tiles / scale).to(torch.int8).flatten(-2)
    return torch.cat((numbers, rope.to(torch.bfloat16).view(torch.int8), scale.squeeze(-1).view(torch.int8)), dim=-1)


def by_number(latent: Tensor, rope: Tensor) -> Tensor:
    """One scale, a number, for all."""
    numbers = (latent.float() * 32).round().clamp(-128, 127).to(torch.int8)
    scale = torch.full((*latent.shape[:-1], C // TILE), 1 / 32)
    return torch.cat((numbers, rope.to(torch.bfloat16).view(torch.int8), scale.view(torch.int8)), dim=-1)


def two_in_a_row(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Pages [Block, Size, 2, Line] that take two tokens of a sequence at one slot."""
    cache.view(-1, *cache.shape[2:])[slots.view(B, 2)[:, 0]] = rows.view(B, 2, -1)


def pairs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages that hold two lines at a slot."""
    *given, cache, table, lengths, slots = inputs(2, True)(dtype)
    return *given, torch.stack((cache, cache), dim=2), table, lengths, slots


def turned_pages(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages that lie in memory as [Size, Block, ..]."""
    *given, cache, table, lengths, slots = inputs(1, True)(dtype)
    return *given, cache.transpose(0, 1).contiguous().transpose(0, 1), table, lengths, slots


EXAMPLES = (
    Example("a token, the heads quantised", model(viewed, all_layers=False), inputs(1, False)),
    Example("several tokens, all quantised", model(viewed), inputs(2, True)),
    Example("times the inverse of the scale", model(viewed, by_inverse), inputs(2, True)),
    Example("by a block and a place", model(by_block), inputs(1, True, 1)),
    Example("pages of one head", model(of_a_head, all_layers=False), inputs(2, False, 1)),
)
REJECTS = (
    Example("shorter tiles", model(viewed, short_tiles, tile=64), inputs(1, True, tile=64), "of every 64 lanes"),
    Example("another dtype", model(viewed, in_float16), inputs(1, True), "holds int8, float16, float32"),
    Example("the scales first", model(viewed, scales_first), inputs(1, True), "holds int8, float32, bfloat16"),
    Example(
        "a key in whole numbers", model(viewed, joined_numbers), inputs(1, True), "holds int8, int8, int8, float32"
    ),
    Example("scales of others", model(viewed, other_scales), inputs(1, True), "that its whole numbers were divided by"),
    Example("cut off", model(viewed, cut_off), inputs(1, True), "cut off toward zero"),
    Example("one scale for all", model(viewed, by_number), inputs(1, True), "a scale that is the largest of"),
    Example("pages that lie otherwise", model(by_block), turned_pages, "the pages are not contiguous"),
    Example("two lines at a slot", model(two_in_a_row), pairs, "hold several heads"),
)
