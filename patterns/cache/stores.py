"""Stores: the memory in which a token's row goes, its latent and its rotated key, and its encoding.

   fresh                  rows in memory of their own
   rows                   cache[b, start + s] = row          consecutive positions of every sequence
   pages                  cache[slot] = row                  BSND, or NZ: blocks [D / 16, Size, 16] of a page
   int8 by channel        cache[slot] = round(row / scale)   latent and key, one scale of each channel or of all
   int8 latents           cache[slot] = round(row / scale)   the latent alone, the rotated key is not quantised
   packed                 cache[slot] = [int8(latent / s) | rotated key in bfloat16 | s]      bytes, s of 128 lanes

A store gives the terms of the writes (`written`), refuses what an operator cannot write (`guard`), and gives the caches
as pages [Block, Size, 1, D] (`caches`), the layout and the slots (`layout`, `index`), the arguments of each operator
that depend on the encoding (`prolog_arguments`, `row_arguments`, `preprocess_arguments`), and an operator's results in
the shapes of the model (`restored`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, attribute, encodings, require, scalar, tensor
from patterns.cache import pages
from patterns.kit.int8_scales import STATIC, multipliers
from patterns.rotary.orders import HALF

Both = tuple[Tensor, Tensor]
TILE = 128
"""Lanes that share a scale in a packed row."""


@dataclass(frozen=True)
class Store(Group):
    """The base of all stores, with the defaults of one without quantisation."""

    def guard_order(self, order: str, operator: str) -> None:
        """Refuse an `order` of the rotated lanes in the cache other than halves, the order that `operator` writes."""
        require(
            order == HALF,
            "cache of rotated keys: its lanes are in pairs (interleaved order); {operator} requires half "
            "order (j, j + D/2); store the rotated lanes as halves, and rotate queries alike",
            operator=operator,
        )

    def queries(self, p, rotated, absorbed):
        """Return the terms of the queries that the attention reads: rotated and absorbed."""
        return rotated, absorbed

    def restored_queries(self, queries: Any, query: Tensor, rope: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Return `query` and `rope`, as the operator gives them, in the shapes of the model; `scale` is that of int8
        queries.
        """
        return queries.restored(query, rope)

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """Return the quantisation arguments of `npu_mla_prolog_v3`: none.

        `widths` are the lanes of latent and key.
        """
        return {}

    def row_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """Return the quantisation arguments of `npu_kv_rmsnorm_rope_cache_v2`: none.

        `widths` are the lanes of latent and key.
        """
        return {}

    def preprocess_arguments(self, like: Tensor) -> dict[str, Any]:
        """Return the quantisation arguments of `npu_mla_preprocess`: none; those of int8 pages have the dtype of
        `like`.
        """
        return {}


@dataclass(frozen=True)
class Fresh(Store):
    """Rows in fresh memory, which the model itself joins, writes or attends to."""

    def written(self, p, latent, rope):
        """Return the terms `latent` and `rope`: nothing is written."""
        return latent, rope

    def guard(self, tokens: Any, operator: str) -> None:
        """Accept any tokens."""

    def guard_order(self, order: str, operator: str) -> None:
        """Accept any order: rows in fresh memory can be permuted."""

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor, operator: str) -> Both:
        """Allocate memory [.., 1, D] for the latents and the rotated keys of `tokens` [.., H], D being `widths`, as
        `like`.
        """
        latent, rope = (like.new_empty((*tokens.shape[:-1], 1, width)) for width in widths)
        return latent, rope

    def layout(self, tokens: Tensor) -> str:
        """Return the layout of `tokens`: "BSND" for [B, S, H], "TND" for [T, H]."""
        return "BSND" if tokens.dim() == 3 else "TND"

    def index(self, tokens: Tensor) -> Tensor | None:
        """Return None: rows in fresh memory have no slots."""
        return None

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Return the rows `latent` and `rope` as the operator gives them."""
        return latent, rope


@dataclass(frozen=True)
class Rows(Store):
    """Rows at consecutive positions, from `start` on along `axis`, of contiguous caches, viewed as consecutive
    pages.
    """

    kv_cache: Any = tensor("*C Hckv")
    kr_cache: Any = tensor("*C Dr")
    start: Any = tensor("*S")
    axis: Any = attribute()

    def written(self, p, latent, rope):
        """Build the terms of the writes of `latent` and `rope` into both caches."""
        pairs = ((self.kv_cache, latent), (self.kr_cache, rope))
        return [p.write(cache=cache, rows=p.reshaped(row), start=self.start, axis=self.axis) for cache, row in pairs]

    def guard(self, tokens: Any, operator: str) -> None:
        """Refuse packed tokens, and another number of sequences than the caches have, for `operator`."""
        require(
            len(tokens.shape) == 3,
            "tokens: those of all sequences are packed [T, H]; {operator} requires [B, S, H] for a "
            "contiguous cache; keep the dim of sequences, or write to slots of pages",
            operator=operator,
        )
        cached = pages.sequences(self.kv_cache, self.start, self.axis)
        require(
            tokens.shape[0] == cached,
            "caches: they have another number of sequences than the hidden states; {operator} requires the "
            "same; slice the caches to the sequences of the call",
            operator=operator,
        )

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor, operator: str) -> Both:
        """View both caches as pages of `operator`."""
        return pages.cut(self.kv_cache, self.axis, operator), pages.cut(self.kr_cache, self.axis, operator)

    def layout(self, tokens: Tensor) -> str:
        """Return "PA_BSND", pages in rows."""
        return "PA_BSND"

    def index(self, tokens: Tensor) -> Tensor | None:
        """Return the slots [B, S] of `tokens` [B, S, H], -1 for those beyond the end of a sequence."""
        batch, rows = tokens.shape[:2]
        return pages.slots(self.start, batch, rows, self.kv_cache.shape[self.axis], tokens.device)

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Reshape the caches of `latent` and `rope`, as the operator returns them, to the shapes of the model."""
        return latent.reshape(self.kv_cache.shape), rope.reshape(self.kr_cache.shape)


