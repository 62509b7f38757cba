"""What stands between the projection of grouped heads and their attention, in one operator.

    [q ‖ k ‖ v] = x W_QKV, per head
    q = rope(norm(q))      keys[slot] = rope(norm(k)), or int8 of it      values[slot] = v, or int8 of it

*Matches* the norms over the lanes of each head, the rotation of queries and keys by halves with tables that they share,
and the writes of keys and values by the same slots into pages that lie in lines of NZ, as they are or in int8 by
static scales of each channel, of each head or of all (C8); of one projection, of three whose weights are Parameters, or
of queries, keys and values from anywhere (Qwen3, 2025). *Replaces with* `npu_qkv_rms_norm_rope_cache`, which rounds a
row once, where it is stored; gains and tables are rounded to the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.attention.qkv.qkv_sources import SOURCES
from patterns.cache.pages import NZ, NZ_INT8, refuse_others
from patterns.kit.orders import HALF
from patterns.rotary.token_tables import TokenTables, rotated_lanes

Both = tuple[Tensor, Tensor]


# how heads stand -----------------------------------------------------------------------------------------------------


TURNED = (0, 2, 1, 3)


@dataclass(frozen=True)
class PositionsFirst(Group):
    """Queries and keys are [B, S, N, D], or [T, N, D]."""

    heads_first: ClassVar[bool] = False

    def normed(self, p, heads, norm: Callable[[Any], Any]):
        """Heads of tokens, normalised, as they are rotated."""
        return p.reshaped(norm(heads))

    def stored(self, p, rotated):
        """Rotated keys as they are stored."""
        return p.reshaped(rotated)

    def restored(self, q: Tensor) -> Tensor:
        """Queries [.., N, D] as the model has them."""
        return q


@dataclass(frozen=True)
class HeadsFirst(PositionsFirst):
    """They are normalised and rotated as [B, N, S, D]."""

    heads_first: ClassVar[bool] = True

    def normed(self, p, heads, norm: Callable[[Any], Any]):
        """Heads before tokens."""
        return norm(p.in_order(heads, TURNED))

    def stored(self, p, rotated):
        """Tokens before heads again."""
        return p.reshaped(p.in_order(rotated, TURNED))

    def restored(self, q: Tensor) -> Tensor:
        """Heads before tokens."""
        return q.transpose(1, 2)


@dataclass(frozen=True)
class RotatedHeadsFirst(HeadsFirst):
    """They are normalised as [B, S, N, D], and rotated as [B, N, S, D]."""

    def normed(self, p, heads, norm: Callable[[Any], Any]):
        """Heads before tokens behind the norm."""
        return p.in_order(norm(heads), TURNED)


# what takes keys and values ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedPages(Group):
    """Pages [Block, .., A, Size, L] of keys and of values in lines of NZ, which take rows at the same slots."""

    key_pages: Any = tensor("*P")
    value_pages: Any = tensor("*Q")
    slots: Any = tensor("T")
    nz_block: Any = attribute()
    lanes: ClassVar[int] = NZ

    def written(self, p, *rows: Any):
        """Both writes."""
        how = dict(slots=self.slots, nz_block=self.nz_block)
        both = zip((self.key_pages, self.value_pages), rows, strict=True)
        return [p.write_pages(cache=pages, rows=new, **how) for pages, new in both]

    def guard(self) -> None:
        """Refuse whole rows, and other lines than those of NZ."""
        require(self.nz_block is not None, "the pages hold whole rows, the operator writes lines of NZ")
        refuse_others(self.nz_block, self.lanes)

    def caches(self) -> Both:
        """Both as [Block, M · D / L, Size, L]."""
        keys, values = (_in_lines(each) for each in (self.key_pages, self.value_pages))
        return keys, values

    def arguments(self, heads: int, width: int) -> dict[str, Tensor]:
        """What the operator is told of numbers."""
        return {}

    def restored(self, *caches: Tensor) -> tuple[Tensor, ...]:
        """Both as the model has them."""
        return tuple(map(torch.reshape, caches, (self.key_pages.shape, self.value_pages.shape)))


@dataclass(frozen=True)
class Int8GroupedPages(GroupedPages):
    """The same in int8 by static scales."""

    key_scale: Any = tensor("*K Dk")
    key_zero: Any = tensor("*L Dl", optional=True)
    value_scale: Any = tensor("*V Dv")
    value_zero: Any = tensor("*W Dw", optional=True)
    divided: Any = attribute()
    lanes: ClassVar[int] = NZ_INT8

    def written(self, p, *rows: Any):
        """Both writes of int8."""
        scales = ((self.key_scale, self.key_zero), (self.value_scale, self.value_zero))
        int8 = (
            p.int8_rows(x=new, scale=scale, zero=zero, divided=self.divided)
            for new, (scale, zero) in zip(rows, scales, strict=True)
        )
        return super().written(p, *map(p.reshaped, int8))

    def arguments(self, heads: int, width: int) -> dict[str, Tensor]:
        """Scales that rows are divided by, and offsets behind, [M, D] in float32."""
        given = {
            "k_scale": self._divisor(self.key_scale), "v_scale": self._divisor(self.value_scale),
            "k_offset": self.key_zero, "v_offset": self.value_zero,
        }  # fmt: skip
        return {name: _by_channel(each.float(), heads, width) for name, each in given.items() if each is not None}

    def _divisor(self, scale: Tensor) -> Tensor:
        return scale.float() if self.divided else scale.float().reciprocal()


def _by_channel(x: Tensor, heads: int, width: int) -> Tensor:
    """A number of each head and channel, of each of either, or of all, in any dims, as [M, D]."""
    if x.numel() == heads * width:
        return x.reshape(heads, width)
    lanes = x.shape[-1]
    whole = lanes in (1, width) and x.numel() in (lanes, heads * lanes)
    require(whole, "the scales are those of lines, not of heads, of channels or of all")
    return x.reshape(-1, lanes).expand(heads, width).contiguous()


def _in_lines(pages: Tensor) -> Tensor:
    require(
        pages.is_contiguous(),
        "the pages are not contiguous; the operator writes and reads them in place; allocate the cache contiguous",
    )
    *_, size, line = pages.shape
    return pages.reshape(pages.shape[0], -1, size, line)


# the rule ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normed(Group):
    """Gains of the norms of queries and keys, and how both are rotated."""

    q_gamma: Any = tensor("D")
    k_gamma: Any = tensor("D")
    q_eps: Any = scalar()
    k_eps: Any = scalar()
    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def terms(self, p, heads, order, tables, like):
        """Queries and keys, both rotated."""
        norms = ((self.q_gamma, self.q_eps), (self.k_gamma, self.k_eps))
        normed = (
            order.normed(p, each, partial(_norm, p, gamma, eps))
            for each, (gamma, eps) in zip(heads, norms, strict=True)
        )
        return [rotated_lanes(p, each, tables, self, like, order.heads_first) for each in normed]

    def guard(self, tables: TokenTables) -> None:
        """Refuse pairs, two epsilons, and norms of other lanes than those that are rotated."""
        require((self.source, self.result) == (HALF, HALF), "the lanes are not in half order")
        said = "queries are normalised with eps={q}, keys with {k}: the operator takes one"
        require(self.q_eps == self.k_eps, said, q=self.q_eps, k=self.k_eps)
        normed, turned = self.q_gamma.shape[0], tables.cos.shape[-1]
        said = "{normed} lanes are normalised, and {turned} rotated: the operator takes a head for both"
        require(normed == turned, said, normed=normed, turned=turned)


def _norm(p: Any, gamma: Any, eps: Any, x: Any) -> Any:
    return p.rms_norm(x=x, gamma=gamma, eps=eps)


@dataclass(frozen=True)
class QkvRmsNormRopeCache(Rule):
    """Norms and rotation of queries and keys, and the writes of keys and values."""

    aliases = ("qkv_write",)

    def reference(self, q: Tensor, k: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Both:
        """The meaning without the writes: heads [*B, D], tables that broadcast to them."""

        def turned(x: Tensor) -> Tensor:
            low, high = F.rms_norm(x, gamma.shape, gamma, eps).chunk(2, dim=-1)
            return torch.cat((low, high), dim=-1) * cos + torch.cat((-high, low), dim=-1) * sin

        return turned(q), turned(k)

    @pattern
    @variants(source=SOURCES, order=(PositionsFirst, HeadsFirst, RotatedHeadsFirst),
              storage=(GroupedPages, Int8GroupedPages))  # fmt: skip
    def written(self, p, source, order, storage, normed: Any = Normed, tables: Any = TokenTables):
        """Of the heads of each token."""
        *heads, v = source.heads(p)
        q, k = normed.terms(p, heads, order, tables, source.like())
        return q, *storage.written(p, order.stored(p, k), v)

    def guard(self, source: Any, normed: Normed, storage: GroupedPages, tables: TokenTables):
        """How the lanes are rotated, and how the pages lie."""
        normed.guard(tables)
        source.guard()
        storage.guard()

    @lowering
    def run(self, source: Any, order: Any, storage: GroupedPages, normed: Normed, tables: TokenTables):
        """One call."""
        tokens, width = storage.slots.shape[0], normed.q_gamma.shape[0]
        require(isinstance(tokens, int), "the operator is told the number of tokens, which is not known before")
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
        return order.restored(q.reshape(source.of_queries(width))), *storage.restored(keys, values)
