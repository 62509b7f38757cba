"""Which keys queries see, as models compute it: booleans that broadcast to [B, N, S, T]."""

from __future__ import annotations

import torch
from torch import Tensor


def causal(queries: int, keys: int, at: Tensor | int = 0) -> Tensor:
    """Keys [S, T] that stand at or before each query, the first of which stands at `at`."""
    return torch.arange(keys)[None, :] <= (torch.arange(queries) + at)[:, None]


def below(lengths: Tensor, keys: int) -> Tensor:
    """Keys [B, 1, 1, T] below the length of each sequence."""
    return (torch.arange(keys) < lengths[:, None])[:, None, None]


def behind(lengths: Tensor, keys: int) -> Tensor:
    """All others."""
    return (torch.arange(keys) >= lengths[:, None])[:, None, None]


def last(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Keys [B, 1, S, T] at or before each of the last queries of sequences so long."""
    return torch.arange(keys) <= lengths[:, None, None, None] - queries + torch.arange(queries)[:, None]


def later(position: Tensor, queries: int, keys: int) -> Tensor:
    """Keys [B, 1, S, T] behind each of several queries, the first at `position`."""
    return torch.arange(keys) > position[:, None, None, None] + torch.arange(queries)[:, None]


def added(hidden: Tensor, dtype: torch.dtype, fill: float = -torch.inf) -> Tensor:
    """What is added to scores: 0 where a key is seen."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, fill)


def lowest(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The same with the least number."""
    return added(hidden, dtype, torch.finfo(dtype).min)
