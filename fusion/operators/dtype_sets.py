"""Sets of storage dtypes, and the dtype of computation: float32 for 16-bit floats, else the storage dtype."""

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
    """Return the dtype in which the kernels compute on `x`: float32 for 16-bit floats, else the dtype of `x`.

    So a graph that is widened to float64 computes in float64.
    """
    return torch.float32 if x.dtype in HALVES else x.dtype
