"""Dequantisation scales of int8 tensors, and their reciprocals, by which floats are multiplied to quantise them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusion import encodings, require

STATIC = encodings.INT8.per("channel")
"""int8 with scales of the model, of each channel, of each head or of all, which no token changes."""


def scale_of(scale: Tensor | None, by: float, device: torch.device) -> Tensor:
    """Return `scale` ([1], [heads] or [channels]) times `by` in float32; where `scale` is None, `by` alone [1]."""
    if scale is None:
        return torch.full((1,), by, dtype=torch.float32, device=device)
    return scale.float() if by == 1 else scale.float() * by


def multipliers(scale: Tensor | None, by: float, width: Any, device: torch.device) -> Tensor:
    """Compute the factors [width] in float32 that quantise rows [.., width]: 1 / (`scale` · `by`).

    The dequantisation scale `scale` is [1] or [width]; where it is None, the scale is the number `by`.
    """
    if scale is None:
        return torch.full((width,), 1 / by, dtype=torch.float32, device=device)
    return torch.reciprocal(scale_of(scale, by, device)).expand(width).contiguous()


def int8_zero_point(zero_point: Tensor | None, shift: float, device: torch.device, operator: str) -> Tensor:
    """Return the zero point [1] in int8: `zero_point`, or where that is None the number `shift`.

    Raises:
        Refused: `zero_point` has another dtype; `operator` is named.
    """
    if zero_point is None:
        return torch.full((1,), int(shift), dtype=torch.int8, device=device)
    reason = "zero point: it is {dtype}, and so not proven to be a whole number; {operator} requires int8"
    require(zero_point.dtype == torch.int8, reason, dtype=zero_point.dtype, operator=operator)
    return zero_point


def exact_scale(scale: Tensor | None, by: float, like: Tensor, operator: str) -> Tensor:
    """Return `scale`, or where `scale` is None the number `by` as a tensor [1], in the dtype of `like`, for `operator`.

    Raises:
        Refused: the dtype of `like` rounds `by`; or `scale` has another dtype or is multiplied by `by` ≠ 1.
    """
    if scale is None:
        ulps = math.frexp(by)[0] * 2 / torch.finfo(like.dtype).eps
        require(
            abs(ulps - round(ulps)) < 1e-9,
            "scale: it is {by}, which the dtype of x rounds; {operator} requires a scale that is exact in "
            "the dtype of x; choose such a number (a power of two), or pass a tensor in the dtype of x",
            by=by,
            operator=operator,
        )
        return torch.full((1,), by, dtype=like.dtype, device=like.device)
    same = scale.dtype == like.dtype and by == 1
    require(
        same,
        "scale: it is {dtype}, or multiplied by a number; {operator} requires it in the dtype of x, as it "
        "is; store it in the dtype of x",
        dtype=scale.dtype,
        operator=operator,
    )
    return scale