@dataclass(frozen=True)
class Slots(Store):
    """Rows at slots of the pages of one cache; `lanes` is the width of a line where the pages are in NZ."""

    kv_cache: Any = tensor("*P")
    slots: Any = tensor("Rows", optional=True)
    nz_block = None
    lanes: ClassVar[int] = pages.NZ

    def guard(self, tokens: Any, operator: str) -> None:
        """Refuse slots that are not proven, pages of several heads, and lines other than those of NZ."""
        require(
            self.slots is not None,
            "slots: a place in a page is not proven to be below its size; {operator} requires slots; "
            "write page = slot // Size and place = slot % Size",
            operator=operator,
        )
        pages.refuse_others(self.nz_block, operator, self.lanes)
        is_one_head = self.nz_block is not None or all(size == 1 for size in self.kv_cache.shape[2:-1])
        require(
            is_one_head,
            "cache: its pages have several heads; {operator} requires [Block, Size, 1, D]; store the latent "
            "once for all heads",
            operator=operator,
        )

    def layout(self, tokens: Tensor) -> str:
        """Return "PA_BSND" for pages in rows, "PA_NZ" for pages in NZ."""
        return "PA_BSND" if self.nz_block is None else "PA_NZ"

    def index(self, tokens: Tensor) -> Tensor | None:
        """Return the slots [..] of `tokens` [.., H] in int64."""
        return self.slots.to(torch.int64).reshape(tokens.shape[:-1])


