"""Values with the numbers that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.graph import Algebra, Value


def leaf(a: Algebra, name: str, *shape: int, seed: int = 0) -> tuple[Value, Tensor]:
    """An input, and random numbers for it."""
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a.make("input", (), (name,), shape, torch.float64), data
