"""The prologue of latent attention by its parts: how layers are computed, where rows go, and what multiplies latents.

`cell(layers, store, factors, queries)` puts one model together; what the operator allows is said in `MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.latent_attention_whole import explicit, in_line
from patterns.examples.mla_prolog import norm, tables, turned
from patterns.examples.quantisation import product as int8_product
from patterns.examples.quantisation import quantised
from patterns.examples.quantisation import weights as int8_numbers

B, N, HE, HCQ, C, D, DR, E, BLOCKS, SIZE, T = 2, 4, 64, 48, 64, 16, 32, 16, 9, 4, 32
TILE, WIDE = 128, 256
TABLE, LENGTHS = torch.tensor([[3, 8, 1], [5, 2, 7]]), torch.tensor([6, 11])
STATIC = 1 / 32
INT8 = {"float": (), "int8 heads": ("uq",), "int8": ("dq", "uq", "dkv")}
"""Layers -> those in W8A8."""
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Factors:
    """What multiplies the latent of the queries, all of its heads, both of their parts, one, and the latent row."""

    latent: float = 1.0
    heads: float = 1.0
    parts: float = 1.0
    nope: float = 1.0
    row: float = 1.0


@dataclass(frozen=True)
class Store:
    """Caches of some dtypes and shapes for latents of some lanes, what is written, and how it is read."""

    mode: int = 0
    lanes: int = C
    shapes: tuple[tuple[int, ...], ...] = ()
    int8: tuple[bool, ...] = (False, False)
    keep: Callable[[Tensor, Tensor], tuple[Tensor, ...]] = lambda latent, rope: (latent, rope)
    write: Callable[[Tensor, Tensor, Tensor], None] | None = None
    read: Callable[[Tensor, Tensor], Tensor] = lambda cache, table: cache
    give: Callable[[Tensor, Tensor, torch.dtype], Rows] = lambda latent, rope, dtype: (latent, rope)

    def caches(self, dtype: torch.dtype) -> list[Tensor]:
        """Caches that hold something."""
        if self.keep is packed:
            return [packed(normal(9, BLOCKS, SIZE, WIDE), normal(10, BLOCKS, SIZE, DR))[0]]
        pairs = enumerate(zip(self.shapes, self.int8, strict=False))
        return [int8_numbers(n, *shape) if int8 else normal(9 + n, *shape).to(dtype) for n, (shape, int8) in pairs]


def whole(x: Tensor, scale: float) -> Tensor:
    """By a static scale."""
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


def packed(latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
    """One row of bytes."""
    tiles = latent.float().unflatten(-1, (-1, TILE))
    scale = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    numbers = (tiles / scale).round().clamp(-128, 127).to(torch.int8).flatten(-2)
    key, scale = rope.to(torch.bfloat16), scale.squeeze(-1)
    return (torch.cat((numbers, key.view(torch.int8), scale.view(torch.int8)), dim=-1),)


def unpacked(row: Tensor) -> Rows:
    """What such a row holds."""
    numbers, key, scale = row.split((WIDE, 2 * DR, 4 * (WIDE // TILE)), dim=-1)
    latent = numbers.float().unflatten(-1, (-1, TILE)) * scale.contiguous().view(torch.float32).unsqueeze(-1)
    return latent.flatten(-2), key.contiguous().view(torch.bfloat16)


def at_positions(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Consecutive positions of every sequence."""
    cache.index_copy_(1, slots.clamp(min=0) + torch.arange(rows.shape[1]), rows)


