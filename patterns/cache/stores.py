"""Where the row of a token goes, its latent and its rotated key: stores, and how they hold numbers.

    fresh                  rows in memory of their own
    rows                   cache[b, start + s] = row          consecutive positions of every sequence
    pages                  cache[slot] = row                  BSND, or NZ: blocks [D / 16, Size, 16] of a page
    int8 by channel        cache[slot] = round(row / scale)   both rows, a scale of each channel or of all
    int8 by tensor         the same of the latent, by one scale; the rotated key as it is
    packed                 cache[slot] = [int8(latent / s) | rotated key in bfloat16 | s]      bytes, s of 128 lanes

A store gives the writes as terms (`written`), what speaks against them (`guard`), both caches in pages [Block, Size, 1,
D] (`caches`), the layout and the slots that an operator is told, the factors that rows are quantised by, and its
results in the model's shape (`restored`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from patterns.latent import latent_calls as calls
from patterns.quant.scales import multipliers

Both = tuple[Tensor, Tensor]
TILE = 128
"""Lanes of which a packed row keeps a scale."""


@dataclass(frozen=True)
class Fresh(Group):
    """Rows that the model itself joins, writes or attends to."""

    def written(self, p, latent, rope):
        """Both rows as they are."""
        return latent, rope

    def guard(self, tokens: Any) -> None:
        """Nothing speaks against them."""

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> Both:
        """Memory [.., 1, D] for the rows of tokens [.., H]."""
        latent, rope = (like.new_empty((*tokens.shape[:-1], 1, width)) for width in widths)
        return latent, rope

    def layout(self, tokens: Tensor) -> str:
        """That of the tokens."""
        return "BSND" if tokens.dim() == 3 else "TND"

    def index(self, tokens: Tensor) -> Tensor | None:
        """There are no slots."""
        return None

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Both rows."""
        return latent, rope


@dataclass(frozen=True)
class Rows(Group):
    """Rows at consecutive positions of contiguous caches, which are read as pages in their own order."""

    kv_cache: Any = tensor("*C Hckv")
    kr_cache: Any = tensor("*C Dr")
    start: Any = tensor("*S")
    axis: Any = attribute()

    def written(self, p, latent, rope):
        """Both writes."""
        pairs = ((self.kv_cache, latent), (self.kr_cache, rope))
        return [p.write(cache=cache, rows=p.reshaped(row), start=self.start, axis=self.axis) for cache, row in pairs]

    def guard(self, tokens: Any) -> None:
        """Refuse tokens that are not those of the sequences of the caches."""
        require(len(tokens.shape) == 3, "the tokens of all sequences are packed")
        held = calls.sequences(self.kv_cache, self.start, self.axis)
        require(tokens.shape[0] == held, "the caches hold other sequences than the hidden states")

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> Both:
        """Both caches as pages."""
        return calls.pages(self.kv_cache, self.axis), calls.pages(self.kr_cache, self.axis)

    def layout(self, tokens: Tensor) -> str:
        """Pages of whole rows."""
        return "PA_BSND"

    def index(self, tokens: Tensor) -> Tensor | None:
        """The slots of tokens [B, S, H]; -1 for what is beyond the end of a sequence."""
        batch, rows = tokens.shape[:2]
        return calls.slots(self.start, batch, rows, self.kv_cache.shape[self.axis], tokens.device)

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Both caches."""
        return latent.reshape(self.kv_cache.shape), rope.reshape(self.kr_cache.shape)


@dataclass(frozen=True)
class Pages(Group):
    """Rows at the same slots of the pages of two caches, BSND or in NZ."""

    kv_cache: Any = tensor("*P")
    kr_cache: Any = tensor("*Q")
    slots: Any = tensor("Rows", optional=True)
    nz_block: Any = attribute()
    lanes: ClassVar[int] = calls.LINE

    def written(self, p, latent, rope):
        """Both writes."""
        return calls.written(p, (self.kv_cache, self.kr_cache), (latent, rope), self.slots, self.nz_block)

    def guard(self, tokens: Any) -> None:
        """Refuse slots that are not proven, pages of several heads, and other blocks than those of NZ."""
        calls.of_pages(self.kv_cache, self.slots, self.nz_block, self.lanes)

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> Both:
        """Both caches; those in NZ are the same memory."""
        return calls.in_rows(self.kv_cache, self.nz_block), calls.in_rows(self.kr_cache, self.nz_block)

    def layout(self, tokens: Tensor) -> str:
        """Pages, and how they hold their rows."""
        return "PA_BSND" if self.nz_block is None else "PA_NZ"

    def index(self, tokens: Tensor) -> Tensor | None:
        """The slots of tokens [.., H]."""
        return self.slots.to(torch.int64).reshape(tokens.shape[:-1])

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Both caches."""
        return latent.reshape(self.kv_cache.shape), rope.reshape(self.kr_cache.shape)


