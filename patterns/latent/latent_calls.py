"""How attention over a latent is put to the operators: lengths, places in a cache, and values of all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion import require

PAGES = (128, 64, 32, 16)
"""Sizes of pages as which a contiguous cache is read, the first that divides it."""


LINE, WHOLE_LINE = 16, 32
"""How many numbers of two bytes, and of one, a line of NZ holds."""


def attended(p, q, kv, up, rows=None, **seen):
    """The term of attention of queries (nope, rope, absorbed) over a latent and its rope, projected by `up`."""
    queries, keys, values = operands(p, q, kv, up, rows)
    return p.softmax_attention(q=queries, k=keys, v=values, **seen)


def operands(p, q, kv, up, rows):
    """The terms of its queries, keys and values."""
    (nope, rope, absorbed), (latent, k_rope), (up_key, up_value) = q, kv, up
    return (
        p.latent_queries(nope=nope, rope=rope, absorbed=absorbed),
        p.latent_keys(latent=latent, rope=k_rope, up=up_key, rows=rows),
        p.latent_values(latent=latent, up=up_value),
    )


def gathered(p, latent, k_rope, pages, rope_pages, table, size, lies):
    """The terms of a latent and its rotated lanes as rows of pages."""
    both = ((latent, pages), (k_rope, rope_pages))
    return [p.reshaped(p.paged_rows(rows=x, pages=of, table=table, size=size, lies=lies)) for x, of in both]


def written(p, caches, rows, slots, *lines):
    """The terms of writes of rows to pages of their caches, at the same slots; in `lines`, one of all or of each."""
    of_each = lines if len(lines) > 1 else lines * len(caches)
    return [
        p.write_pages(cache=cache, rows=p.reshaped(row), slots=slots, line=line)
        for cache, row, line in zip(caches, rows, of_each, strict=True)
    ]


def sequences(cache: Any, start: Any, axis: int) -> Any:
    """How many sequences of a cache rows are written to along `axis`: those that have a start, or all."""
    if start.shape:
        return start.shape[0]
    return cache.shape[0] if axis else 1


def of_one_head(cache: Tensor, axis: int) -> Tensor:
    """A contiguous cache [B, .., T, .., D], T along `axis`, whose other dims have size 1."""
    others = [each for place, each in enumerate(cache.shape[:-1]) if place not in (0, axis)]
    require(all(each == 1 for each in others), "the cache holds several heads: as pages they would alias each other")
    require(cache.is_contiguous(), "the cache is not contiguous, so that it cannot be read as pages")
    return cache


def pages(cache: Tensor, axis: int) -> Tensor:
    """A contiguous cache [B, .., T, .., D] of one head as pages [Block, Size, 1, D], T along `axis`."""
    cache = of_one_head(cache, axis)
    size: Any = cache.shape[axis]
    page = next((each for each in PAGES if isinstance(size, int) and size % each == 0), 0)
    require(page, "the cache holds {size} positions, which no size of a page divides", size=size)
    return cache.reshape(-1, page, 1, cache.shape[-1])


def per_token(table: Tensor, batch: Any, rows: Any) -> Tensor:
    """A table [B or 1, S or 1, D], of tokens that the caller may have packed otherwise, as [batch, rows, D]."""
    first, second = table.shape[:2]
    if (first, second) == (1, 1) or not all(isinstance(each, int) for each in (batch, rows, first, second)):
        return table.expand(batch, rows, table.shape[-1])
    tokens = batch * rows
    first, second = (tokens // second, second) if first == 1 else (first, tokens // first)
    return table.expand(first, second, table.shape[-1]).reshape(batch, rows, -1)


def of_tokens(table: Tensor, tokens: Tensor) -> Tensor:
    """A table as [B, S, D] for tokens [B, S, H], or as [T, D] for those without their sequences, [T, H]."""
    batch, rows = tokens.shape[:2] if tokens.dim() == 3 else (1, tokens.shape[0])
    return per_token(table, batch, rows).reshape(*tokens.shape[:-1], table.shape[-1])


def heads_before(query: Tensor) -> Tensor:
    """Heads [B, S, N, C] before their positions; those of tokens without sequences, [T, N, C], as they are."""
    return query.transpose(1, 2) if query.dim() == 4 else query


def in_rows(pages: Tensor, line: Any) -> Tensor:
    """Pages of one head as [Block, Size, 1, D]: those in lines of NZ [Block, .., A, Size, L] are the same memory."""
    require(pages.is_contiguous(), "the pages are not contiguous")
    size = pages.shape[1] if line is None else pages.shape[-2]
    return pages.reshape(pages.shape[0], size, 1, -1)


def into_pages(caches: tuple[Tensor, Tensor], slots: Tensor, line: Any, tokens: Tensor) -> tuple[Any, dict[str, Any]]:
    """Caches as the prolog writes them, and how it is told where the rows of `tokens` [.., H] go."""
    mode = "PA_BSND" if line is None else "PA_NZ"
    index = slots.to(torch.int64).reshape(tokens.shape[:-1])
    return tuple(in_rows(each, line) for each in caches), dict(cache_mode=mode, cache_index=index)


def of_pages(cache: Any, slots: Any, line: Any, lanes: int = LINE) -> None:
    """Refuse writes to pages whose slots are not proven, or that hold rows of several heads, or in other lines."""
    require(slots is not None, "the place is not proven to lie in its page: slot % Size is")
    of_line(line, lanes)
    require(line is not None or all(size == 1 for size in cache.shape[2:-1]), "the pages hold several heads")


def of_line(line: Any, lanes: int = LINE) -> None:
    """Refuse lines that are not those of NZ; None stands for whole rows."""
    require(
        line in (None, lanes), "the pages hold rows in lines of {line} numbers, not of {lanes}", line=line, lanes=lanes
    )


def slots(start: Any, batch: Any, rows: Any, size: Any, device: torch.device) -> Tensor:
    """Where `rows` tokens of every sequence go among all places of the pages, [B, S]; -1 for what is beyond the end.

    `start` is one position or one for each sequence. The table of all places is a constant, made once.
    """
    places = torch.arange(batch * size, device=device).reshape(batch, size)
    table = torch.cat((places, torch.full((batch, rows), -1, device=device)), dim=1)
    if not isinstance(start, Tensor):
        return table[:, start : start + rows]
    first = start.clamp(max=size).reshape(-1, 1)
    index = first if rows == 1 else first + torch.arange(rows, device=device)
    return table.index_select(1, index.reshape(-1)) if index.shape[0] == 1 else table.gather(1, index)


def absorbed(nope: Tensor | None, up: Tensor | None) -> Tensor:
    """Queries nope [B, N, S, D] of every head times up [N, D, C], as [B, N, S, C], heads behind positions in memory."""
    require(nope is not None and up is not None, "the model itself absorbs the projection of the keys")
    assert nope is not None
    assert up is not None
    return turned(nope.transpose(1, 2), up).transpose(1, 2)


def expanded(y: Tensor, up: Tensor | None, values: str) -> Tensor:
    """y [B, S, N, C] of every head times up [N, C, E], as [B, N, S, E]; y itself without `up`.

    `values` is "transposed" for the operator that turns heads back, "heads first" for the same where heads lie first in
    memory, or "multiplied" for a batched product.
    """
    if values == "multiplied":
        return by_matmul(y, up)
    return by_transpose(y, up, heads_first=values == "heads first")


def turned(x: Tensor, weight: Tensor, heads_first: bool = False) -> Tensor:
    """x [B, S, N, K] times weight [N, K, M], as [B, S, N, M]; x may lie in memory as [N, B, S, K]."""
    read = x.permute(2, 0, 1, 3).flatten(1, 2) if heads_first else x.flatten(0, 1)
    rows = torch.ops.npu.npu_transpose_batchmatmul(
        read, weight.contiguous(), perm_x1=[0, 1, 2] if heads_first else [1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    return rows.unflatten(0, x.shape[:2])


def by_transpose(y: Tensor, up: Tensor | None, heads_first: bool = False) -> Tensor:
    """y [B, S, N, C] of every head times up [N, C, E], as [B, N, S, E], by the operator that turns heads back."""
    require(up is not None, "the model itself expands the result")
    assert up is not None
    return turned(y, up, heads_first).transpose(1, 2)


def by_matmul(y: Tensor, up: Tensor | None) -> Tensor:
    """The same by a batched product, for sizes that the other operator does not take; y itself without `up`."""
    if up is None:
        return y.transpose(1, 2)
    rows = torch.bmm(y.flatten(0, 1).transpose(0, 1), up.contiguous())
    return rows.unflatten(1, y.shape[:2]).transpose(0, 1)
