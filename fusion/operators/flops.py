"""Multiplications and additions of fused calls, for sizes of the example where they are symbolic: what costs count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint


def product(x: Tensor, columns: Any) -> float:
    """x [.., K] times a matrix [K, columns], or one of each head."""
    return 2.0 * count(x) * hint(columns)


def products(rows: Any, *weights: Tensor) -> float:
    """So many rows times each of the weights, of which those in int8 are multiplied twice as fast as others."""
    return 2.0 * hint(rows) * sum(count(each) / (2 if each.dtype == torch.int8 else 1) for each in weights)


def scores(pairs: float, width: Any) -> float:
    """So many pairs of a query and a key, each a score and its part of a sum, of so many lanes together."""
    return 2.0 * pairs * hint(width)


def unlisted(rows: Tensor | None, lists: float) -> float:
    """Bytes of rows [.., D] that so many entries of lists cannot name."""
    if rows is None:
        return 0.0
    there = count(rows) / hint(rows.shape[-1])
    return max(0.0, there - lists) * hint(rows.shape[-1]) * rows.element_size()


def causal(rows: Any, keys: Any) -> float:
    """How many keys a row sees on average if the last of them sees all, and every row before it one less."""
    seen, of = hint(keys), hint(rows)
    return seen - (of - 1) / 2 if of <= seen else seen * (seen + 1) / 2 / of


def number_of(lengths: Sequence[Any] | Tensor) -> int:
    """How many lengths there are: `len` of a tensor would make its symbolic size a number."""
    return hint(lengths.shape[0]) if isinstance(lengths, Tensor) else len(lengths)


def longest(lengths: Any, room: Any) -> int:
    """The largest of lengths that are known as numbers, at most `room`, which counts where they are not."""
    if lengths is None or isinstance(lengths, Tensor) or not isinstance(lengths, Sequence):
        return hint(room)
    return min(max((hint(each) for each in lengths), default=0), hint(room))
