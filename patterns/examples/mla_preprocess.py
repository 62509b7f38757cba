"""What stands before latent attention over pages with all layers in W8A8, and what only looks like it.

`Setting` makes inputs, `model` puts `Parts` together: layers by token or static, rotation, caches in floats or int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fusion import Example
from patterns.examples import caches
from patterns.examples.caches import BLOCKS, LENGTHS, TABLE, Read, Write, in_nz, of_nz, of_pages, viewed
from patterns.examples.inputs import normal
from patterns.examples.latent_attention_atb_int8 import written_out
from patterns.examples.quantisation import product, quantised, scales, weights

B = 2
EPS, STEP = 1e-6, 1 / 32


@dataclass(frozen=True)
class Sizes:
    """Widths of hidden states, both latents, rotated lanes and other ones, values; heads, and rows of a page."""

    he: int = 64
    hcq: int = 96
    c: int = 32
    dr: int = 16
    d: int = 16
    e: int = 16
    n: int = 4
    size: int = caches.SIZE


class Given(NamedTuple):
    """What the model is given; `lengths` are with the new tokens, of a latent in int8 without them."""

    x: Tensor
    gain: Tensor
    dq: Tensor
    dq_scale: Tensor
    uq: Tensor
    uq_scale: Tensor
    dkv: Tensor
    dkv_scale: Tensor
    gain_q: Tensor
    gain_kv: Tensor
    ukv: Tensor
    cos: Tensor
    sin: Tensor
    latents: Tensor
    ropes: Tensor
    table: Tensor
    lengths: Tensor
    slots: Tensor
    up: Tensor
    of_queries: Tensor
    of_latent: Tensor
    of_scores: Tensor
    of_values: Tensor
    beta: Tensor
    beta_q: Tensor
    dq_bias: Tensor
    uq_bias: Tensor
    dkv_bias: Tensor
    scale: Tensor
    scale_q: Tensor
    zero: Tensor
    zero_q: Tensor


INPUTS = {"x", "cos", "sin", "latents", "ropes", "table", "lengths", "slots"}
"""What is no Parameter."""


@dataclass(frozen=True)
class Setting:
    """Makes inputs: pages with dims for heads, in NZ of so many lanes, of an int8 latent of so many, or turned."""

    queries: int = 1
    sizes: Sizes = Sizes()
    heads: tuple[int, ...] = ()
    nz: int = 0
    int8: int | None = None
    static: bool = False
    zero: torch.dtype = torch.int8
    other_scales: bool = False
    turned: bool = False

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Fresh inputs."""
        given = {**self._layers(dtype), **self._rows(dtype), **self._constants(dtype)}
        named = ((name, given[name]) for name in Given._fields)
        return tuple(x if name in INPUTS else torch.nn.Parameter(x, requires_grad=False) for name, x in named)

    def _layers(self, dtype: torch.dtype) -> dict[str, Tensor]:
        of = self.sizes
        shapes = dict(dq=(of.hcq, of.he), uq=(of.n * (of.d + of.dr), of.hcq), dkv=(of.c + of.dr, of.he))
        found = {"ukv": (normal(3, of.n * (of.d + of.e), of.c) / 8).to(dtype)}
        for n, (name, shape) in enumerate(shapes.items()):
            found[name] = weights(20 + 2 * n, *shape)
            found[f"{name}_scale"] = scales(21 + 2 * n, shape[0]) / (256 if self.static else 8)
            found[f"{name}_bias"] = (normal(40 + n, shape[0]) * 900).to(torch.int32)
        for n, (name, width) in enumerate(dict(gain=of.he, gain_q=of.hcq, gain_kv=of.c).items()):
            found[name] = (1 + normal(4 + n, width) / 8).to(dtype)
            found[name.replace("gain", "beta")] = (normal(30 + n, width) / 8).to(dtype)
        return found

    def _rows(self, dtype: torch.dtype) -> dict[str, Tensor]:
        of, queries = self.sizes, self.queries
        pages = [normal(9 + n, BLOCKS, of.size, *self.heads, width).to(dtype) for n, width in enumerate((of.c, of.dr))]
        if self.nz:
            pages = [each.view(BLOCKS, *self.heads, -1, of.size, self.nz) for each in pages]
        if self.int8 is not None:
            pages[0] = weights(50, BLOCKS, *((of.c // self.int8, of.size, self.int8) if self.int8 else (of.size, of.c)))
        latents, ropes = map(caches.turned, pages) if self.turned else pages
        angles = normal(6, B, queries, of.dr // 2).repeat(1, 1, 2)
        at = LENGTHS[:, None] - queries + torch.arange(queries)
        slots = (TABLE.gather(1, at // of.size) * of.size + at % of.size).flatten()
        lengths = LENGTHS.clone() if self.int8 is None else LENGTHS - queries
        places = dict(table=TABLE.clone(), lengths=lengths, slots=slots, latents=latents, ropes=ropes)
        return places | dict(
            x=normal(8, B, queries, of.he).to(dtype), cos=angles.cos().to(dtype), sin=angles.sin().to(dtype)
        )

    def _constants(self, dtype: torch.dtype) -> dict[str, Tensor]:
        of, heads = self.sizes, torch.arange(10, 10 + self.sizes.n)
        other = torch.float16 if dtype != torch.float16 else torch.bfloat16
        of_queries = heads.to(other if self.other_scales else dtype)
        numbers = dict(of_latent=(1 / 32, dtype), scale=(0.03, dtype), scale_q=(0.025, dtype))
        numbers |= dict(zero=(5, self.zero), zero_q=(-9, self.zero))
        found = {name: torch.tensor([number]).to(kind) for name, (number, kind) in numbers.items()}
        found |= dict(
            of_queries=of_queries, of_scores=1 / 32 / of_queries.float(), of_values=torch.full((of.n,), 1 / 32)
        )
        return found | dict(up=(normal(51, of.n, of.d, of.c) / 8).to(dtype))


def norm(x: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    """RMSNorm in float32."""
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def of_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves rotated."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of lanes rotated, the first of each pair in the first half of the result."""
    return of_halves(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def int8(x: Tensor, least: int = -128) -> Tensor:
    """The nearest whole numbers."""
    return x.round().clamp(least, 127).to(torch.int8)


def by_token(rows: Any, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A layer of rows and their scales."""
    return product(rows[0], weight).float() * rows[1] * scale


def biased(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias among the whole numbers."""
    return (product(rows, weight) + bias).float() * scale


def bare(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """No bias."""
    return product(rows, weight).float() * scale


@dataclass(frozen=True)
class Parts:
    """What a model is made of: how rows are quantised, what a norm adds, layers; rotation, rows, caches.

    With `query`, which quantises absorbed queries by scales of heads, attention is over int8.
    """

    write: Write = viewed
    read: Read = of_pages
    quantise: Callable[[Tensor, Tensor, Tensor], Any] = lambda x, scale, zero: quantised(x)
    shift: Callable[[Tensor, Tensor], Tensor] = lambda x, beta: x
    layer: Callable[..., Tensor] = by_token
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = of_pairs
    eps: float = EPS
    keep: Callable[[Tensor, Tensor], Tensor] = lambda latent, scale: latent
    query: Callable[[Tensor, Tensor], Tensor] | None = None


TOKEN = Parts()
STATIC = Parts(quantise=lambda x, scale, zero: int8(x.float() / scale.float() + zero), shift=torch.add, layer=biased)
INT8: dict[str, Any] = dict(
    write=in_nz,
    read=of_nz,
    keep=lambda latent, scale: int8(latent.float() / scale.float()),
    query=lambda query, scales: int8(query.float() * scales.float()[:, None, None]),
)


def model(of: Parts) -> Callable[..., Tensor]:
    """A function that writes the rows of a token, or of several, and attends to the pages."""

    def forward(*tensors: Tensor) -> Tensor:
        g = Given(*tensors)
        width, turning, dtype = g.gain_kv.shape[0], g.cos.shape[-1], g.x.dtype
        rows = of.quantise(of.shift(norm(g.x, g.gain, of.eps), g.beta), g.scale, g.zero)
        low = of.shift(norm(of.layer(rows, g.dq, g.dq_scale, g.dq_bias).to(dtype), g.gain_q), g.beta_q)
        q = of.layer(of.quantise(low, g.scale_q, g.zero_q), g.uq, g.uq_scale, g.uq_bias).to(dtype)
        q = q.unflatten(-1, (g.up.shape[0], -1)).transpose(1, 2)
        nope, rope = q.split((q.shape[-1] - turning, turning), dim=-1)
        rope = of.rotate(rope, g.cos.unsqueeze(1), g.sin.unsqueeze(1))
        latent, key = of.layer(rows, g.dkv, g.dkv_scale, g.dkv_bias).to(dtype).split((width, turning), dim=-1)
        of.write(g.latents, of.keep(norm(latent, g.gain_kv), g.of_latent).flatten(0, 1), g.slots)
        of.write(g.ropes, of.rotate(key, g.cos, g.sin).flatten(0, 1), g.slots)
        latent, key = (of.read(pages, g.table) for pages in (g.latents, g.ropes))
        first = g.lengths[:, None] if of.query is not None else g.lengths[:, None] - g.x.shape[1]
        at = first + torch.arange(g.x.shape[1])
        seen = torch.arange(latent.shape[1]) <= at[:, None, :, None]
        if of.query is not None:
            return written_out(of.query(nope @ g.up, g.of_queries), rope, latent, key, seen, g.of_scores, g.of_values)
        both = linear(latent, g.ukv).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
        k, v = both.split((nope.shape[-1], both.shape[-1] - nope.shape[-1]), dim=-1)
        k = torch.cat((k, key.unsqueeze(1).expand(-1, q.shape[1], -1, -1)), dim=-1)
        return scaled_dot_product_attention(torch.cat((nope, rope), dim=-1), k, v, attn_mask=seen)

    return forward


def narrow(query: Tensor, scales: Tensor) -> Tensor:
    """Bounded by 127 on both sides."""
    return int8(query.float() * scales.float()[:, None, None], -127)


def divided(query: Tensor, scales: Tensor) -> Tensor:
    """Divided by a scale of each head."""
    return int8(query.float() / scales.float()[:, None, None])


def late(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias behind the scales."""
    return product(rows, weight).float() * scale + bias.float() / 4096


def kept(latent: Tensor, scale: Tensor) -> Tensor:
    """A latent with a zero point."""
    return int8(latent.float() / scale.float() + 3)


def bounded(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """In the dtype of the model, bounded first."""
    return torch.clamp(x / scale + zero, -128, 127).round().to(torch.int8)


def behind(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The zero point is added to rounded numbers."""
    return ((x.float() / scale.float()).round() + zero).clamp(-128, 127).to(torch.int8)


def cut(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Cut off toward zero."""
    return (x.float() / scale.float() + zero).clamp(-128, 127).to(torch.int8)


def of_channels(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A scale of each channel."""
    return int8(x.float() / (torch.linspace(1, 2, x.shape[-1]) * scale.float()) + zero)


NZ: dict[str, Any] = dict(write=in_nz, read=of_nz)
BARE = Parts(**NZ, quantise=bounded, layer=bare, rotate=of_halves)
COPIED = Parts(write=caches.index_copied, rotate=of_halves)
ONE, TWO, STATIC_ONE = Setting(), Setting(2), Setting(static=True)
OF_INT8 = Sizes(c=64, dr=32)
INT8_ONE = Setting(sizes=OF_INT8, nz=16, int8=32)


def tried(name: str, of: Parts = TOKEN, given: Setting = ONE, refusal: str = "", **other: Any) -> Example:
    """An example of these parts, but for some others."""
    return Example(name, model(replace(of, **other)), given, refusal)


def static(name: str, refusal: str = "", given: Setting = STATIC_ONE, **other: Any) -> Example:
    """One of constants."""
    return tried(f"static, {name}", STATIC, given, refusal, **other)


def of_int8(name: str, refusal: str = "", given: Setting = INT8_ONE, **other: Any) -> Example:
    """One of an int8 latent."""
    return tried(f"int8 latent, {name}", replace(TOKEN, **INT8), given, refusal, **other)


TOKENS = (
    tried("a token through a view"),
    tried("two tokens by index_copy, rotated by halves", COPIED, TWO),
    tried("pages of one head", TOKEN, Setting(heads=(1,))),
    tried("a token by block", write=caches.by_block),
    tried("a latent times a number", keep=lambda latent, scale: latent * 1.5),
    tried("a token in lines", TOKEN, Setting(nz=16), **NZ),
    tried("two tokens in lines of a head", TOKEN, Setting(2, nz=16, heads=(1,)), rotate=of_halves, **NZ),
    tried("another epsilon", TOKEN, ONE, "the kernel of npu_mla_preprocess 1e-6", eps=1e-5),
    tried("places of unknown range", TOKEN, ONE, "not proven to lie in its page", write=caches.anywhere),
    tried("two tokens at a slot", TOKEN, Setting(2, heads=(2,)), "hold several heads", write=caches.two_in_a_row),
    tried(
        "pages that lie otherwise", TOKEN, Setting(turned=True), "the pages are not contiguous", write=caches.by_block
    ),
    tried("weights in short lines", TOKEN, Setting(sizes=Sizes(he=48)), "do not fill lines of 32"),
    tried("short lines", TOKEN, Setting(nz=8), "in lines of 8 numbers", **NZ),
)
INT8_LATENTS = (
    of_int8("a token"),
    of_int8("a token by halves", rotate=of_halves),
    tried("int8 latent, a token, constants", replace(STATIC, **INT8), replace(INT8_ONE, static=True)),
    of_int8("whole rows", "not lines of NZ", Setting(sizes=OF_INT8, int8=0), write=viewed, read=of_pages),
    of_int8("scales of another dtype", "is not one in the dtype of x", replace(INT8_ONE, other_scales=True)),
    of_int8("short lines", "in lines of 16 numbers, not of 32", replace(INT8_ONE, int8=16)),
    of_int8("other bounds of queries", "queries are bounded by -127", query=narrow),
    of_int8("queries divided", "where the operator multiplies by one", query=divided),
    of_int8("a zero point", "stored with a zero point", keep=kept),
)
STATICS = (
    static("a token"),
    tried("static, two tokens in lines, no bias", BARE, Setting(2, nz=16, static=True)),
    static("a token by block", write=caches.by_block),
    static("numbers", quantise=lambda x, s, z: int8(x.float() / STEP + 3)),
    static("no zero point", quantise=lambda x, s, z: int8(x.float() / s.float())),
    static("rounded before the zero point", "added to rounded numbers", quantise=behind),
    static("cut off", "cut off toward zero", quantise=cut),
    static("a scale of each channel", "not divided by one scale", quantise=of_channels),
    static("other bounds", "bounded by -127", quantise=lambda x, s, z: int8(x.float() / s.float() + z, -127)),
    static("a zero point in floats", "not proven to be a whole number", replace(STATIC_ONE, zero=torch.float32)),
    static(
        "a scale that is rounded", "does not hold the scale", quantise=lambda x, s, z: int8(x.float() / 0.0300001 + z)
    ),
    static(
        "multiplied by the scale",
        "where the operator divides",
        quantise=lambda x, s, z: int8(x.float() * s.float() + z),
    ),
    static("a bias behind the scales", "the operator one of int32", layer=late),
    static("short lines", "in lines of 8 numbers", Setting(nz=8, static=True), **NZ),
)

TRIED = {"mla_preprocess": (*TOKENS, *INT8_LATENTS, *STATICS)}
"""Rule -> its examples and rejects."""
