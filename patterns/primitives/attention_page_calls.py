"""How attention over pages is put to the operators: pages as they lie, the block table, lengths, rows that see nothing.

A sequence that sees no key gives 0 in the operator. Where plain attention gives the mean of all values, its queries
become 0 and see all keys, which is the same; where it gives NaN, so does the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import require
from patterns.primitives import attention_calls as calls


@dataclass(frozen=True)
class Table:
    """Which pages the sequences have, [B, M], how many keys a page holds, and how many are there of all, T ≤ M · Size.

    What the table says beyond the length of a sequence is not read.
    """

    blocks: Tensor
    size: Any
    keys: Any

    def arguments(self) -> dict[str, Any]:
        """As the operator is told."""
        return dict(block_table=self.blocks.int(), block_size=self.size)


def laid(pages: Tensor, size: Any, lies: str = "rows", heads: Any = 1) -> Tensor:
    """Pages of `size` rows of `heads` as an operator is told that they lie, in the words of `paged_rows`.

    [Block, Size, N · D] for "rows", [Block, N, Size, D] for "heads", [Block, N, D / L, Size, L] for "lines".
    """
    what = "lines of the pages" if lies == "lines" else "pages"
    together = "the {what} do not lie together, so that reading them in place would copy them all"
    require(pages.is_contiguous(), together, what=what)
    dims = {"rows": (size, -1), "heads": (heads, size, -1), "lines": (heads, -1, size, pages.shape[-1])}
    return pages.reshape(pages.shape[0], *dims[lies])


def lengths(seen: calls.Seen, q: Tensor, table: Table) -> tuple[calls.Seen, Any]:
    """What is seen, counted from the last key, and how many keys each sequence has: numbers, or a tensor."""
    if seen.length is not None:
        return seen, seen.length
    queries: Any = q.shape[2]
    count = queries if seen.order == "left" else table.keys if seen.known is None else seen.known
    short = isinstance(count, int) and isinstance(table.keys, int) and count > table.keys
    require(not short, "there are fewer keys than queries, which stand in line from the first on")
    batch: Any = q.shape[0]
    many = [count] * batch if isinstance(batch, int) else torch.full((batch,), count, device=q.device)
    return replace(seen, order="right" if seen.order == "left" else seen.order), many


def batched(
    q: Tensor, k: Tensor, v: Tensor, seen: calls.Seen, table: Table, version: int = 2, mask: Tensor | None = None,
    **arguments: Any,
) -> Tensor:  # fmt: skip
    """Queries [B, N, S, D] of one sequence beside the other; the result [B, N, S, E]."""
    seen, many = lengths(seen, q, table)
    queries = q.shape[2]
    told = seen.arguments(q.device, queries) if mask is None else dict(sparse_mode=1, **calls.shown(mask, queries))
    last = calls.heads_last(q) and k.dim() == 3
    y, _ = calls.fused(
        q.transpose(1, 2) if last else q, k, v, many, version, num_query_heads=q.shape[1],
        input_layout="BSND" if last else "BNSD", **told, **table.arguments(), **arguments,
    )  # fmt: skip
    return y.transpose(1, 2) if last else y


def packed(
    q: Tensor, k: Tensor, v: Tensor, seen: calls.Seen, table: Table, version: int = 2, **arguments: Any
) -> Tensor:
    """The same for queries of one sequence after the other."""
    batch: Any = q.shape[0]
    queries: Any = q.shape[2]
    seen, many = lengths(seen, q, table)
    ends = calls.ends_of(batch, queries, q.device, beside=many)
    y, _ = calls.fused(
        q.transpose(1, 2).flatten(0, 1), k, v, many, version, num_query_heads=q.shape[1], actual_seq_qlen=ends,
        input_layout="TND", **seen.arguments(q.device, queries), **table.arguments(), **arguments,
    )  # fmt: skip
    return y.unflatten(0, (batch, queries)).transpose(1, 2)


def given_some(q: Tensor, length: Tensor, keys: Any, empty: str) -> tuple[Tensor, Tensor]:
    """Queries [B, N, S, D] and lengths [B] for which a sequence without keys gives the mean of all values."""
    if empty != "mean":
        return q, length
    nothing = length <= 0
    return q.masked_fill(nothing.reshape(-1, 1, 1, 1), 0), length.masked_fill(nothing, keys)


def shown_some(q: Tensor, mask: Tensor, empty: str) -> tuple[Tensor, Tensor]:
    """The same for a mask [B | 1, 1, S, T], true where a key is hidden."""
    if empty != "mean":
        return q, mask
    nothing = mask.all(-1, keepdim=True)
    return q.masked_fill(nothing, 0), mask & ~nothing


def wide(mask: Tensor, table: Table, batch: Any) -> Tensor:
    """The mask for all places of the pages [B, 1, S, M · Size]."""
    room = table.blocks.shape[1] * table.size
    mask = mask.expand(batch, -1, -1, -1)
    return mask if room == table.keys else torch.nn.functional.pad(mask, (0, room - table.keys), value=True)
