"""Calls of atb's npu_multi_head_latent_attention: operands in pages, lengths, masks of fixed shape.

Rows            rows of the latent, as in other attention
AnyPages        pages of a block table, in BSND or NZ
PagesInOrder    pages in NZ without a block table, equally many for each sequence, one sequence after the other
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import MaskSpec, Parts, each_length
from patterns.attention.sources import Rows
from patterns.attention.varlen.pages import PagesNZ
from patterns.cache import pages

_OPERATOR = "npu_multi_head_latent_attention"
HIDDEN = -10000.0
"""Addend of the score of a hidden key, whose weight becomes 0."""
ROWS = 4
"""Largest number of queries of a sequence."""


@dataclass(frozen=True)
class AnyPages(PagesNZ):
    """Pages of a block table, in BSND or NZ."""

    layout: Any = attribute()

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Refuse pages in BSND, and NZ blocks of other than `widths` lanes."""
        require(
            self.layout == "NZ",
            "cache: its pages are rows [Block, Size, 1, D]; npu_multi_head_latent_attention requires lines of "
            "NZ for int8; allocate [Block, D / 32, Size, 32] for the latent, [Block, Dr / 16, Size, 16] for "
            "rotated keys",
        )
        super().refuse_blocks(operator, *widths)


@dataclass(frozen=True)
class PagesInOrder(Group):
    """Pages of a latent, and of its rotated lanes, in NZ, for an operator without a block table.

    There are equally many for each sequence, one sequence after the other.
    """

    first: Any = tensor("Blocks A Size L")
    second: Any = tensor("Blocks R Size M")

    def latent_terms(self, p):
        """Build the terms of the latent and of its rotated lanes as rows."""
        return [p.reshaped(p.permuted(each, (0, 2, 1, 3))) for each in (self.first, self.second)]

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Refuse NZ blocks of other than `widths` lanes, of the latent and of the rotated lanes."""
        for each, width in zip((self.first, self.second), widths, strict=True):
            pages.refuse_others(each.shape[-1], operator, width)

    def read(self, batch: Any) -> list[Tensor]:
        """Return the pages of the latent and of the rotated lanes; refuse strided ones, and other than a multiple of
        `batch`.
        """
        both, blocks = [self.first, self.second], self.first.shape[0]
        require(
            all(each.is_contiguous() for each in both),
            "cache: its pages are not contiguous; npu_multi_head_latent_attention reads them in place and "
            "requires contiguous ones; allocate the cache contiguous",
        )
        shared = isinstance(blocks, int) and isinstance(batch, int) and blocks % batch != 0
        require(
            not shared,
            "cache: {blocks} pages are not the same number for each of {batch} sequences; "
            "npu_multi_head_latent_attention requires the same number, or a block table",
            blocks=blocks,
            batch=batch,
        )
        return both

    def keys(self, batch: Any) -> Any:
        """Count the keys of each of `batch` sequences."""
        return self.first.shape[0] * self.first.shape[2] // batch


@dataclass(frozen=True)
class Call:
    """Operands of npu_multi_head_latent_attention but for queries and mask: pages of a latent, and scales.

    Attributes:
        latents, ropes: pages of the latent and of its rotated lanes.
        mode: the layout of the pages, as the argument cache_mode.
        size: rows of a page.
        table: block table [B, pages of a sequence], int32.
        scale: factor of all scores.
        scales: arguments for the scales of int8 queries and of an int8 latent, by name; empty for floats.
    """

    latents: Tensor
    ropes: Tensor
    mode: str
    size: Any
    table: Tensor
    scale: float
    scales: dict[str, Tensor]


def call_of(source: Any, batch: Any, scale: float, scales: dict[str, Tensor]) -> Call:
    """Return the operands for the keys of `source`: pages in NZ [Block, D / L, Size, L], or [Block, Size, 1, D].

    Rows are cut into pages. Without a block table, each of `batch` sequences has consecutive pages. `scale` is the
    factor of the scores, `scales` are arguments for int8, {} for floats.
    """
    is_paged = isinstance(source, AnyPages)
    both = source.read(batch, operator=_OPERATOR) if is_paged else source.read(batch)
    if isinstance(source, Rows):
        both, mode = [pages.cut(each, 1, _OPERATOR) for each in both], "krope_ctkv"
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
    """Compute attention [B, S, N, C] over `keys` keys of each sequence, with the mask `seen` as lengths and a causal
    order.

    `q` are the absorbed queries [B, S, N, C] and their rotated lanes; `call` has the pages and scales.
    """
    batch, _, queries = q[0].shape[:3]
    options: dict[str, Any] = {}
    if queries > 1:
        options = dict(calc_type="calc_type_spec", qseqlen=[queries] * batch)
        if seen.kind != "none":
            options |= dict(mask_type="mask_type_free", mask=_free(queries, call.size, q[1]))
    seen = seen.from_last(queries, keys)
    return attended(q, call, each_length(seen, q[0]), options)


def _free(queries: int, size: int, like: Tensor) -> Tensor:
    """Build the additive mask of mask_type_free, [`size` - 3 + 2 · `queries`, `size`], in the dtype and on the device
    of `like`.

    `size` is the number of rows of a page, `queries` that of the queries of a sequence. Row r hides the positions of a
    page from r + 2 - `queries` on: the operator reads it from the row of the last token of the context, see `_bias` of
    the operator's decomposition.
    """
    shape = (size - 3 + 2 * queries, size)
    return torch.full(shape, HIDDEN, dtype=like.dtype, device=like.device).triu(2 - queries)


def dense(q: Parts, call: Call, mask: Tensor) -> Parts:
    """Compute attention [B, S, N, C] of `q` behind `mask` [B | 1, 1, S, T], true where a key is hidden.

    `call` has the pages and scales.

    Returns:
        The result, and a bool tensor [B, S] that is true for queries without keys.
    """
    batch, _, queries = q[0].shape[:3]
    keys: Any = mask.shape[-1]
    hidden = mask.expand(batch, 1, queries, keys).reshape(batch * queries, keys)
    added = torch.zeros(hidden.shape, dtype=q[1].dtype, device=q[1].device).masked_fill(hidden, HIDDEN)
    options = dict(calc_type="calc_type_spec", qseqlen=[queries] * batch, mask_type="mask_type_spec", mask=added)
    return attended(q, call, [keys] * batch, options), hidden.all(-1).reshape(batch, queries)


def attended(q: Parts, call: Call, context: Any, options: dict[str, Any]) -> Any:
    """Call npu_multi_head_latent_attention on queries `q`; return the result [B, S, N, C].

    With `return_lse` among the `options` it returns the log-sum-exp [B, S, N, 1] as well. `context` holds the number of
    keys of each sequence, as a list or a tensor [B].
    """
    batch, heads, queries = q[0].shape[:3]
    operator = torch.ops.atb.npu_multi_head_latent_attention
    run = operator.lse if "return_lse" in options else operator.default
    run = operator.tensor_lengths if isinstance(context, Tensor) else run
    query, rope = (each.transpose(1, 2).flatten(0, 1) for each in q)
    arguments, leading = dict(cache_mode=call.mode, **options, **call.scales), (batch, queries)
    y = run(query, rope, call.latents, call.ropes, call.table, context, heads, call.scale, 1, **arguments)
    return tuple(each.unflatten(0, leading) for each in y) if isinstance(y, tuple) else y.unflatten(0, leading)
