"""Storage and compute dtypes: 16-bit floats are computed in float32, wider ones in themselves."""

from __future__ import annotations

import torch

HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALVES | {torch.float32}


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which the kernels compute on `x`; float64 stays float64, so that a widened graph loses nothing."""
    return torch.float32 if x.dtype in HALVES else x.dtype
