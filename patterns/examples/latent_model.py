"""A small model of latent attention by its parts: layers, rotation, how rows are encoded and stored, attention.

`Setting` makes its inputs, `model` puts it together. Layers whose weight is int8 are W8A8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from patterns.examples.caches import LENGTHS, SIZE, TABLE, Read, Write, of_pages, viewed
from patterns.examples.inputs import Inputs, normal
from patterns.examples.latent_attention_int8 import Attend, explicit, in_line
from patterns.examples.quantisation import int8_layer, product, quantised, scales, weights

B, N, HE, HCQ, D, E, LISTED = 2, 4, 64, 48, 16, 16, 4
LAYERS = ("dq", "uq", "dkv")
Rows = tuple[Tensor, ...]


class Given(NamedTuple):
    """What the model is given before its caches; `seen` is a length for each sequence, or the keys of each query."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    dq: Tensor
    uq: Tensor
    dkv: Tensor
    dq_scale: Tensor
    uq_scale: Tensor
    dkv_scale: Tensor
    gain_q: Tensor
    gain_kv: Tensor
    ukv: Tensor
    latent_scale: Tensor
    rope_scale: Tensor
    table: Tensor
    seen: Tensor
    slots: Tensor


FIXED = Given._fields[3:14]
LAYERS_FIXED = Given._fields[3:9]


@dataclass(frozen=True)
class Setting:
    """Makes inputs: sizes, layers in W8A8, Parameters, caches, and where rows go.

    With a position `at`, rows go there instead of to pages; with `listed`, each query sees some of so many keys.
    """

    queries: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()
    int8: tuple[str, ...] = ()
    int8_caches: tuple[bool, ...] = (False, False)
    fixed: tuple[str, ...] = FIXED
    c: int = 32
    dr: int = 16
    batch: int = B
    at: int | None = None
    listed: int = 0
    table: tuple[int, ...] = ()
    head: int = 0
    line: int = 0
    one_scale: bool = False
    made: Callable[[], Tensor] | None = None

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Fresh inputs."""
        given = {name: each.to(dtype) for name, each in self._floats().items()} | self._int8() | self._places()
        tensors = (given[name] for name in Given._fields)
        named = zip(Given._fields, tensors, strict=True)
        held = (torch.nn.Parameter(x, requires_grad=False) if name in self.fixed else x for name, x in named)
        return *held, *self._caches(dtype)

    def _sizes(self) -> dict[str, tuple[int, int]]:
        lanes = N * (D + self.dr + self.head), self.c + self.dr + self.line
        return {"dq": (HCQ, HE), "uq": (lanes[0], HCQ), "dkv": (lanes[1], HE)}

    def _floats(self) -> dict[str, Tensor]:
        cos, sin = tables(self.table or (self.batch, self.queries), self.dr)
        gains = {"gain_q": 1 + normal(4, HCQ) / 8, "gain_kv": 1 + normal(5, self.c) / 8}
        layers = {name: normal(n, *size) / 8 for n, (name, size) in enumerate(self._sizes().items())}
        up = normal(3, N * (D + E), self.c) / 8
        return {"x": normal(8, self.batch, self.queries, HE), "cos": cos, "sin": sin, "ukv": up} | gains | layers

    def _int8(self) -> dict[str, Tensor]:
        layers = {name: int8_layer(20 + 2 * n, *size) for n, (name, size) in enumerate(self._sizes().items())}
        made = {name: weight for name, (weight, _) in layers.items() if name in self.int8}
        made |= {f"{name}_scale": scale for name, (_, scale) in layers.items()}
        of_rows = {"latent_scale": self.c, "rope_scale": self.dr}
        return made | {name: scales(30 + x, 1 if self.one_scale else x) * 4 for name, x in of_rows.items()}

    def _places(self) -> dict[str, Tensor]:
        table, seen = TABLE[: self.batch].clone(), LENGTHS[: self.batch].clone()
        at = seen[:, None] - self.queries + torch.arange(self.queries)
        slots = (table.gather(1, at // SIZE) * SIZE + at % SIZE).flatten()
        if self.at is not None:
            slots, seen = torch.tensor(self.at), torch.full((self.batch,), self.at + self.queries)
        if self.listed:
            order = torch.rand(B, self.queries, self.listed, generator=torch.Generator().manual_seed(7)).argsort(-1)
            seen = order[..., :LISTED]
        return {"table": table, "seen": seen, "slots": slots}

    def _caches(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if self.made is not None:
            return (self.made(),)
        pairs = enumerate(zip(self.shapes, self.int8_caches, strict=False), 9)
        return tuple(weights(n, *shape) if int8 else normal(n, *shape).to(dtype) for n, (shape, int8) in pairs)


def changed(
    inputs: Inputs, caches: Callable[[Tensor], Tensor] | None = None, **parts: Callable[[Tensor], Tensor]
) -> Inputs:
    """The same inputs, of which these are changed."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given, held = taken(inputs(dtype))
        given = given._replace(**{name: change(getattr(given, name)) for name, change in parts.items()})
        return *given, *(held if caches is None else map(caches, held))

    return make