def at_slots(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Slots of all pages."""
    cache.view(-1, rows.shape[-1])[slots] = rows.flatten(0, 1)


def in_blocks(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Slots of pages in NZ."""
    cache[slots // SIZE, :, slots % SIZE] = rows.flatten(0, 1).unflatten(-1, (-1, cache.shape[-1]))


def of_pages(cache: Tensor, table: Tensor) -> Tensor:
    """The rows of the pages of each sequence."""
    return cache[table].reshape(B, -1, cache.shape[-1])


def of_blocks(cache: Tensor, table: Tensor) -> Tensor:
    """The same of pages in NZ."""
    return cache[table].transpose(2, 3).reshape(B, table.shape[1] * SIZE, -1)


def _pages(*lanes: int) -> tuple[tuple[int, ...], ...]:
    widths = zip((C, DR), lanes or (0, 0), strict=True)
    return tuple((BLOCKS, width // each, SIZE, each) if each else (BLOCKS, SIZE, width) for width, each in widths)


def _by_channel(latent: Tensor, rope: Tensor) -> Rows:
    return whole(latent, STATIC), whole(rope, STATIC)


def _by_tensor(latent: Tensor, rope: Tensor) -> Rows:
    return whole(latent, STATIC), rope


def _restored(latent: Tensor, rope: Tensor, dtype: torch.dtype) -> Rows:
    latent, rope = ((each.float() * STATIC).to(dtype) for each in (latent, rope))
    return latent, rope


def _halves(row: Tensor, _: Tensor, dtype: torch.dtype) -> Rows:
    latent, rope = (each.to(dtype) for each in unpacked(row))
    return latent, rope


_ND: dict[str, Any] = dict(write=at_slots, read=of_pages)
_NZ: dict[str, Any] = dict(write=in_blocks, read=of_blocks)
_CHANNEL: dict[str, Any] = dict(mode=2, int8=(True, True), keep=_by_channel, give=_restored)
_TENSOR: dict[str, Any] = dict(mode=1, int8=(True, False), keep=_by_tensor)
_PACKED: dict[str, Any] = dict(
    mode=3, lanes=WIDE, shapes=((BLOCKS, SIZE, WIDE + 2 * DR + 4 * (WIDE // TILE)),), int8=(True,)
)
STORES = {
    "fresh": Store(),
    "rows": Store(shapes=((B, T, C), (B, T, DR)), write=at_positions),
    "pages": Store(shapes=_pages(), **_ND),
    "NZ": Store(shapes=_pages(16, 16), **_NZ),
    "int8 by channel": Store(shapes=_pages(), **_CHANNEL, **_ND),
    "int8 by channel, NZ": Store(shapes=_pages(32, 32), **_CHANNEL, **_NZ),
    "int8 by tensor": Store(shapes=_pages(), **_TENSOR, **_ND),
    "int8 by tensor, NZ": Store(shapes=_pages(32, 16), **_TENSOR, **_NZ),
    "packed": Store(keep=packed, give=_halves, **_PACKED, **_ND),
}
"""Where rows go, and the mode of the caches."""
PLAIN = tuple(store for store in STORES if "NZ" not in store)
MODES = {"float": (0,), "int8 heads": (0, 2, 3), "int8": (0, 1, 3)}
"""Layers -> the modes of the caches that the operator takes with them."""


def inputs(layers: str, store: Store, queries: int) -> Inputs:
    """Hidden states, tables, layers with their scales, gains, W_UKV, caches, the block table, lengths, slots."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, cos, sin = (each.to(dtype) for each in (normal(8, B, queries, HE), *tables((B, queries), DR)))
        sizes = {"dq": (HCQ, HE), "uq": (N * (D + DR), HCQ), "dkv": (store.lanes + DR, HE)}
        floats = {name: (normal(n, *size) / 8).to(dtype) for n, (name, size) in enumerate(sizes.items())}
        int8 = {name: int8_numbers(20 + n, *size) for n, (name, size) in enumerate(sizes.items())}
        kept = [(int8 if name in INT8[layers] else floats)[name] for name in sizes]
        scales = [(normal(30 + n, size[0]).abs() + 1).float() / 2**11 for n, size in enumerate(sizes.values())]
        more = 1 + normal(4, HCQ) / 8, 1 + normal(5, store.lanes) / 8, normal(3, N * (D + E), store.lanes) / 8
        fixed = (*kept, *scales, *(each.to(dtype) for each in more))
        at = LENGTHS[:, None] - queries + torch.arange(queries)
        slots, lengths = (TABLE.gather(1, at // SIZE) * SIZE + at % SIZE).flatten(), LENGTHS.clone()
        if store.write is at_positions:
            slots, lengths = torch.tensor(5), torch.full((B,), 5 + queries)
        parameters = (torch.nn.Parameter(each, requires_grad=False) for each in fixed)
        return x, cos, sin, *parameters, TABLE.clone(), lengths, slots, *store.caches(dtype)

    return make


def model(
    layers: str, store: Store, factors: Factors, also: Callable[[Tensor], Tensor] | None = None
) -> Callable[..., Any]:
    """A function of these parts; `also` reads the latent of the queries too."""

    def layer(name: str, x: Tensor | Rows, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(x, Tensor) and name not in INT8[layers]:
            return linear(x, weight)
        rows, tokens = x if isinstance(x, tuple) else quantised(x)
        return (int8_product(rows, weight).float() * tokens * scale).to(dtype)

    def forward(x, cos, sin, dq, uq, dkv, *rest):
        (dq_scale, uq_scale, dkv_scale, gain_q, gain_kv, ukv, table, lengths, slots), caches = rest[:9], rest[9:]
        queries, rows = x.shape[1], quantised(x) if layers == "int8" else x
        low = multiplied(norm(layer("dq", rows, dq, dq_scale, x.dtype), gain_q), factors.latent)
        q = multiplied(layer("uq", low, uq, uq_scale, x.dtype), factors.heads)
        q = q.view(B, queries, N, -1).transpose(1, 2)
        nope, rope = (multiplied(each, factors.parts) for each in q.split((D, DR), dim=-1))
        nope = multiplied(nope, factors.nope)
        rope = turned(rope, cos.unsqueeze(-3), sin.unsqueeze(-3))
        latent, turning = layer("dkv", rows, dkv, dkv_scale, x.dtype).split((store.lanes, DR), dim=-1)
        new = store.keep(multiplied(norm(latent, gain_kv), factors.row), turned(turning, cos, sin))
        for cache, row in zip(caches, new, strict=False):
            assert store.write is not None
            store.write(cache, row, slots)
        both = [store.read(each, table) for each in caches] or list(new)
        seen = in_line(lengths if caches else torch.full_like(lengths, queries), queries, both[0].shape[1])
        if store.mode == 1:
            return explicit(nope @ ukv.unflatten(0, (N, -1))[:, :D], rope, both[0], both[1], seen, STATIC)
        y = expanded(torch.cat((nope, rope), -1), *store.give(both[0], both[-1], x.dtype), ukv, seen)
        return y if also is None else (y, also(low))

    return forward


def expanded(q: Tensor, latent: Tensor, rope: Tensor, ukv: Tensor, seen: Tensor) -> Tensor:
    """Attention of [B, N, S, D + Dr] over keys and values of all heads."""
    nope, values = linear(latent, ukv).unflatten(-1, (N, -1)).transpose(1, 2).split((D, E), dim=-1)
    keys = torch.cat((nope, rope.unsqueeze(1).expand(-1, N, -1, -1)), dim=-1)
    return scaled_dot_product_attention(q, keys, values, seen)


def multiplied(x: Tensor, factor: float) -> Tensor:
    """Times a number, unless that is 1."""
    return x if factor == 1 else x * factor


def cell(layers: str, store: str, factors: Factors = Factors(), refusal: str = "", instead: str = "") -> Example:
    """The example of one cell, of a token in a cache or of two without one."""
    said = "".join(f", {name} x {by}" for name, by in vars(factors).items() if by != 1)
    kind = STORES[store]
    function, made = model(layers, kind, factors), inputs(layers, kind, 1 if kind.shapes else 2)
    return Example(f"{layers} layers, {store}{said}", function, made, refusal, instead)


def legal() -> Iterator[tuple[str, str]]:
    """The cells that the operator takes."""
    return ((layers, store) for layers, store in product(INT8, STORES) if STORES[store].mode in MODES[layers])


def illegal() -> Iterator[tuple[str, str]]:
    """All others."""
    return ((layers, store) for layers, store in product(INT8, STORES) if STORES[store].mode not in MODES[layers])


EXAMPLES = (
    cell("float", "rows", Factors(latent=2.0)),
    cell("int8 heads", "rows", Factors(latent=2.0, row=0.5)),
    cell("int8 heads", "pages", Factors(parts=2.0, row=0.5)),
    cell("int8", "fresh", Factors(heads=2.0, row=0.5)),
    cell("int8", "NZ", Factors(parts=2.0, row=0.5)),
    cell("int8 heads", "int8 by channel", Factors(parts=2.0)),
    cell("int8", "int8 by tensor, NZ", Factors(parts=2.0)),
    cell("int8 heads", "packed", Factors(latent=2.0, row=0.5)),
)
REJECTS = (
    *(cell(*each, refusal="other modes do not go together", instead="Fresh") for each in illegal() if each[1] in PLAIN),
    *(cell(layers, "rows", Factors(nope=2.0), "rotated queries are multiplied by") for layers in INT8),
)
