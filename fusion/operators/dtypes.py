"""Storage and compute dtypes: 16-bit floats are computed in float32, wider ones in themselves."""

from __future__ import annotations

import torch

HALVES = frozenset({torch.float16, torch.bfloat16})
BFLOAT16 = frozenset({torch.bfloat16})
FLOAT16 = frozenset({torch.float16})
FLOAT32 = frozenset({torch.float32})
FLOATS = HALVES | FLOAT32
INT8 = frozenset({torch.int8})
INT32 = frozenset({torch.int32})
INT64 = frozenset({torch.int64})


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which the kernels compute on `x`; float64 stays float64, so that a widened graph loses nothing."""
    return torch.float32 if x.dtype in HALVES else x.dtype
