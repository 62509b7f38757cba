"""Norms, rotation and cache writes between the projection of grouped heads and their attention, in one operator.

    [q ‖ k ‖ v] = x W_QKV, per head
    q = rope(norm(q))      keys[slot] = rope(norm(k)), or int8 of it      values[slot] = v, or int8 of it

*Matches* the norms over the lanes of each head, the rotation of queries and keys by halves with shared tables, and the
writes of keys and values by the same slots into pages in NZ blocks, as they are or in int8 by static scales of each
channel, of each head or of all (C8); from one projection, from three whose weights are Parameters, or from any queries,
keys and values (Qwen3, 2025). *Replaces with* `npu_qkv_rms_norm_rope_cache`, which rounds a row once, where it is
stored; gains and tables are rounded to the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, Rule, attribute, encodings, lowering, pattern, require, scalar, tensor, variants
from patterns.attention.qkv.qkv_sources import SOURCES
from patterns.cache.pages import NZ, refuse_others
from patterns.rotary.orders import HALF
from patterns.rotary.token_tables import TokenTables, rotated_lanes

Both = tuple[Tensor, Tensor]


# order of dims of heads ----------------------------------------------------------------------------------------------


TRANSPOSED = (0, 2, 1, 3)


@dataclass(frozen=True)
class PositionsFirst(Group):
    """Order of dims in which queries and keys are normalised and rotated: [B, S, N, D], or [T, N, D]."""

    heads_first: ClassVar[bool] = False

    def normed(self, p, heads, norm: Callable[[Any], Any]):
        """Build the term of the norm of `heads`, which may be reshaped before the rotation."""
        return p.reshaped(norm(heads))

    def stored(self, p, rotated):
        """Build the term of rotated keys, which may be reshaped before they are stored."""
        return p.reshaped(rotated)

    def restored(self, q: Tensor) -> Tensor:
        """Return queries `q` [.., N, D] in the order of dims of the model."""
        return q


@dataclass(frozen=True)
class HeadsFirst(PositionsFirst):
    """Order of dims in which queries and keys are normalised and rotated: [B, N, S, D]."""

    heads_first: ClassVar[bool] = True

    def normed(self, p, heads, norm: Callable[[Any], Any]):
        """Build the term of the norm of `heads` transposed to [B, N, S, D]."""
        return norm(p.in_order(heads, TRANSPOSED))

    def stored(self, p, rotated):
        """Build the term of rotated keys transposed back to [B, S, N, D]."""
        return p.reshaped(p.in_order(rotated, TRANSPOSED))

    def restored(self, q: Tensor) -> Tensor:
        """Transpose queries `q` [B, S, N, D] to [B, N, S, D]."""
        return q.transpose(1, 2)


@dataclass(frozen=True)
class RotatedHeadsFirst(HeadsFirst):
    """Orders of dims in which queries and keys are normalised, [B, S, N, D], and rotated, [B, N, S, D]."""

    def normed(self, p, heads, norm: Callable[[Any], Any]):
        """Build the term of the norm of `heads`, transposed to [B, N, S, D] behind it."""
        return p.in_order(norm(heads), TRANSPOSED)


# pages ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedPages(Group):
    """Pages [Block, .., A, Size, L] of keys and values, in floats, in NZ blocks of L lanes, written at the same
    slots.
    """

    key_pages: Any = tensor("*P")
    value_pages: Any = tensor("*Q")
    slots: Any = tensor("T")
    nz_block: Any = attribute()
    lanes: ClassVar[int] = NZ

    def written(self, p, *rows: Any):
        """Build the terms of the writes of `rows`, keys and values, to the pages."""
        how = dict(slots=self.slots, nz_block=self.nz_block)
        both = zip((self.key_pages, self.value_pages), rows, strict=True)
        return [p.write_pages(cache=pages, rows=new, **how) for pages, new in both]

    def guard(self) -> None:
        """Refuse pages of whole rows, and NZ blocks of another number of lanes than `self.lanes`, that of the
        operator.
        """
        require(
            self.nz_block is not None,
            "caches: pages are [Block, Size, N, D], whole rows; npu_qkv_rms_norm_rope_cache requires lines of "
            "NZ, [Block, N * D / 16, Size, 16]",
        )
        refuse_others(self.nz_block, "npu_qkv_rms_norm_rope_cache", self.lanes)

    def caches(self) -> Both:
        """View the pages of keys and of values as [Block, M · D / L, Size, L]."""
        keys, values = (_in_lines(each) for each in (self.key_pages, self.value_pages))
        return keys, values

    def arguments(self, heads: int, width: int) -> dict[str, Tensor]:
        """Return the arguments by which the operator quantises rows of `heads` heads and `width` lanes: {}, as floats
        have none.
        """
        return {}

    def restored(self, *caches: Tensor) -> tuple[Tensor, ...]:
        """Reshape the written `caches` to the shapes of the model."""
        return tuple(map(torch.reshape, caches, (self.key_pages.shape, self.value_pages.shape)))


@dataclass(frozen=True)
class Int8GroupedPages(GroupedPages):
    """Pages [Block, .., A, Size, L] of keys and of values in int8 by static scales, in NZ blocks."""

    key_scale: Any = tensor("*K Dk")
    key_zero: Any = tensor("*L Dl", optional=True)
    value_scale: Any = tensor("*V Dv")
    value_zero: Any = tensor("*W Dw", optional=True)
    divided: Any = attribute()
    lanes: ClassVar[int] = encodings.INT8.line

    def written(self, p, *rows: Any):
        """Build the terms of the writes of `rows`, keys and values, quantised to int8."""
        scales = ((self.key_scale, self.key_zero), (self.value_scale, self.value_zero))
        int8 = (
            p.int8_rows(x=new, scale=scale, zero=zero, divided=self.divided)
            for new, (scale, zero) in zip(rows, scales, strict=True)
        )
        return super().written(p, *map(p.reshaped, int8))

    def arguments(self, heads: int, width: int) -> dict[str, Tensor]:
        """Return the scales by which rows are divided, and the offsets added afterwards, [`heads`, `width`] in
        float32.
        """
        given = {
            "k_scale": self._divisor(self.key_scale), "v_scale": self._divisor(self.value_scale),
            "k_offset": self.key_zero, "v_offset": self.value_zero,
        }  # fmt: skip
        return {name: _by_channel(each.float(), heads, width) for name, each in given.items() if each is not None}

    def _divisor(self, scale: Tensor) -> Tensor:
        return scale.float() if self.divided else scale.float().reciprocal()


def _by_channel(x: Tensor, heads: int, width: int) -> Tensor:
    """Expand the scales `x` of each head and channel, of either, or of all, in any dims, to [heads, width]."""
    if x.numel() == heads * width:
        return x.reshape(heads, width)
    lanes = x.shape[-1]
    by_head = lanes in (1, width) and x.numel() in (lanes, heads * lanes)
    require(
        by_head,
        "scales: they differ among the lines of a page; npu_qkv_rms_norm_rope_cache requires one of each head "
        "and channel, of each channel, or one for all",
    )
    return x.reshape(-1, lanes).expand(heads, width).contiguous()


def _in_lines(pages: Tensor) -> Tensor:
    require(
        pages.is_contiguous(),
        "caches: the pages are not contiguous; npu_qkv_rms_norm_rope_cache writes in place and requires "
        "contiguous ones; allocate the cache contiguous",
    )
    *_, size, line = pages.shape
    return pages.reshape(pages.shape[0], -1, size, line)


# the rule ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normed(Group):
    """Gains and epsilons of the norms of queries and keys, and the rotation of both.

    Attributes:
        q_gamma: the gain of queries.
        k_gamma: the gain of keys.
        q_eps: the epsilon of queries.
        k_eps: the epsilon of keys.
        source: the order of lanes before the rotation.
        result: the order of lanes after the rotation.
        dtype: the dtype in which the model rotates.
    """

    q_gamma: Any = tensor("D")
    k_gamma: Any = tensor("D")
    q_eps: Any = scalar()
    k_eps: Any = scalar()
    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def terms(self, p, heads, order, tables, like):
        """Return the terms of queries and keys, normalised and rotated.

        `heads` are the terms of both by heads, `order` the order of dims in which they are normalised and rotated;
        `tables` and `like` are those of `rotated_lanes`.
        """
        norms = ((self.q_gamma, self.q_eps), (self.k_gamma, self.k_eps))
        normed = (
            order.normed(p, each, partial(_norm, p, gamma, eps))
            for each, (gamma, eps) in zip(heads, norms, strict=True)
        )
        return [rotated_lanes(p, each, tables, self, like, order.heads_first) for each in normed]

    def guard(self, tables: TokenTables) -> None:
        """Refuse interleaved pairs, two epsilons, and norms over other lanes than those that are rotated."""
        require(
            (self.source, self.result) == (HALF, HALF),
            "rope: the lanes are rotated in interleaved order (2j, 2j + 1); npu_qkv_rms_norm_rope_cache "
            "requires half order (j, j + D/2); permute the rows of the projections of queries and keys",
        )
        reason = (
            "eps: queries are normalised with {q}, keys with {k}; npu_qkv_rms_norm_rope_cache requires one "
            "epsilon for both"
        )
        require(self.q_eps == self.k_eps, reason, q=self.q_eps, k=self.k_eps)
        normed, turned = self.q_gamma.shape[0], tables.cos.shape[-1]
        reason = (
            "queries, keys: {normed} lanes are normalised, and {turned} rotated; npu_qkv_rms_norm_rope_cache "
            "requires one head width for both"
        )
        require(normed == turned, reason, normed=normed, turned=turned)


def _norm(p: Any, gamma: Any, eps: Any, x: Any) -> Any:
    return p.rms_norm(x=x, gamma=gamma, eps=eps)


@dataclass(frozen=True)
class QkvRmsNormRopeCache(Rule):
    """Norms and rotation of queries and keys, and the writes of keys and values."""

    aliases = ("qkv_write",)

    def reference(self, q: Tensor, k: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Both:
        """Compute rope(norm(q)) and rope(norm(k)) of heads [*B, D], with tables that broadcast to them."""

        def turned(x: Tensor) -> Tensor:
            low, high = F.rms_norm(x, gamma.shape, gamma, eps).chunk(2, dim=-1)
            return torch.cat((low, high), dim=-1) * cos + torch.cat((-high, low), dim=-1) * sin

        return turned(q), turned(k)

    @pattern
    @variants(source=SOURCES, order=(PositionsFirst, HeadsFirst, RotatedHeadsFirst),
              storage=(GroupedPages, Int8GroupedPages))  # fmt: skip
    def written(self, p, source, order, storage, normed: Any = Normed, tables: Any = TokenTables):
        """q = rope(norm(q)), keys[slot] = rope(norm(k)), values[slot] = v, for the heads of each token"""
        *heads, v = source.heads(p)
        q, k = normed.terms(p, heads, order, tables, source.like())
        return q, *storage.written(p, order.stored(p, k), v)

    def guard(self, source: Any, normed: Normed, storage: GroupedPages, tables: TokenTables):
        """Refuse rotations in pairs, two epsilons, norms over other lanes than are rotated (`normed`); lanes that are
        no projection, weights joined per call (`source`); and pages other than in NZ (`storage`).
        """
        normed.guard(tables)
        source.guard()
        storage.guard()

    @lowering
    def run(self, source: Any, order: Any, storage: GroupedPages, normed: Normed, tables: TokenTables):
        """Emit npu_qkv_rms_norm_rope_cache_functional on the concatenated projection [T, W]."""
        tokens, width = storage.slots.shape[0], normed.q_gamma.shape[0]
        require(
            isinstance(tokens, int),
            "tokens: their number is symbolic; npu_qkv_rms_norm_rope_cache requires it as a Python number; "
            "compile for a static number of tokens",
        )
        qkv = source.joined(tokens)
        lanes = qkv.shape[1]
        keys, values = storage.caches()
        shared = keys.shape[1] * keys.shape[3] // width
        nums = [lanes // width - 2 * shared, shared, shared]
        cos, sin = (each.to(qkv.dtype).reshape(tokens, width).contiguous() for each in tables.rows(qkv))
        *_, q, keys, values = torch.ops.npu.npu_qkv_rms_norm_rope_cache_functional(
            qkv.contiguous(), normed.q_gamma.to(qkv.dtype), normed.k_gamma.to(qkv.dtype), cos,
            sin, storage.slots.long(), torch.empty((tokens, nums[0] * width), dtype=qkv.dtype, device=qkv.device), keys,
            values, [1, tokens, sum(nums), width], nums, epsilon=normed.q_eps, **storage.arguments(shared, width),
        )  # fmt: skip
        return order.restored(q.reshape(source.query_shape(width))), *storage.restored(keys, values)
