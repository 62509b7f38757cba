"""Caches as pages: contiguous caches cut into pages, pages in NZ, and the slots of tokens.

BSND [Block, Size, 1, D]        NZ [Block, .., D / L, Size, L], L = 16 lanes of two bytes, 32 of one
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion import encodings, require

SIZES = (128, 64, 32, 16)
"""Page sizes for a contiguous cache, in order of preference: the first that divides its length is taken."""
NZ = 16
"""Lanes in a line of NZ (32 bytes) of 2-byte dtypes; stored numbers have `Encoding.line` lanes."""
BLOCKS = (4, 8, NZ, encodings.INT8.line, 64)
"""Lanes of a line that readers recognise in models; lines of other than 32 bytes are refused with a reason."""


def line_of(dtype: torch.dtype) -> int:
    """Return how many lanes of a cache in `dtype` a line of NZ has."""
    encoding = encodings.encoding_of(dtype)
    return NZ if encoding is None else encoding.line


def sequences(cache: Any, start: Any, axis: int) -> Any:
    """Count the sequences of `cache` that a write along `axis` changes: one for each entry of `start` [B], else all.

    A cache whose positions are dim 0 has one sequence.
    """
    if start.shape:
        return start.shape[0]
    return cache.shape[0] if axis else 1


def single_head(cache: Tensor, axis: int, operator: str) -> Tensor:
    """Return `cache` [B, .., T, .., D], T along `axis`; refuse several heads, and gaps in its memory.

    Reasons name `operator`.
    """
    others = [each for place, each in enumerate(cache.shape[:-1]) if place not in (0, axis)]
    require(
        all(each == 1 for each in others),
        "cache: it has several heads, which pages of it would alias; {operator} requires [.., T, .., D] "
        "of one head; allocate a cache for each head, or pages [Block, Size, N, D]",
        operator=operator,
    )
    require(
        cache.is_contiguous(),
        "cache: it is not contiguous, as a slice or a transposed tensor is not; {operator} requires "
        "contiguous memory to read it as pages; allocate it contiguous",
        operator=operator,
    )
    return cache


def cut(cache: Tensor, axis: int, operator: str) -> Tensor:
    """View a contiguous cache [B, .., T, .., D] of one head, T along `axis`, as pages [Block, Size, 1, D].

    Reasons name `operator`.
    """
    cache = single_head(cache, axis, operator)
    size: Any = cache.shape[axis]
    page = next((each for each in SIZES if isinstance(size, int) and size % each == 0), 0)
    require(
        page,
        "cache: it has {size} positions, which no page of 16, 32, 64 or 128 divides; {operator} "
        "requires whole pages; allocate a multiple of 16",
        size=size,
        operator=operator,
    )
    return cache.reshape(-1, page, 1, cache.shape[-1])


def in_rows(pages: Tensor, block: Any, operator: str) -> Tensor:
    """View contiguous `pages` of one head as [Block, Size, 1, D] for `operator`.

    With `block` lanes of a line, `pages` [Block, .., A, Size, L] are in NZ and their memory is reinterpreted as is;
    None stands for pages in rows.
    """
    require(
        pages.is_contiguous(),
        "cache: its pages are not contiguous; {operator} writes and reads them in place and requires "
        "contiguous ones; allocate the cache contiguous",
        operator=operator,
    )
    return pages.reshape(pages.shape[0], pages.shape[1 if block is None else -2], 1, -1)


def refuse_others(block: Any, operator: str, lanes: int = NZ) -> None:
    """Refuse lines of `block` lanes other than `lanes`, those of `operator`; None stands for pages in rows."""
    reason = (
        "cache: its pages are [.., Size, {line}], read as lines of {line} lanes; {operator} requires "
        "lines of {lanes}; in NZ allocate [Block, D / {lanes}, Size, {lanes}], else rows [Block, Size, N, "
        "D]"
    )
    require(block in (None, lanes), reason, line=block, lanes=lanes, operator=operator)


def slots(start: Any, batch: Any, rows: Any, size: Any, device: torch.device) -> Tensor:
    """Return the slots [B, S] of S = `rows` tokens of each of `batch` sequences, -1 for tokens beyond position `size`.

    Sequence b has the slots b · size, .., (b + 1) · size - 1; `start` is the position of its first token: a number,
    [] or [B].
    """
    # Looked up in a constant, which is computed once, rather than computed with comparisons at every call.
    places = torch.arange(batch * size, device=device).reshape(batch, size)
    table = torch.cat((places, torch.full((batch, rows), -1, device=device)), dim=1)
    if not isinstance(start, Tensor):
        return table[:, start : start + rows]
    first = start.clamp(max=size).reshape(-1, 1)
    index = first if rows == 1 else first + torch.arange(rows, device=device)
    return table.index_select(1, index.reshape(-1)) if index.shape[0] == 1 else table.gather(1, index)


def page_operand(pages: Tensor, size: Any, operator: str, layout: str = "BSND", heads: Any = 1) -> Tensor:
    """Reshape `pages` of `size` rows and `heads` heads to the dims that `operator` takes, without a copy.

    Refuse pages that are not contiguous.

    [Block, Size, N · D] for the layout "BSND", [Block, N, Size, D] for "BNSD", [Block, N, D / L, Size, L] for "NZ".
    """
    what = "lines of the pages" if layout == "NZ" else "pages"
    reason = (
        "cache: the {what} are not contiguous; {operator} reads them in place and requires contiguous ones, "
        "as a copy would be of the whole cache; allocate them contiguous"
    )
    require(pages.is_contiguous(), reason, what=what, operator=operator)
    dims = {"BSND": (size, -1), "BNSD": (heads, size, -1), "NZ": (heads, -1, size, pages.shape[-1])}
    return pages.reshape(pages.shape[0], *dims[layout])
