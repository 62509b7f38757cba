"""How attention of few queries over a latent is put to atb: pages, lengths, masks of fixed shape.

Rows, AnyPages    as attention has them, pages in one facet for BSND and NZ
PagesInOrder      pages in NZ, in their own order, as many for each sequence
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import MaskSpec, Parts
from patterns.attention.sources import Rows
from patterns.attention.varlen.pages import PagesNZ
from patterns.cache import pages

HIDDEN = -10000.0
"""What is added to the score of a hidden key: its weight is 0."""
ROWS = 4
"""The most queries of a sequence."""


@dataclass(frozen=True)
class AnyPages(PagesNZ):
    """Pages that a block table names, BSND or in NZ."""

    layout: Any = attribute()

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse whole rows too."""
        require(self.layout == "NZ", "the pages do not hold rows in lines of NZ")
        super().refuse_blocks(*widths)


@dataclass(frozen=True)
class PagesInOrder(Group):
    """Pages in NZ, in their own order, as many for each sequence."""

    first: Any = tensor("Blocks A Size L")
    second: Any = tensor("Blocks R Size M")

    def latent_terms(self, p):
        """The latent and its rotated lanes."""
        return [p.reshaped(p.permuted(each, (0, 2, 1, 3))) for each in (self.first, self.second)]

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse blocks of NZ of other widths."""
        for each, width in zip((self.first, self.second), widths, strict=True):
            pages.refuse_others(each.shape[-1], width)

    def read(self, batch: Any) -> list[Tensor]:
        """Both, of which each sequence has as many."""
        both, blocks = [self.first, self.second], self.first.shape[0]
        require(all(each.is_contiguous() for each in both), "the lines of the pages do not lie together")
        shared = isinstance(blocks, int) and isinstance(batch, int) and blocks % batch != 0
        require(not shared, "{blocks} pages are not as many for each of {batch} sequences", blocks=blocks, batch=batch)
        return both

    def keys(self, batch: Any) -> Any:
        """How many keys each sequence has."""
        return self.first.shape[0] * self.first.shape[2] // batch


@dataclass(frozen=True)
class Call:
    """What is attended to: pages of a latent and its rotated lanes, how they lie, which each sequence has; scales.

    Attributes:
        size: how many rows a page has.
        scale, scales: the factor of all scores; those of int8 queries and of an int8 latent.
    """

    latents: Tensor
    ropes: Tensor
    mode: str
    size: Any
    table: Tensor
    scale: float
    scales: dict[str, Tensor]


def call_of(source: Any, batch: Any, scale: float, scales: dict[str, Tensor]) -> Call:
    """Pages in NZ [Block, D / L, Size, L], or as [Block, Size, 1, D]."""
    both = source.read(batch)
    if isinstance(source, Rows):
        both, mode = [pages.cut(each, 1) for each in both], "krope_ctkv"
    elif isinstance(source, AnyPages) and source.layout != "NZ":
        both, mode = [each.reshape(each.shape[0], source.size, 1, -1) for each in both], "krope_ctkv"
    else:
        both, mode = [each.flatten(1, -3) for each in both], "int8_nzcache" if scales else "nzcache"
    latents, ropes = both
    if isinstance(source, AnyPages):
        table = source.block_table.int()
    else:
        table = torch.arange(latents.shape[0], dtype=torch.int32, device=latents.device).reshape(batch, -1)
    size = latents.shape[1 if mode == "krope_ctkv" else 2]
    return Call(latents, ropes, mode, size, table, scale, scales)


def structured(q: Parts, call: Call, keys: Any, seen: MaskSpec) -> Tensor:
    """Attention [B, S, N, C] over so many keys, of which lengths and an order tell which are seen."""
    batch, _, queries = q[0].shape[:3]
    rows: dict[str, Any] = {}
    if queries > 1:
        rows = dict(calc_type="calc_type_spec", qseqlen=[queries] * batch)
        if seen.kind != "none":
            rows |= dict(mask_type="mask_type_free", mask=_free(queries, call.size, q[1]))
    seen = seen.from_last(queries, keys)
    return attended(q, call, [seen.kv_len] * batch if seen.kv_lens is None else seen.kv_lens, rows)


def _free(queries: int, size: int, like: Tensor) -> Tensor:
    """The mask of fixed shape for so many queries, [Size - 3 + 2 · queries, Size]."""
    shape = (size - 3 + 2 * queries, size)
    return torch.full(shape, HIDDEN, dtype=like.dtype, device=like.device).triu(2 - queries)


def dense(q: Parts, call: Call, mask: Tensor) -> Parts:
    """Attention [B, S, N, C] under a mask [B | 1, 1, S, T], true where a key is hidden; queries without keys [B, S]."""
    batch, _, queries = q[0].shape[:3]
    keys: Any = mask.shape[-1]
    hidden = mask.expand(batch, 1, queries, keys).reshape(batch * queries, keys)
    added = torch.zeros(hidden.shape, dtype=q[1].dtype, device=q[1].device).masked_fill(hidden, HIDDEN)
    rows = dict(calc_type="calc_type_spec", qseqlen=[queries] * batch, mask_type="mask_type_spec", mask=added)
    return attended(q, call, [keys] * batch, rows), hidden.all(-1).reshape(batch, queries)


def attended(q: Parts, call: Call, context: Any, rows: dict[str, Any]) -> Any:
    """Attention over pages, [B, S, N, C]; with `return_lse` also its log-sum-exp [B, S, N, 1]."""
    batch, heads, queries = q[0].shape[:3]
    operator = torch.ops.atb.npu_multi_head_latent_attention
    run = operator.lse if "return_lse" in rows else operator.default
    run = operator.tensor_lengths if isinstance(context, Tensor) else run
    query, rope = (each.transpose(1, 2).flatten(0, 1) for each in q)
    how, rows_of = dict(cache_mode=call.mode, **rows, **call.scales), (batch, queries)
    y = run(query, rope, call.latents, call.ropes, call.table, context, heads, call.scale, 1, **how)
    return tuple(each.unflatten(0, rows_of) for each in y) if isinstance(y, tuple) else y.unflatten(0, rows_of)
