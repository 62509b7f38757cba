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

from fusion import Example
from tests.examples.caches import LENGTHS, SIZE, TABLE, Write, in_nz, of_nz, of_pages, viewed
from tests.examples.inputs import Inputs, fixed, in_dtype, normal, tables
from tests.examples.latent_attention_int8 import Attend, explicit
from tests.examples.masks import last
from tests.examples.quantisation import int8_layer, product, quantised, scales, weights

B, LISTED = 2, 4
LAYERS = ("dq", "uq", "dkv")
Rows = tuple[Tensor, ...]


class Given(NamedTuple):
    """What the model is given before its caches; `seen` is a length for each sequence, or the keys of each query."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    table: Tensor
    seen: Tensor
    slots: Tensor
    dq: Tensor
    uq: Tensor
    dkv: Tensor
    dq_scale: Tensor
    uq_scale: Tensor
    dkv_scale: Tensor
    dq_bias: Tensor
    uq_bias: Tensor
    dkv_bias: Tensor
    gain: Tensor
    gain_q: Tensor
    gain_kv: Tensor
    beta: Tensor
    beta_q: Tensor
    ukv: Tensor
    up: Tensor
    latent_scale: Tensor
    rope_scale: Tensor
    scale: Tensor
    scale_q: Tensor
    zero: Tensor
    zero_q: Tensor
    of_queries: Tensor
    of_latent: Tensor
    of_scores: Tensor
    of_values: Tensor


FIXED = Given._fields[6:]
LAYERS_FIXED = FIXED[:6]


@dataclass(frozen=True)
class Setting:
    """Makes inputs: sizes, layers in W8A8, Parameters, caches, and where rows go.

    With a position `at`, or slots, rows go there instead; with `listed`, each query sees some of so many keys. Scales
    of `static` layers are those of rows that are quantised by constants. Seeds of gains are counted from `gains`.
    """

    queries: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()
    int8: tuple[str, ...] = ()
    int8_caches: tuple[bool, ...] = (False, False)
    fixed: tuple[str, ...] = FIXED
    he: int = 64
    hcq: int = 48
    c: int = 32
    dr: int = 16
    d: int = 16
    e: int = 16
    n: int = 4
    size: int = SIZE
    batch: int = B
    at: int | tuple[int, ...] | None = None
    listed: int = 0
    table: tuple[int, ...] = ()
    head: int = 0
    line: int = 0
    one_scale: bool = False
    static: bool = False
    gains: int = 3
    made: Callable[[], Tensor] | None = None

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Fresh inputs."""
        given = self._floats() | self._int8() | self._constants() | self._places()
        named = ((name, given[name]) for name in Given._fields)
        held = (fixed(x) if name in self.fixed else x for name, x in named)
        return tuple(in_dtype(x, dtype) for x in (*held, *self._caches()))

    def _sizes(self) -> dict[str, tuple[int, int]]:
        lanes = self.n * (self.d + self.dr + self.head), self.c + self.dr + self.line
        return {"dq": (self.hcq, self.he), "uq": (lanes[0], self.hcq), "dkv": (lanes[1], self.he)}

    def _floats(self) -> dict[str, Tensor]:
        cos, sin = tables(6, *(self.table or (self.batch, self.queries)), self.dr)
        found = {"x": normal(8, self.batch, self.queries, self.he), "cos": cos, "sin": sin}
        for n, (name, size) in enumerate(self._sizes().items()):
            found[name] = normal(n, *size) / 8
        for n, (name, width) in enumerate({"gain": self.he, "gain_q": self.hcq, "gain_kv": self.c}.items(), self.gains):
            found[name] = 1 + normal(n, width) / 8
            found[name.replace("gain", "beta")] = normal(30 + n, width) / 8
        ups = {"ukv": normal(3, self.n * (self.d + self.e), self.c), "up": normal(51, self.n, self.d, self.c)}
        return found | {name: each / 8 for name, each in ups.items()}

    def _int8(self) -> dict[str, Tensor]:
        layers = {name: int8_layer(20 + 2 * n, *size) for n, (name, size) in enumerate(self._sizes().items())}
        made = {name: weight for name, (weight, _) in layers.items() if name in self.int8}
        made |= {f"{name}_scale": scale / (32 if self.static else 1) for name, (_, scale) in layers.items()}
        for n, (name, (width, _)) in enumerate(self._sizes().items(), 40):
            made[f"{name}_bias"] = (normal(n, width) * 900).to(torch.int32)
        of_rows = {"latent_scale": self.c, "rope_scale": self.dr}
        return made | {name: scales(30 + x, 1 if self.one_scale else x) * 4 for name, x in of_rows.items()}

    def _constants(self) -> dict[str, Tensor]:
        """Scales and zero points of static rows, and the scales of each head of int8 attention."""
        found = {
            name: torch.tensor([x]).double() for name, x in dict(of_latent=1 / 32, scale=0.03, scale_q=0.025).items()
        }
        found |= {name: torch.tensor([x], dtype=torch.int8) for name, x in dict(zero=5, zero_q=-9).items()}
        heads, of_values = torch.arange(10.0, 10 + self.n), torch.full((self.n,), 1 / 32)
        return found | dict(of_queries=heads.double(), of_scores=of_values / heads, of_values=of_values)

    def _places(self) -> dict[str, Tensor]:
        table, seen = TABLE[: self.batch], LENGTHS[: self.batch]
        at = seen[:, None] - self.queries + torch.arange(self.queries)
        slots = (table.gather(1, at // self.size) * self.size + at % self.size).flatten()
        if self.at is not None:
            slots = torch.tensor(self.at)
            seen = slots.expand(self.batch) + self.queries if slots.dim() == 0 else seen
        if self.listed:
            order = torch.rand(B, self.queries, self.listed, generator=torch.Generator().manual_seed(7)).argsort(-1)
            seen = order[..., :LISTED]
        return {"table": table, "seen": seen, "slots": slots}

    def _caches(self) -> tuple[Tensor, ...]:
        if self.made is not None:
            return (self.made(),)
        pairs = enumerate(zip(self.shapes, self.int8_caches, strict=False), 9)
        return tuple(weights(n, *shape) if int8 else normal(n, *shape) for n, (shape, int8) in pairs)


def changed(
    inputs: Inputs, caches: Callable[[Tensor], Tensor] | None = None, **parts: Callable[[Tensor], Tensor]
) -> Inputs:
    """The same inputs, of which these are changed."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given, held = taken(inputs(dtype))
        before = {name: getattr(given, name) for name in parts}
        after = {name: change(before[name]) for name, change in parts.items()}
        kept = {name: fixed(x) if isinstance(before[name], torch.nn.Parameter) else x for name, x in after.items()}
        return *given._replace(**kept), *(held if caches is None else map(caches, held))

    return make


def taken(tensors: tuple[Tensor, ...]) -> tuple[Given, Rows]:
    """What is given, and the caches."""
    count = len(Given._fields)
    return Given(*tensors[:count]), tensors[count:]


def norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm in float32."""
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def turned(x: Tensor, cos: Tensor, sin: Tensor, source: str = "interleaved", result: str = "half") -> Tensor:
    """Pairs of lanes rotated, by default the first of each pair in the first half of the result."""
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if source == "interleaved" else (x[..., :half], x[..., half:])
    cos, sin = cos[..., :half], sin[..., :half]
    both = first * cos - second * sin, second * cos + first * sin
    return torch.cat(both, dim=-1) if result == "half" else torch.stack(both, dim=-1).flatten(-2)


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


def rope_last(
    q: Tensor, cos: Tensor, sin: Tensor, factors: Factors = Factors(), turn: Turn = turned
) -> tuple[Tensor, Tensor]:
    """Both parts of queries [.., D + Dr] whose last lanes are rotated."""
    width = cos.shape[-1]
    nope, rope = (times(each, factors.parts) for each in q.split((q.shape[-1] - width, width), dim=-1))
    return times(nope, factors.nope), turn(rope, cos, sin)


@dataclass(frozen=True)
class Encoding:
    """What is kept of a row, and what the rows that are read stand for."""

    keep: Callable[[Tensor, Tensor, Given], Rows] = lambda latent, rope, g: (latent, rope)
    restore: Callable[[Rows, Given], Rows] = lambda rows, g: rows


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


def paged(write: Write = viewed, encoding: Encoding = Encoding()) -> Store:
    """Rows at slots of pages."""
    read = of_nz if write is in_nz else of_pages

    def store(latent: Tensor, rope: Tensor, g: Given, *caches: Tensor) -> Rows:
        for cache, rows in zip(caches, encoding.keep(latent, rope, g), strict=True):
            write(cache, rows.reshape(-1, rows.shape[-1]), g.slots)
        return encoding.restore(tuple(read(cache, g.table) for cache in caches), g)

    return store


def over_keys(nope: Tensor, rope: Tensor, rows: Rows, g: Given, seen: Tensor) -> Tensor:
    """Over keys [B, N, T, D + Dr] and values [B, N, T, E] of all heads, expanded from rows [B, T, ..]."""
    latent, k_rope = rows
    heads, width, _ = g.up.shape
    both = linear(latent, g.ukv).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, values = both.split((width, both.shape[-1] - width), dim=-1)
    keys = torch.cat((k, k_rope.unsqueeze(1).expand(-1, heads, -1, -1)), dim=-1)
    return scaled_dot_product_attention(torch.cat((nope, rope), dim=-1), keys, values, attn_mask=seen)


def expanded(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
    """The last queries of sequences of their lengths; without a cache, all keys are those of the queries."""
    queries, keys = nope.shape[2], rows[0].shape[1]
    lengths = g.seen if keys > queries else torch.full_like(g.seen, queries)
    return over_keys(nope, rope, rows, g, last(lengths, queries, keys))


def listed(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
    """Over the keys that are listed."""
    seen = torch.zeros(*g.seen.shape[:2], rows[0].shape[1], dtype=torch.bool).scatter(-1, g.seen, True)
    return over_keys(nope, rope, rows, g, seen.unsqueeze(1))


def w_uk(g: Given) -> Tensor:
    """The part [N, D, C] of the up-projection that gives keys."""
    heads, width, _ = g.up.shape
    return g.ukv.unflatten(0, (heads, -1))[:, :width]


def absorbed(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
    """W_UK absorbed, W_UV left to the model."""
    latent, k_rope = (each.unsqueeze(1) for each in rows)
    scores = nope @ w_uk(g) @ latent.mT + rope @ k_rope.mT
    seen = last(g.seen, nope.shape[2], latent.shape[2])
    return (scores * (nope.shape[-1] + rope.shape[-1]) ** -0.5).masked_fill(~seen, -math.inf).softmax(-1) @ latent


def over_int8(nope: Tensor, rope: Tensor, rows: Rows, g: Given, attend: Attend = explicit) -> Tensor:
    """Int8 queries over an int8 latent."""
    seen = last(g.seen, nope.shape[2], rows[0].shape[1])
    return attend(nope @ w_uk(g), rope, *rows, seen, g.latent_scale)


def by_token(rows: Any, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A layer of rows and their scales."""
    return product(rows[0], weight).float() * rows[1] * scale


QuantiseRows = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Layers:
    """What stands before layers and in them: how rows are quantised, what a norm adds, and the product in W8A8.

    With `eps`, a norm of the hidden states stands before all of them.
    """

    quantise: QuantiseRows = lambda x, scale, zero: quantised(x)
    shift: Callable[[Tensor, Tensor], Tensor] = lambda x, beta: x
    multiply: Callable[..., Tensor] = by_token
    eps: float | None = None

    def rows(self, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Any:
        """What a layer of this weight takes."""
        return self.quantise(x, scale, zero) if weight.dtype == torch.int8 else x

    def layer(self, rows: Any, weight: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        """In W8A8 if its weight is int8."""
        if weight.dtype != torch.int8:
            return linear(rows, weight)
        return self.multiply(rows, weight, scale, bias).to(dtype)


def projected(layers: Layers, rows: Any, g: Given, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Both products of x by one layer, the row of a token first."""
    pairs = ((g.dkv, g.dq), (g.dkv_scale, g.dq_scale), (g.dkv_bias, g.dq_bias))
    weight, scale, bias = (torch.cat(each) for each in pairs)
    both = layers.layer(rows, weight, scale, bias, dtype)
    down, low = both.split((g.dkv.shape[0], g.dq.shape[0]), dim=-1)
    return low, down


def model(
    store: Store,
    attend: Attention = expanded,
    rotate: Rotate = rope_last,
    factors: Factors = Factors(),
    layers: Layers = Layers(),
    turn: Turn = turned,
    tokens_first: bool = False,
    joint: bool = False,
    also: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Any]:
    """A function of these parts; `also` reads the latent of the queries too; `joint` makes one layer of both of x.

    Packed tokens [T, He] are of a sequence each, or by lists of keys of one sequence.
    """

    def forward(*tensors: Tensor) -> Any:
        g, caches = taken(tensors)
        dtype, tokens = g.x.dtype, g.seen.shape[:2] if g.seen.dim() == 3 else g.x.shape[:-1]
        x = g.x if layers.eps is None else layers.shift(norm(g.x, g.gain, layers.eps), g.beta)
        rows = layers.rows(x, g.dq, g.scale, g.zero)
        low, down = (
            projected(layers, rows, g, dtype)
            if joint
            else (
                layers.layer(rows, *of, dtype)
                for of in ((g.dq, g.dq_scale, g.dq_bias), (g.dkv, g.dkv_scale, g.dkv_bias))
            )
        )
        low = norm(low, g.gain_q)
        low = layers.shift(times(low, factors.latent), g.beta_q)
        q = layers.layer(layers.rows(low, g.uq, g.scale_q, g.zero_q), g.uq, g.uq_scale, g.uq_bias, dtype)
        q = times(q, factors.heads).view(*tokens, g.up.shape[0], -1)
        packed = q.dim() == 3
        before = packed or tokens_first
        q = q if before else q.transpose(1, 2)
        nope, rope = rotate(q, *(each.unsqueeze(-2 if before else -3) for each in (g.cos, g.sin)))
        if before:
            nope, rope = (each.unsqueeze(2) if packed else each.transpose(1, 2) for each in (nope, rope))
        c, dr = g.gain_kv.shape[-1], g.cos.shape[-1]
        latent, turning = down[..., : c + dr].split((c, dr), dim=-1)
        kept = store(times(norm(latent, g.gain_kv), factors.row), turn(turning, g.cos, g.sin), g, *caches)
        y = attend(nope, rope, kept, g)
        return y if also is None else (y, also(low))

    return forward


def in_pages(
    name: str,
    setting: Inputs,
    write: Write = viewed,
    encoding: Encoding = Encoding(),
    refusal: str = "",
    attend: Attention = expanded,
    **parts: Any,
) -> Example:
    """A model over pages."""
    return Example(name, model(paged(write, encoding), attend, **parts), setting, refusal)