def taken(tensors: tuple[Tensor, ...]) -> tuple[Given, Rows]:
    """What is given, and the caches."""
    count = len(Given._fields)
    return Given(*tensors[:count]), tensors[count:]


def tables(tokens: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    """cos and sin [*tokens, width]; their halves are equal."""
    angles = normal(6, *tokens, width // 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm in float32."""
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of lanes rotated, the first of each pair in the first half of the result."""
    half = x.shape[-1] // 2
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], cos[..., :half], sin[..., :half]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def multiplied(x: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A layer in W8A8."""
    return (product(x[0], weight).float() * x[1] * scale).to(dtype)


def times(x: Tensor, factor: float) -> Tensor:
    """Times a number, unless that is 1."""
    return x if factor == 1 else x * factor


@dataclass(frozen=True)
class Factors:
    """What multiplies the latent of the queries, all of its heads, both of their parts, one, and the latent row."""

    latent: float = 1.0
    heads: float = 1.0
    parts: float = 1.0
    nope: float = 1.0
    row: float = 1.0


NO_FACTORS = Factors()


def rope_last(q: Tensor, cos: Tensor, sin: Tensor, factors: Factors = NO_FACTORS) -> tuple[Tensor, Tensor]:
    """Both parts of queries [.., D + Dr] whose last lanes are rotated."""
    nope, rope = (times(each, factors.parts) for each in q.split((D, cos.shape[-1]), dim=-1))
    return times(nope, factors.nope), turned(rope, cos, sin)


@dataclass(frozen=True)
class Encoding:
    """What is kept of a row, and what the rows that are read stand for."""

    keep: Callable[[Tensor, Tensor, Given], Rows] = lambda latent, rope, g: (latent, rope)
    restore: Callable[[Rows, Given], Rows] = lambda rows, g: rows


PLAIN = Encoding()
Store = Callable[..., Rows]
"""`store(latent, rope, given, *caches)` gives the rows that queries attend to."""
Attention = Callable[[Tensor, Tensor, Rows, Given], Tensor]
Rotate = Callable[..., tuple[Tensor, Tensor]]


def fresh(latent: Tensor, rope: Tensor, g: Given) -> Rows:
    """No cache."""
    return latent, rope


def in_rows(write: Write) -> Store:
    """Rows at a position."""

    def store(latent: Tensor, rope: Tensor, g: Given, *caches: Tensor) -> Rows:
        return tuple(write(cache, rows, g.slots) for cache, rows in zip(caches, (latent, rope), strict=True))

    return store


def paged(write: Write = viewed, read: Read = of_pages, encoding: Encoding = PLAIN) -> Store:
    """Rows at slots of pages."""

    def store(latent: Tensor, rope: Tensor, g: Given, *caches: Tensor) -> Rows:
        for cache, rows in zip(caches, encoding.keep(latent, rope, g), strict=True):
            write(cache, rows.reshape(-1, rows.shape[-1]), g.slots)
        return encoding.restore(tuple(read(cache, g.table) for cache in caches), g)

    return store


def keys_values(latent: Tensor, rope: Tensor, ukv: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Keys [B, N, T, D + Dr] and values [B, N, T, E] of all heads."""
    both = linear(latent, ukv).unflatten(-1, (heads, -1)).transpose(1, 2)
    nope, values = both.split((width, both.shape[-1] - width), dim=-1)
    return torch.cat((nope, rope.unsqueeze(1).expand(-1, heads, -1, -1)), dim=-1), values


def attended(q: Tensor, latent: Tensor, rope: Tensor, ukv: Tensor, lengths: Tensor) -> Tensor:
    """The last queries [B, N, S, D + Dr] of sequences so long, over keys and values expanded from rows [B, T, ..]."""
    keys, values = keys_values(latent, rope, ukv, q.shape[1], q.shape[-1] - rope.shape[-1])
    at = lengths[:, None] - q.shape[2] + torch.arange(q.shape[2])
    seen = torch.arange(latent.shape[1]) <= at[:, None, :, None]
    return scaled_dot_product_attention(q, keys, values, attn_mask=seen)


def expanded(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
    """The same; without a cache, all keys are those of the queries."""
    latent, k_rope = rows
    lengths = g.seen if latent.shape[1] > nope.shape[2] else torch.full_like(g.seen, nope.shape[2])
    return attended(torch.cat((nope, rope), dim=-1), latent, k_rope, g.ukv, lengths)


def listed(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
    """Over the keys that are listed."""
    latent, k_rope = rows
    keys, values = keys_values(latent, k_rope, g.ukv, N, D)
    seen = torch.zeros(*g.seen.shape[:2], keys.shape[2], dtype=torch.bool).scatter(-1, g.seen, True)
    return scaled_dot_product_attention(torch.cat((nope, rope), dim=-1), keys, values, attn_mask=seen.unsqueeze(1))


def absorbed(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
    """W_UK absorbed, W_UV left to the model."""
    latent, k_rope = (each.unsqueeze(1) for each in rows)
    scores = nope @ g.ukv.unflatten(0, (N, -1))[:, :D] @ latent.mT + rope @ k_rope.mT
    seen = in_line(g.seen, nope.shape[2], latent.shape[2])
    return (scores * (D + rope.shape[-1]) ** -0.5).masked_fill(~seen, -math.inf).softmax(-1) @ latent


def by_int8(attend: Attend = explicit) -> Attention:
    """Int8 queries over an int8 latent."""

    def attention(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
        seen = in_line(g.seen, nope.shape[2], rows[0].shape[1])
        return attend(nope @ g.ukv.unflatten(0, (N, -1))[:, :D], rope, *rows, seen, g.latent_scale)

    return attention


def layer(x: Tensor | tuple[Tensor, Tensor], weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In W8A8 if its weight is int8."""
    if isinstance(x, Tensor) and weight.dtype != torch.int8:
        return linear(x, weight)
    return multiplied(quantised(x) if isinstance(x, Tensor) else x, weight, scale, dtype)


def model(
    store: Store,
    attend: Attention = expanded,
    rotate: Rotate = rope_last,
    factors: Factors = NO_FACTORS,
    tokens_first: bool = False,
    also: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Any]:
    """A function of these parts; `also` reads the latent of the queries too.

    Packed tokens [T, He] are of a sequence each, or by lists of keys of one sequence.
    """

    def forward(*tensors: Tensor) -> Any:
        g, caches = taken(tensors)
        x, dtype, tokens = g.x, g.x.dtype, g.seen.shape[:2] if g.seen.dim() == 3 else g.x.shape[:-1]
        rows = quantised(x) if g.dq.dtype == torch.int8 else x
        low = times(norm(layer(rows, g.dq, g.dq_scale, dtype), g.gain_q), factors.latent)
        q = times(layer(low, g.uq, g.uq_scale, dtype), factors.heads).view(*tokens, N, -1)
        packed = q.dim() == 3
        before = packed or tokens_first
        q = q if before else q.transpose(1, 2)
        nope, rope = rotate(q, *(each.unsqueeze(-2 if before else -3) for each in (g.cos, g.sin)))
        if before:
            nope, rope = (each.unsqueeze(2) if packed else each.transpose(1, 2) for each in (nope, rope))
        c, dr = g.gain_kv.shape[-1], g.cos.shape[-1]
        latent, turning = layer(rows, g.dkv, g.dkv_scale, dtype)[..., : c + dr].split((c, dr), dim=-1)
        kept = store(times(norm(latent, g.gain_kv), factors.row), turned(turning, g.cos, g.sin), g, *caches)
        y = attend(nope, rope, kept, g)
        return y if also is None else (y, also(low))

    return forward
