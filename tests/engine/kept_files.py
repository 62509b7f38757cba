"""A graph whose plans and outcome are kept, and the end of a process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from fusion.caching import text_cache

from .graphs import norm

HIDDEN = 32


def block(x: Tensor, w: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    h = norm(x, w)
    return silu(h @ gate) * (h @ up), h.amax(-1)


def inputs(rows: int = 3) -> tuple[Tensor, ...]:
    return torch.rand(rows, HIDDEN), torch.rand(HIDDEN), torch.rand(HIDDEN, 8), torch.rand(HIDDEN, 8)


def later() -> None:
    """Forget what is in memory, as a process that ends does."""
    text_cache._text_cache.cache_clear()
