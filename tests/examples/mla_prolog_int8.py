"""What stands before latent attention over int8 caches, as serving code writes it, and what only looks like it.

Caches hold numbers by a scale of each channel, of the latent alone, or packed KV rows with a scale of each tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples import caches
from tests.examples import latent_model as mla
from tests.examples.caches import BLOCKS, SIZE, Write, by_block, in_nz, shapes, viewed
from tests.examples.inputs import normal
from tests.examples.latent_attention_int8 import SCALE, Attend, explicit, restored
from tests.examples.latent_model import LAYERS, Encoding, Given, Rows, Setting, absorbed, changed
from tests.examples.mla_prolog import instead
from tests.examples.quantisation import int8, quantised

TILE = 128
Quantise = Callable[[Tensor, Tensor], Tensor]
Pack = Callable[..., Tensor]


def divided(x: Tensor, scale: Tensor | float, low: int = -128) -> Tensor:
    """Divided by the scale."""
    return int8(x.float() / scale, low)


def bounded_first(x: Tensor, scale: Tensor) -> Tensor:
    """Bounded before it is rounded."""
    return (x / scale).clamp(-128, 127).round().char()


def by_inverse(x: Tensor, scale: Tensor) -> Tensor:
    """Times its inverse."""
    return torch.round(torch.clamp(x.float() * scale.reciprocal(), -128, 127)).char()


def by_number(x: Tensor, scale: Tensor) -> Tensor:
    """By a scale that is a number."""
    return divided(x, 1 / 16)


narrow = partial(divided, low=-127)
"""Between bounds of one magnitude."""


def by_channel(quantise: Quantise = divided, power: int = 1) -> Encoding:
    """Both parts by a scale of each channel; read by a power of it."""

    def keep(latent: Tensor, rope: Tensor, g: Given) -> Rows:
        return quantise(latent, g.latent_scale), quantise(rope, g.rope_scale)

    def restore(rows: Rows, g: Given) -> Rows:
        pairs = zip(rows, (g.latent_scale, g.rope_scale), strict=True)
        return tuple((each.float() * scale**power).to(g.x.dtype) for each, scale in pairs)

    return Encoding(keep, restore)


def by_tensor(quantise: Quantise = divided, scale: str = "latent_scale") -> Encoding:
    """The latent alone, by one scale; the attention takes it as it is."""
    return Encoding(lambda latent, rope, g: (quantise(latent, getattr(g, scale)), rope))


def by_scale(tiles: Tensor, scale: Tensor) -> Tensor:
    """The nearest of int8."""
    return (tiles / scale).round().clamp(-128, 127)


def joined(*parts: Tensor) -> Tensor:
    """The bytes of all parts."""
    return torch.cat([each.view(torch.int8) for each in parts], dim=-1)


def plain(numbers: Tensor, rope: Tensor, scale: Tensor) -> Tensor:
    """An int8 latent, the rotated key, scales of tiles."""
    return joined(numbers, rope.to(torch.bfloat16), scale)


def packed(
    latent: Tensor,
    rope: Tensor,
    arrange: Callable[..., Tensor] = plain,
    tile: int = TILE,
    quantise: Quantise = by_scale,
) -> Tensor:
    """A row of `arrange(numbers, rope, scales)`: int8 [.., C], and a scale of each tile [.., C / tile]."""
    tiles = latent.float().unflatten(-1, (-1, tile))
    scale = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return arrange(quantise(tiles, scale).to(torch.int8).flatten(-2), rope, scale.squeeze(-1))


def int8_key(numbers: Tensor, rope: Tensor, scale: Tensor) -> Tensor:
    """The rotated key in int8 too."""
    key = packed(rope, rope, lambda key, *_: key, rope.shape[-1])
    return joined(numbers, key, key, scale)


def packed_by_inverse(latent: Tensor, rope: Tensor) -> Tensor:
    """Times the inverse of the scale, which is bounded itself."""
    tiles = latent.reshape(-1, latent.shape[-1] // TILE, TILE).float()
    scale = torch.clamp(tiles.abs().max(dim=-1, keepdim=True).values / 127, min=1e-10)
    numbers = torch.round(tiles * (1.0 / scale)).to(torch.int8).flatten(1)
    key = rope.reshape(-1, rope.shape[-1]).to(torch.bfloat16).contiguous()
    return joined(numbers, key, scale.flatten(1)).view(*latent.shape[:-1], -1)


def one_scale(latent: Tensor, rope: Tensor) -> Tensor:
    """One scale, a number, for all."""
    scale = torch.full((*latent.shape[:-1], latent.shape[-1] // TILE), 1 / 32)
    return plain(divided(latent, 1 / 32), rope, scale)


def by_tile(pack: Pack = packed, **parts: Any) -> Encoding:
    """Packed rows of both parts."""

    def restore(rows: Rows, g: Given) -> Rows:
        c, dr = g.gain_kv.shape[-1], g.cos.shape[-1]
        numbers, key, scale = rows[0].split((c, 2 * dr, rows[0].shape[-1] - c - 2 * dr), dim=-1)
        scale = scale.contiguous().view(torch.float32).unsqueeze(-1)
        latent = (numbers.float().unflatten(-1, (scale.shape[-2], -1)) * scale).flatten(-2)
        return latent.to(g.x.dtype), key.contiguous().view(torch.bfloat16).to(g.x.dtype)

    return Encoding(lambda latent, rope, g: (pack(latent, rope, **parts),), restore)


def rows_of_bytes(c: int, dr: int, tile: int = TILE, heads: tuple[int, ...] = ()) -> Callable[[], Tensor]:
    """A cache of packed rows."""
    parts = normal(9, BLOCKS, SIZE, c), normal(10, BLOCKS, SIZE, dr)
    return lambda: packed(*parts, tile=tile).reshape(BLOCKS, SIZE, *heads, -1)


def numbered(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """A scale that is a number."""
    int8_queries, tokens = quantised(q)
    scores = (int8_queries.float() * tokens) @ (latent.float() / 16).unsqueeze(1).mT
    scores = scores + rope.float() @ k_rope.float().unsqueeze(1).mT
    shares = (scores * SCALE).masked_fill(~seen, -math.inf).softmax(-1)
    return (shares @ (latent.float() / 16).unsqueeze(1)).to(q.dtype)


def doubled(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Another scale than that of the rows that are written."""
    return explicit(q, rope, latent, k_rope, seen, scale * 2)


