"""Estimated multiplications and additions of fused calls, for costs; symbolic sizes count as in the traced call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint


def product(x: Tensor, columns: Any) -> float:
    """Estimate the operations of multiplying `x` [.., K] by a matrix [K, `columns`], or by one such matrix per head."""
    return 2.0 * count(x) * hint(columns)


def products(rows: Any, *weights: Tensor) -> float:
    """Estimate the operations of multiplying `rows` rows by each of `weights`; int8 weights count half, because a chip
    multiplies int8 twice as fast."""
    return 2.0 * hint(rows) * sum(count(each) / (2 if each.dtype == torch.int8 else 1) for each in weights)


def scores(pairs: float, width: Any) -> float:
    """Estimate the operations of attention over `pairs` pairs of a query and a key; `width` is the number of lanes of a
    key plus those of a value."""
    return 2.0 * pairs * hint(width)


def unlisted(rows: Tensor | None, lists: float) -> float:
    """Return how many bytes of `rows` [.., D] stay unread if lists name at most `lists` rows; 0 if `rows` is None."""
    if rows is None:
        return 0.0
    there = count(rows) / hint(rows.shape[-1])
    return max(0.0, there - lists) * hint(rows.shape[-1]) * rows.element_size()


def causal(rows: Any, keys: Any) -> float:
    """Return how many of `keys` keys each of `rows` rows sees on average under a lower-right causal mask."""
    seen, queries = hint(keys), hint(rows)
    return seen - (queries - 1) / 2 if queries <= seen else seen * (seen + 1) / 2 / queries


def number_of(lengths: Sequence[Any] | Tensor) -> int:
    """Count `lengths`; the hint of a tensor's size is taken, because `len` would specialise a symbolic size."""
    return hint(lengths.shape[0]) if isinstance(lengths, Tensor) else len(lengths)


def longest(lengths: Any, room: Any) -> int:
    """Return the largest of `lengths`, at most `room`; return `room` if `lengths` is a tensor or None."""
    if lengths is None or isinstance(lengths, Tensor) or not isinstance(lengths, Sequence):
        return hint(room)
    return min(max((hint(each) for each in lengths), default=0), hint(room))
