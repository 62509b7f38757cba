"""Scales of a latent in int8: those that give it back, and those that it is multiplied by before."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusion import require


def scale_of(scale: Tensor | None, by: float, device: torch.device) -> Tensor:
    """A scale [1], or one of each head or channel, times the number `by`, in float32; without a tensor the number."""
    if scale is None:
        return torch.full((1,), by, dtype=torch.float32, device=device)
    return scale.float() if by == 1 else scale.float() * by


def multipliers(scale: Tensor | None, by: float, width: Any, device: torch.device) -> Tensor:
    """What rows [.., width] are multiplied by to become whole numbers, [width], of a scale that gives them back.

    The scale is [1], [width], or missing, times the number `by`.
    """
    if scale is None:
        return torch.full((width,), 1 / by, dtype=torch.float32, device=device)
    return torch.reciprocal(scale_of(scale, by, device)).expand(width).contiguous()


def exact_scale(scale: Tensor | None, by: float, like: Tensor) -> Tensor:
    """The scale [1] in the dtype of `like`, which must hold it as it is."""
    if scale is None:
        lanes = math.frexp(by)[0] * 2 / torch.finfo(like.dtype).eps
        require(abs(lanes - round(lanes)) < 1e-9, "the dtype of x does not hold the scale {by} as it is", by=by)
        return torch.full((1,), by, dtype=like.dtype, device=like.device)
    same = scale.dtype == like.dtype and by == 1
    require(same, "a scale of {dtype} is not one in the dtype of x, as the operator takes it", dtype=scale.dtype)
    return scale