in_pages = partial(mla.in_pages, attend=absorbed)
HEAD = (1,)
ALL = Setting(int8=LAYERS, c=256, made=rows_of_bytes(256, 16))
TWO = replace(ALL, queries=2)
HEADS = replace(ALL, int8=("uq",))
ONE_HEAD = rows_of_bytes(256, 16, heads=HEAD)
PAIRS = changed(TWO, lambda cache: torch.stack((cache, cache), dim=2))
TILES = by_tile()
SHORT_TILES = by_tile(tile=64)
FLOAT16 = by_tile(arrange=lambda numbers, rope, scale: joined(numbers, rope.half(), scale))
SCALES_FIRST = by_tile(arrange=lambda numbers, rope, scale: joined(numbers, scale, rope.to(torch.bfloat16)))
OTHER_SCALES = by_tile(arrange=lambda numbers, rope, scale: plain(numbers, rope, scale * 2))
PACKED = (
    in_pages("a token, the heads quantised", HEADS, viewed, TILES),
    in_pages("several tokens, all quantised", TWO, viewed, TILES),
    in_pages("times the inverse of the scale", TWO, viewed, by_tile(packed_by_inverse)),
    in_pages("by a block and a place", replace(ALL, made=ONE_HEAD), by_block, TILES),
    in_pages("pages of one head", replace(HEADS, queries=2, made=ONE_HEAD), viewed, TILES),
    in_pages("shorter tiles", replace(ALL, made=rows_of_bytes(256, 16, 64)), viewed, SHORT_TILES, "each 64 lanes"),
    in_pages("another dtype", ALL, viewed, FLOAT16, "bytes are int8, float16, float32"),
    in_pages("the scales first", ALL, viewed, SCALES_FIRST, "bytes are int8, float32, bfloat16"),
    in_pages("a key in whole numbers", ALL, viewed, by_tile(arrange=int8_key), "bytes are int8, int8, int8, float32"),
    in_pages("scales of others", ALL, viewed, OTHER_SCALES, "the scales in it are not those that its"),
    in_pages("cut off", ALL, viewed, by_tile(quantise=torch.div), "cut off toward zero"),
    in_pages("one scale for all", ALL, viewed, by_tile(one_scale), "its int8 are not tiles of lanes"),
    in_pages("pages that lie otherwise", changed(ALL, caches.turned), by_block, TILES, "its pages are not contiguous"),
    in_pages("two lines at a slot", PAIRS, caches.two_in_a_row, TILES, "its pages have several heads"),
)

