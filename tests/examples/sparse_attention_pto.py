"""A step of DeepSeek-V3.2 over pages as plain code, and what differs from what one operator has compiled in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, relu, scaled_dot_product_attention

from fusion import Example
from tests.examples.caches import in_nz, of_nz, of_pages, viewed
from tests.examples.inputs import fixed, in_dtype, normal, tables
from tests.examples.latent_model import norm, times, turned

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """Sizes, and the last position of every sequence, of so many queries; pages are taken in any order.

    `nz` are the numbers of the caches that lie in blocks of NZ.
    """

    queries: int = 1
    positions: tuple[int, ...] = (2099, 6)
    he: int = 32
    hcq: int = 24
    n: int = 2
    d: int = 8
    dr: int = 8
    c: int = 16
    e: int = 8
    m: int = 4
    di: int = 16
    size: int = 128
    pages: int = 17
    nz: tuple[int, ...] = ()
    made: Callable[..., Tensor] = normal

    @property
    def keys(self) -> int:
        """How many rows the model gathers of a sequence."""
        return self.size * self.pages

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Fresh inputs: hidden states and tables, where rows go and are read, three caches, the weights."""
        batch, at = len(self.positions), torch.tensor(self.positions)
        blocks = batch * self.pages
        table = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).view(batch, self.pages)
        new = at[:, None] - self.queries + 1 + torch.arange(self.queries)
        slots = (table.gather(1, new // self.size) * self.size + new % self.size).flatten()
        widths = enumerate((self.c, self.dr, self.di))
        rows = [(n, (width // 16, self.size, 16) if n in self.nz else (self.size, 1, width)) for n, width in widths]
        caches = (self.made(20 + n, blocks, *shape) for n, shape in rows)
        shapes = (
            (self.hcq, self.he), (self.n * (self.d + self.dr), self.hcq), (self.c + self.dr, self.he),
            (self.n * (self.d + self.e), self.c), (self.m * self.di, self.hcq), (self.di, self.he), (self.m, self.he),
        )  # fmt: skip
        weights = (self.made(number, *shape) * shape[-1] ** -0.5 for number, shape in enumerate(shapes))
        gains = (1 + self.made(30 + number, width) / 8 for number, width in enumerate((self.hcq, self.c, self.di)))
        held = (fixed(each) for each in (*weights, *gains, self.made(40, self.di) / 8))
        x, angles = self.made(50, batch, self.queries, self.he), tables(6, batch, self.queries, self.dr)
        return tuple(in_dtype(each, dtype) for each in (x, *angles, slots, table, at, *caches, *held))


SETTING = Setting()


def first_lanes(x: Tensor, of: Tables) -> Tensor:
    """The first lanes rotated, pairs to halves."""
    width = of[0].shape[-1]
    return torch.cat((turned(x[..., :width], *of), x[..., width:]), dim=-1)


def in_halves(x: Tensor, of: Tables) -> Tensor:
    """The same of lanes that lie in halves."""
    width = of[0].shape[-1]
    return torch.cat((turned(x[..., :width], *of, source="half"), x[..., width:]), dim=-1)


def raw(x: Tensor, weight: Tensor) -> Tensor:
    """Weights of heads as the layer gives them."""
    return linear(x, weight)


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    """The same in float32, by the root of the number of heads."""
    return linear(x, weight).float() * weight.shape[0] ** -0.5


@dataclass(frozen=True)
class Model:
    """A step of each sequence; its parts in other ways are look-alikes."""

    setting: Setting = SETTING
    eps: float = 1e-5
    eps_of_latent: float = 1e-5
    eps_of_keys: float = 1e-6
    scale: float | None = None
    count: int = 2048
    factor: float = 1.0
    rotate: Callable[[Tensor, Tables], Tensor] = first_lanes
    of_heads: Callable[[Tensor, Tensor], Tensor] = raw
    seen: Callable[[Tensor, Tensor], Tensor] = lambda keys, at: keys <= at
    write: Callable[[Tensor, Tensor, Tensor], Any] = viewed
    absorbs: bool = False

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The result of all heads [B, 1, N · E]."""
        x, cos, sin, slots, table, at, *rest = tensors
        caches, (dq, uq, dkv, up, iq, ik, iw, gain_q, gain, gain_k, beta_k) = rest[:3], rest[3:]
        s = self.setting
        low = norm(linear(x, dq), gain_q, self.eps)
        of_token, of_heads = (cos, sin), (cos.unsqueeze(-2), sin.unsqueeze(-2))
        nope, rope = linear(low, uq).unflatten(-1, (s.n, -1)).split((s.d, s.dr), dim=-1)
        latent, turning = linear(x, dkv).split((s.c, s.dr), dim=-1)
        key = layer_norm(linear(x, ik), (s.di,), gain_k, beta_k, self.eps_of_keys)
        latent = times(norm(latent, gain, self.eps_of_latent), self.factor)
        rows = (latent, turned(turning, *of_token), self.rotate(key, of_token))
        for number, (cache, row) in enumerate(zip(caches, rows, strict=True)):
            (in_nz if number in s.nz else self.write)(cache, row.flatten(0, -2), slots)
        gathered = ((of_nz if n in s.nz else of_pages)(cache, table) for n, cache in enumerate(caches))
        latent, k_rope, keys = gathered
        query = self.rotate(linear(low, iq).unflatten(-1, (s.m, -1)), of_heads)
        scores = relu(self._products(query.float(), keys.float()))
        scores = torch.einsum("...mt,...m->...t", scores, self.of_heads(x, iw).float())
        seen = self.seen(torch.arange(s.keys), at.reshape(-1, *[1] * (x.dim() - 1)))
        places = scores.masked_fill(~seen, -math.inf).topk(self.count, dim=-1).indices
        listed = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, places, True) & seen
        attend = self._over_latent if self.absorbs else self._over_keys
        return attend(nope, turned(rope, *of_heads), latent, k_rope, up, listed.unsqueeze(1)).flatten(-2)

    def _products(self, query: Tensor, keys: Tensor) -> Tensor:
        """Of queries and keys of the indexer."""
        return torch.einsum("bsmd,btd->bsmt", query, keys)

    def _of_scores(self) -> float:
        """What the operator multiplies scores by, unless the model has another number."""
        return (self.setting.c + self.setting.dr) ** -0.5 if self.scale is None else self.scale

    def _over_keys(
        self, nope: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, up: Tensor, seen: Tensor
    ) -> Tensor:
        """Over keys and values of all heads."""
        s = self.setting
        k, values = linear(latent, up).unflatten(-1, (s.n, -1)).transpose(1, 2).split((s.d, s.e), dim=-1)
        k = torch.cat((k, k_rope.unsqueeze(1).expand(-1, s.n, -1, -1)), dim=-1)
        q = torch.cat((nope, rope), dim=-1).transpose(1, 2)
        return scaled_dot_product_attention(q, k, values, attn_mask=seen, scale=self._of_scores()).transpose(1, 2)

    def _over_latent(
        self, nope: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, up: Tensor, seen: Tensor
    ) -> Tensor:
        """Over the latent itself, both projections absorbed."""
        up_k, up_v = up.unflatten(0, (self.setting.n, -1)).split((self.setting.d, self.setting.e), dim=1)
        q = torch.einsum("bsnd,ndc->bnsc", nope, up_k)
        scores = torch.einsum("bnsc,btc->bnst", q, latent) + torch.einsum("bsnd,btd->bnst", rope, k_rope)
        weights = (scores.float() * self._of_scores()).masked_fill(~seen, -math.inf).softmax(-1).to(latent.dtype)
        return torch.einsum("bnsc,nec->bsne", torch.einsum("bnst,btc->bnsc", weights, latent), up_v)


@dataclass(frozen=True)
class Packed(Model):
    """The same of tokens [T, H], each of a sequence of its own."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> Tensor:
        """The result of all heads [T, N · E]."""
        return super().__call__(x.squeeze(1), cos.squeeze(1), sin.squeeze(1), *rest)

    def _products(self, query: Tensor, keys: Tensor) -> Tensor:
        """Of queries and keys of the indexer."""
        return torch.einsum("tmd,tkd->tmk", query, keys)

    def _over_keys(
        self, nope: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, up: Tensor, seen: Tensor
    ) -> Tensor:
        """Over keys and values of all heads."""
        opened = (nope.unsqueeze(1), rope.unsqueeze(1), latent, k_rope, up, seen.unsqueeze(1))
        return super()._over_keys(*opened).squeeze(1)

    def _over_latent(
        self, nope: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, up: Tensor, seen: Tensor
    ) -> Tensor:
        """Over the latent itself, both projections absorbed."""
        up_k, up_v = up.unflatten(0, (self.setting.n, -1)).split((self.setting.d, self.setting.e), dim=1)
        q = torch.einsum("tnd,ndc->tnc", nope, up_k)
        scores = torch.einsum("tnc,tkc->tnk", q, latent) + torch.einsum("tnd,tkd->tnk", rope, k_rope)
        weights = (scores.float() * self._of_scores()).masked_fill(~seen, -math.inf).softmax(-1).to(latent.dtype)
        return torch.einsum("tnc,nec->tne", torch.einsum("tnk,tkc->tnc", weights, latent), up_v)


def example(name: str, refusal: str = "", model: type[Model] = Model, **parts: Any) -> Example:
    """A model of other parts."""
    return Example(name, model(**parts), SETTING, refusal)


def two(keys: Tensor, at: Tensor) -> Tensor:
    """Both queries see what the last one does."""
    return (keys <= at).expand(-1, 2, -1)


def one_more(keys: Tensor, at: Tensor) -> Tensor:
    """The second query sees one key more than the first."""
    return keys <= at - 1 + torch.arange(2)[:, None]


def in_blocks(name: str, *nz: int) -> Example:
    """Some of the caches in blocks of NZ."""
    setting = replace(SETTING, c=32, dr=32, di=64, nz=nz)
    return Example(name, Model(setting), setting, "its pages are lines of NZ")


EXAMPLES = (
    example("keys and values of all heads"),
    example("absorbed", absorbs=True, of_heads=scaled),
    example("packed tokens", model=Packed),
    example("packed tokens, absorbed", model=Packed, absorbs=True, of_heads=scaled),
    example("packed tokens, the scale of a head", "requires 0.204", model=Packed, scale=16**-0.5),
    example("the scale of a head", "requires 0.204", scale=16**-0.5),
    example("another epsilon of the queries", "requires 1e-05", eps=1e-6),
    example("another epsilon of the latent", "requires 1e-05", eps_of_latent=1e-6),
    example("another epsilon of the keys", "requires 1e-06", eps_of_keys=1e-5),
    example("fewer keys", "1024 keys are listed", count=1024),
    example("a latent times a number", "it is multiplied by a number behind its norm", factor=0.5),
    example("halves, as the model has them", "they are rotated from half to half", rotate=in_halves),
    example("every key", "none of the sequences has one in a tensor", seen=lambda keys, at: keys >= 0),
    example("a query without keys", "a query may see no key, which", seen=lambda keys, at: keys < at),
    Example(
        "two queries that see the same", Model(replace(SETTING, queries=2), seen=two), replace(SETTING, queries=2),
        "each query sees keys behind it",
    ),
    Example(
        "two queries of which the second sees one key more", Model(replace(SETTING, queries=2), seen=one_more),
        replace(SETTING, queries=2), "the last visible key of a sequence is not",
    ),
    in_blocks("pages of a latent in NZ", 0, 1),
    in_blocks("pages of the indexer's keys in NZ", 2),
    in_blocks("all pages in NZ", 0, 1, 2),
)  # fmt: skip
TRIED = {"sparse_attention_pto": EXAMPLES}
