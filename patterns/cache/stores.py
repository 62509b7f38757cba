"""Where the row of a token goes, its latent and its rotated key: stores, and how they hold numbers.

    fresh                  rows in memory of their own
    rows                   cache[b, start + s] = row          consecutive positions of every sequence
    pages                  cache[slot] = row                  BSND, or NZ: blocks [D / 16, Size, 16] of a page
    int8 by channel        cache[slot] = round(row / scale)   both rows, a scale of each channel or of all
    int8 latents           the same of the latent alone, the rotated key as it is
    packed                 cache[slot] = [int8(latent / s) | rotated key in bfloat16 | s]      bytes, s of 128 lanes

A store gives the writes as terms (`written`), what speaks against them (`guard`), both caches in pages [Block, Size, 1,
D] (`caches`), the layout and the slots that an operator is told, what each operator is told of the numbers
(`prolog_arguments`, `row_arguments`, `preprocess_arguments`), and its results in the model's shape (`restored`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from patterns.cache import pages
from patterns.kit.int8_scales import multipliers
from patterns.kit.orders import HALF

Both = tuple[Tensor, Tensor]
TILE = 128
"""Lanes of which a packed row keeps a scale."""


@dataclass(frozen=True)
class Store(Group):
    """Any store; by itself one of rows as they are, beside queries as they are."""

    def guard_order(self, order: str) -> None:
        """Refuse a cache that keeps the lanes of rotated keys in another order than an operator writes them."""
        require(order == HALF, "the cache keeps rotated lanes in pairs, the operator writes halves")

    def queries(self, p, rotated, absorbed):
        """Queries as the attention reads them."""
        return rotated, absorbed

    def restored_queries(self, queries: Any, query: Tensor, rope: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """The same as the operator gives them, in the model's shape."""
        return queries.restored(query, rope)

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """What `npu_mla_prolog_v3` is told of the numbers; `widths` are the lanes of both rows."""
        return {}

    def row_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """What `npu_kv_rmsnorm_rope_cache_v2` is told of them."""
        return {}

    def preprocess_arguments(self, like: Tensor) -> dict[str, Any]:
        """What `npu_mla_preprocess` is told of them, in the dtype of `like`."""
        return {}