@dataclass(frozen=True)
class Pages(Slots):
    """Rows at the same slots of the pages of two caches, latents `kv_cache` and rotated keys `kr_cache`, in rows or in
    NZ.
    """

    kr_cache: Any = tensor("*Q")
    nz_block: Any = attribute()

    @property
    def blocks(self) -> tuple[Any, Any]:
        """The lanes of a line of the latents' and of the keys' cache, None for pages in rows."""
        return self.nz_block, self.nz_block

    def written(self, p, latent, rope):
        """Build the terms of the writes of `latent` and `rope` into both caches."""
        writes = zip((self.kv_cache, self.kr_cache), (latent, rope), self.blocks, strict=True)
        return [
            p.write_pages(cache=to, rows=p.reshaped(row), slots=self.slots, nz_block=block) for to, row, block in writes
        ]

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor, operator: str) -> Both:
        """View both caches as [Block, Size, 1, D]; the memory of pages in NZ is reinterpreted as is."""
        caches = (self.kv_cache, self.kr_cache)
        latents, ropes = (pages.in_rows(each, self.nz_block, operator) for each in caches)
        return latents, ropes

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Reshape the caches of `latent` and `rope`, as the operator returns them, to the shapes of the model."""
        return latent.reshape(self.kv_cache.shape), rope.reshape(self.kr_cache.shape)


@dataclass(frozen=True)
class Int8ChannelPages(Pages):
    """Pages in int8 of latents and of rotated keys, each by a static scale of each channel or of all."""

    kv_scale: Any = tensor("C", optional=True)
    kr_scale: Any = tensor("R", optional=True)
    kv_by: Any = scalar()
    kr_by: Any = scalar()
    lanes: ClassVar[int] = encodings.INT8.line

    def written(self, p, latent, rope):
        """Build the terms of the writes of `latent` and `rope`, both quantised, into both caches."""
        rows = ((latent, self.kv_scale, self.kv_by), (rope, self.kr_scale, self.kr_by))
        return super().written(p, *(_quantised(p, *each) for each in rows))

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """Return the inverse scales of both caches, [1, C] and [1, R], and the mode of quantisation."""
        latent, rope = (each.reshape(1, -1) for each in self._factors(widths, device))
        return dict(kv_cache_quant_mode=2, quant_scale_ckv=latent, quant_scale_ckr=rope)

    def row_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """Return the inverse scales of both caches, [C] and [R]."""
        latent, rope = self._factors(widths, device)
        return dict(k_rope_scale=rope, c_kv_scale=latent)

    def _factors(self, widths: tuple[Any, Any], device: torch.device) -> list[Tensor]:
        """Return the inverse scales of latents [C] and of keys [R], by which rows are multiplied."""
        scales = ((self.kv_scale, self.kv_by), (self.kr_scale, self.kr_by))
        return [multipliers(*scale, width, device) for scale, width in zip(scales, widths, strict=True)]


@dataclass(frozen=True)
class Int8LatentPages(Pages):
    """Pages of latents in int8 by a static scale of each channel or of all, and of rotated keys as floats."""

    kr_block: Any = attribute()
    kv_scale: Any = tensor("C", optional=True)
    kv_by: Any = scalar()
    lanes: ClassVar[int] = encodings.INT8.line

    @property
    def blocks(self) -> tuple[Any, Any]:
        """The lanes of a line of the latents' and of the keys' cache, None for pages in rows."""
        return self.nz_block, self.kr_block

    def quantised(self, p, latent):
        """Build the term of `latent` in int8."""
        return _quantised(p, latent, self.kv_scale, self.kv_by)

    def written(self, p, latent, rope):
        """Build the terms of the writes of `latent` in int8, and of `rope`, into both caches."""
        return super().written(p, self.quantised(p, latent), rope)

    def guard(self, tokens: Any, operator: str) -> None:
        """Refuse unproven slots, several heads, lines other than those of NZ, and one cache alone in NZ."""
        super().guard(tokens, operator)
        pages.refuse_others(self.kr_block, operator)
        is_same_layout = (self.nz_block is None) == (self.kr_block is None)
        require(
            is_same_layout,
            "caches: one of both is in NZ, the other in rows; {operator} requires one layout for both; "
            "allocate both [Block, Size, 1, D], or both [Block, D / 16, Size, 16] (32 lanes in int8)",
            operator=operator,
        )

    def row_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """Return the inverse scale of latents [C]."""
        return dict(c_kv_scale=multipliers(self.kv_scale, self.kv_by, widths[0], device))


@dataclass(frozen=True)
class PackedPages(Slots):
    """Pages of rows packed as bytes: a latent in int8, its rotated key, and a scale of each tile of the latent.

    Attributes:
        tile: lanes of a latent that share a scale.
    """

    kv_cache: Any = tensor("*P Line")
    tile: Any = attribute()

    def written(self, p, latent, rope):
        """Build the term of the write of the packed row of `latent` and `rope`."""
        rope = p.reshaped(p.maybe_cast(p.reshaped(rope), to=torch.bfloat16))
        row = p.packed_kv_row(latent=p.reshaped(latent), rope=rope, tile=self.tile)
        return (p.write_pages(cache=self.kv_cache, rows=p.reshaped(row), slots=self.slots, nz_block=None),)

    def guard(self, tokens: Any, operator: str) -> None:
        """Refuse tiles of other than 128 lanes, slots that are not proven, and pages of several heads."""
        reason = (
            "packed rows: each {tile} lanes of the latent share a scale; {operator} requires a scale of each "
            "128 lanes; quantise in tiles of 128"
        )
        require(self.tile == TILE, reason, tile=self.tile, operator=operator)
        super().guard(tokens, operator)

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor, operator: str) -> Both:
        """View the packed cache as [Block, Size, 1, Line], and return an empty cache of rotated keys."""
        cache = pages.in_rows(self.kv_cache, None, operator)
        return cache, like.new_empty((*cache.shape[:-1], 0))

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """Return the mode of packed rows, and a clip factor of 1."""
        alpha = torch.ones(1, dtype=torch.float32, device=device)
        rows = dict(ckvkr_repo_mode=1, quant_scale_repo_mode=1, tile_size=self.tile)
        return dict(kv_cache_quant_mode=3, k_nope_clip_alpha=alpha, **rows)

    def restored(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Reshape the packed cache `latent` that the operator returns to the shape of the model; `rope` is empty."""
        return (latent.reshape(self.kv_cache.shape),)


PAGES: tuple[Any, ...] = (Pages, Int8ChannelPages)
"""Pages that are tried with every operator that writes latents and keys; the operator's limits refuse some of them."""


def _quantised(p, x, scale, by):
    """Build the term int8(round(x / (scale · by))), for a static `scale`."""
    return p.quantise(x=p.reshaped(x), scale=scale, by=by, shift=0, encoding=STATIC, scheme="static")