@dataclass(frozen=True)
class Int8ChannelPages(Pages):
    """Pages in int8 by static scales of each channel, or of all, of both rows."""

    kv_scale: Any = tensor("C", optional=True)
    kr_scale: Any = tensor("R", optional=True)
    kv_by: Any = scalar()
    kr_by: Any = scalar()
    lanes: ClassVar[int] = calls.WHOLE_LINE

    def written(self, p, latent, rope):
        """Both writes of int8."""
        rows = ((latent, self.kv_scale, self.kv_by), (rope, self.kr_scale, self.kr_by))
        return super().written(
            p, *(p.quantise(x=p.reshaped(x), scale=s, by=by, shift=0, scheme="static") for x, s, by in rows)
        )

    def factors(self, widths: tuple[Any, Any], device: torch.device) -> Both:
        """What both rows are multiplied by, [C] and [R]."""
        latent, rope = widths
        return multipliers(self.kv_scale, self.kv_by, latent, device), multipliers(
            self.kr_scale, self.kr_by, rope, device
        )


@dataclass(frozen=True)
class Int8TensorPages(Pages):
    """Pages of latents in int8 by one static scale, and of rotated keys as they are."""

    kr_block: Any = attribute()
    kv_scale: Any = tensor("1", optional=True)
    kv_by: Any = scalar()
    lanes: ClassVar[int] = calls.WHOLE_LINE

    def written(self, p, latent, rope):
        """Both writes."""
        int8 = p.quantise(x=p.reshaped(latent), scale=self.kv_scale, by=self.kv_by, shift=0, scheme="static")
        caches = (self.kv_cache, self.kr_cache)
        return calls.written(p, caches, (int8, rope), self.slots, self.nz_block, self.kr_block)

    def guard(self, tokens: Any) -> None:
        """As for all pages, of both caches."""
        super().guard(tokens)
        calls.of_line(self.kr_block)
        alike = (self.nz_block is None) == (self.kr_block is None)
        require(alike, "one cache holds rows in lines, the other whole ones")

    def factor(self, device: torch.device) -> Tensor:
        """What latents are multiplied by, [1]."""
        return multipliers(self.kv_scale, self.kv_by, 1, device)


@dataclass(frozen=True)
class PackedPages(Group):
    """Pages of packed rows: latents in int8 with a scale of each tile, and rotated keys, as bytes of one cache."""

    kv_cache: Any = tensor("*P Line")
    slots: Any = tensor("Rows", optional=True)
    tile: Any = attribute()

    def written(self, p, latent, rope):
        """The write of the packed row."""
        rope = p.reshaped(p.maybe_cast(p.reshaped(rope), to=torch.bfloat16))
        row = p.byte_line(latent=p.reshaped(latent), rope=rope, tile=self.tile)
        return (p.write_pages(cache=self.kv_cache, rows=p.reshaped(row), slots=self.slots, line=None),)

    def guard(self, tokens: Any) -> None:
        """Refuse other tiles, slots that are not proven, and pages of several rows."""
        require(
            self.tile == TILE, "a line keeps a scale of every {tile} lanes, that of the operator of 128", tile=self.tile
        )
        calls.of_pages(self.kv_cache, self.slots, None)

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> Both:
        """The cache, and none of rotated keys."""
        pages = calls.in_rows(self.kv_cache, None)
        return pages, like.new_empty((*pages.shape[:-1], 0))

    def layout(self, tokens: Tensor) -> str:
        """Pages of whole rows."""
        return "PA_BSND"

    def index(self, tokens: Tensor) -> Tensor | None:
        """The slots of tokens [.., H]."""
        return self.slots.to(torch.int64).reshape(tokens.shape[:-1])

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """The cache."""
        return (latent.reshape(self.kv_cache.shape),)