@dataclass(frozen=True)
class Fresh(Store):
    """Rows that the model itself joins, writes or attends to."""

    def written(self, p, latent, rope):
        """Both rows as they are."""
        return latent, rope

    def guard(self, tokens: Any) -> None:
        """Nothing speaks against them."""

    def guard_order(self, order: str) -> None:
        """Rows of the model's own are put in any order."""

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
class Rows(Store):
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
        held = pages.sequences(self.kv_cache, self.start, self.axis)
        require(tokens.shape[0] == held, "the caches hold other sequences than the hidden states")

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> Both:
        """Both caches as pages."""
        return pages.cut(self.kv_cache, self.axis), pages.cut(self.kr_cache, self.axis)

    def layout(self, tokens: Tensor) -> str:
        """Pages of whole rows."""
        return "PA_BSND"

    def index(self, tokens: Tensor) -> Tensor | None:
        """The slots of tokens [B, S, H]; -1 for what is beyond the end of a sequence."""
        batch, rows = tokens.shape[:2]
        return pages.slots(self.start, batch, rows, self.kv_cache.shape[self.axis], tokens.device)

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Both caches."""
        return latent.reshape(self.kv_cache.shape), rope.reshape(self.kr_cache.shape)


@dataclass(frozen=True)
class Slots(Store):
    """Rows at slots of the pages of a cache."""

    kv_cache: Any = tensor("*P")
    slots: Any = tensor("Rows", optional=True)
    nz_block = None
    lanes: ClassVar[int] = pages.NZ

    def guard(self, tokens: Any) -> None:
        """Refuse slots that are not proven, pages of several heads, and other blocks than those of NZ."""
        require(
            self.slots is not None,
            "the place is not proven to lie in its page: slot % Size is; write page = slot // Size "
            "and place = slot % Size",
        )
        pages.refuse_others(self.nz_block, self.lanes)
        of_a_head = self.nz_block is not None or all(size == 1 for size in self.kv_cache.shape[2:-1])
        require(of_a_head, "the pages hold several heads")

    def layout(self, tokens: Tensor) -> str:
        """Pages, and how they hold their rows."""
        return "PA_BSND" if self.nz_block is None else "PA_NZ"

    def index(self, tokens: Tensor) -> Tensor | None:
        """The slots of tokens [.., H]."""
        return self.slots.to(torch.int64).reshape(tokens.shape[:-1])


@dataclass(frozen=True)
class Pages(Slots):
    """Rows at the same slots of the pages of two caches, BSND or in NZ."""

    kr_cache: Any = tensor("*Q")
    nz_block: Any = attribute()

    @property
    def blocks(self) -> tuple[Any, Any]:
        """The lanes of a block of both caches, None for whole rows."""
        return self.nz_block, self.nz_block

    def written(self, p, latent, rope):
        """Both writes."""
        both = zip((self.kv_cache, self.kr_cache), (latent, rope), self.blocks, strict=True)
        return [
            p.write_pages(cache=to, rows=p.reshaped(row), slots=self.slots, nz_block=block) for to, row, block in both
        ]

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> Both:
        """Both caches; those in NZ are the same memory."""
        return pages.in_rows(self.kv_cache, self.nz_block), pages.in_rows(self.kr_cache, self.nz_block)

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
    lanes: ClassVar[int] = pages.NZ_INT8

    def written(self, p, latent, rope):
        """Both writes of int8."""
        rows = ((latent, self.kv_scale, self.kv_by), (rope, self.kr_scale, self.kr_by))
        return super().written(p, *(_quantised(p, *each) for each in rows))

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """What `npu_mla_prolog_v3` is told of the numbers."""
        latent, rope = (each.reshape(1, -1) for each in self._factors(widths, device))
        return dict(kv_cache_quant_mode=2, quant_scale_ckv=latent, quant_scale_ckr=rope)

    def row_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """What `npu_kv_rmsnorm_rope_cache_v2` is told of them."""
        latent, rope = self._factors(widths, device)
        return dict(k_rope_scale=rope, c_kv_scale=latent)

    def _factors(self, widths: tuple[Any, Any], device: torch.device) -> list[Tensor]:
        """What both rows are multiplied by, [C] and [R]."""
        scales = ((self.kv_scale, self.kv_by), (self.kr_scale, self.kr_by))
        return [multipliers(*of, width, device) for of, width in zip(scales, widths, strict=True)]


@dataclass(frozen=True)
class Int8LatentPages(Pages):
    """Pages of latents in int8 by static scales of each channel, or of all, and of rotated keys as they are."""

    kr_block: Any = attribute()
    kv_scale: Any = tensor("C", optional=True)
    kv_by: Any = scalar()
    lanes: ClassVar[int] = pages.NZ_INT8

    @property
    def blocks(self) -> tuple[Any, Any]:
        """Those of each cache."""
        return self.nz_block, self.kr_block

    def quantised(self, p, latent):
        """A latent in int8."""
        return _quantised(p, latent, self.kv_scale, self.kv_by)

    def written(self, p, latent, rope):
        """Both writes."""
        return super().written(p, self.quantised(p, latent), rope)

    def guard(self, tokens: Any) -> None:
        """As for all pages, of both caches."""
        super().guard(tokens)
        pages.refuse_others(self.kr_block)
        alike = (self.nz_block is None) == (self.kr_block is None)
        require(alike, "one cache holds rows in lines, the other whole ones")

    def row_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """What `npu_kv_rmsnorm_rope_cache_v2` is told of them."""
        return dict(c_kv_scale=multipliers(self.kv_scale, self.kv_by, widths[0], device))


@dataclass(frozen=True)
class PackedPages(Slots):
    """Pages of packed rows: latents in int8 with a scale of each tile, and rotated keys, as bytes of one cache."""

    kv_cache: Any = tensor("*P Line")
    tile: Any = attribute()

    def written(self, p, latent, rope):
        """The write of the packed row."""
        rope = p.reshaped(p.maybe_cast(p.reshaped(rope), to=torch.bfloat16))
        row = p.packed_kv_row(latent=p.reshaped(latent), rope=rope, tile=self.tile)
        return (p.write_pages(cache=self.kv_cache, rows=p.reshaped(row), slots=self.slots, nz_block=None),)

    def guard(self, tokens: Any) -> None:
        """Refuse other tiles, slots that are not proven, and pages of several rows."""
        said = "a line keeps a scale of every {tile} lanes, that of the operator of 128"
        require(self.tile == TILE, said, tile=self.tile)
        super().guard(tokens)

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> Both:
        """The cache, and none of rotated keys."""
        cache = pages.in_rows(self.kv_cache, None)
        return cache, like.new_empty((*cache.shape[:-1], 0))

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """What `npu_mla_prolog_v3` is told of the numbers."""
        alpha = torch.ones(1, dtype=torch.float32, device=device)
        rows = dict(ckvkr_repo_mode=1, quant_scale_repo_mode=1, tile_size=self.tile)
        return dict(kv_cache_quant_mode=3, k_nope_clip_alpha=alpha, **rows)

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """The cache."""
        return (latent.reshape(self.kv_cache.shape),)


PAGES: tuple[Any, ...] = (Pages, Int8ChannelPages)
"""Pages that every operator which writes both rows is asked for; what it does not take, its contract says."""


def _quantised(p, x, scale, by):
    """The term of rows in int8 by a static scale times a number."""
    return p.quantise(x=p.reshaped(x), scale=scale, by=by, shift=0, scheme="static")