CHANNEL = Setting(1, shapes(64, 32), ("uq",), (True, True), c=64, dr=32)
TWO_TOKENS = replace(CHANNEL, queries=2)
ONE_SCALE = replace(TWO_TOKENS, shapes=shapes(64, 32, heads=HEAD), one_scale=True)
TWO_HEADS = replace(TWO_TOKENS, shapes=shapes(64, 32, heads=(2,)))
CHANNELS = by_channel()
BY_CHANNEL = (
    in_pages("a token", CHANNEL, viewed, CHANNELS),
    in_pages("a token of one sequence", replace(CHANNEL, batch=1), viewed, CHANNELS),
    in_pages("several tokens, times the inverse", TWO_TOKENS, viewed, by_channel(by_inverse)),
    in_pages("pages of one head, a scale of all channels", ONE_SCALE, viewed, CHANNELS),
    in_pages("lines", replace(TWO_TOKENS, shapes=shapes(64, 32, 32)), in_nz, CHANNELS),
    in_pages("a scale that is a number", CHANNEL, by_block, by_channel(by_number)),
    in_pages("read by other scales", CHANNEL, viewed, by_channel(divided, 2)),
    in_pages("short lines", replace(CHANNEL, shapes=shapes(64, 32, 16)), in_nz, CHANNELS, "read as lines of 16 lanes"),
    in_pages("other bounds", CHANNEL, viewed, by_channel(narrow), "clamped to -127 and 127"),
    in_pages("two tokens at a slot", TWO_HEADS, caches.two_in_a_row, CHANNELS, "its pages have several heads"),
)


def by_tensor_in(
    name: str,
    setting: Setting,
    write: Write = in_nz,
    quantise: Quantise = divided,
    attend: Attend = explicit,
    refusal: str = "",
) -> Example:
    """By tensor, with int8 queries."""
    return mla.in_pages(name, setting, write, by_tensor(quantise), refusal, partial(mla.over_int8, attend=attend))


TENSOR = Setting(1, shapes(64, 16), LAYERS, (True, False), c=64, one_scale=True)
TENSOR_NZ = replace(TENSOR, shapes=shapes(64, 16, 32, 16))
NZ_OF_A_HEAD = replace(TENSOR, queries=2, shapes=shapes(64, 16, 32, 16, heads=HEAD))
SHORT = replace(TENSOR, shapes=shapes(64, 16, 8))
BY_TENSOR = (
    by_tensor_in("pages through a view", TENSOR, viewed, by_inverse),
    by_tensor_in("several tokens by block", replace(TENSOR, queries=2), by_block, bounded_first),
    by_tensor_in("lines", TENSOR_NZ, attend=restored),
    by_tensor_in("lines of a head", NZ_OF_A_HEAD, in_nz, by_inverse),
    by_tensor_in("a scale that is a number", TENSOR_NZ, in_nz, by_number, numbered),
    by_tensor_in("another scale", TENSOR_NZ, attend=doubled, refusal="it is read with another than it is written"),
    by_tensor_in("shorter lines", SHORT, refusal="lines of 8 lanes; npu_mla_prolog_v3 requires lines of 32"),
    by_tensor_in("other bounds", TENSOR_NZ, in_nz, narrow, refusal="clamped to -127 and 127"),
)

TRIED = {
    "mla_prolog": (
        *instead(PACKED, "packed: "),
        *instead(BY_CHANNEL, "int8 by channel: "),
        *instead(BY_TENSOR, "int8 by tensor: "),
    )
}
