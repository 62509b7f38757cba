"""RMS norms as models write them, and what resembles one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, rsqrt

from fusion import Example
from patterns.examples.inputs import tensors

EPS = 1e-6
X = tensors((5, 64))
X_WEIGHT = tensors((2, 3, 64), (64,))
X_OTHER = tensors((2, 3, 64), (2, 3, 64))


def mean(x: Tensor, dim: int = -1) -> Tensor:
    """Along one dim, which is kept."""
    return x.mean(dim, keepdim=True)


def unit(x: Tensor, eps: float = EPS) -> Tensor:
    """X / sqrt(mean(x²) + eps)."""
    return x * rsqrt(mean(x.pow(2)) + eps)


def cast_twice(x: Tensor, eps: float = EPS) -> Tensor:
    """The same in float32, the tensor and what is under the root cast apart."""
    return (x.float() * rsqrt(mean(x.float().pow(2)) + eps)).to(x.dtype)


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm in float32, its gain behind the cast."""
    return gain * unit(x.float()).to(x.dtype)


def narrow(x: Tensor) -> Tensor:
    """The product in the narrow dtype."""
    return x * rsqrt(mean(x.float().square()) + EPS).to(x.dtype)


def narrow_squares(x: Tensor, gain: Tensor) -> Tensor:
    """Squares in the narrow dtype."""
    return (x * rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float32) + EPS)).to(x.dtype) * gain


EXAMPLES = (
    Example("weight after the cast", lambda x, gain: gain * cast_twice(x), X_WEIGHT),
    Example("gain 1 + weight", lambda x, gain: (unit(x.float()) * (1.0 + gain.float())).type_as(x), X_WEIGHT),
    Example("product in the narrow dtype", lambda x, gain: narrow(x) * gain, X_WEIGHT),
    Example("squares in the narrow dtype", narrow_squares, X_WEIGHT),
    Example("no weight", cast_twice, X),
    Example("no weight, product in the narrow dtype", narrow, X),
)
OTHER = "is not the tensor whose mean square is under the root"
SUMMED = "the squares are summed, not averaged"
REJECTS = (
    Example("negative eps", lambda x: cast_twice(x, -EPS), X, "is not positive"),
    Example("damping", lambda x: cast_twice(x, 0.1), X, "is no guard against division by zero"),
    Example("statistics of another", lambda x, other: x * rsqrt(mean(other.pow(2)) + EPS), X_OTHER, OTHER),
    Example("mean over tokens", lambda x: x * rsqrt(mean(x.pow(2), -2) + EPS), X, "of x² over the last dim"),
    Example("sum of squares", lambda x: x * rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS), X, SUMMED),
    Example(
        "eps on each square", lambda x: x * rsqrt((x.pow(2) + EPS).sum(-1, keepdim=True)), X, "is added to each square"
    ),
    Example("eps outside", lambda x: x / (mean(x.pow(2)).sqrt() + EPS), X, "is added outside the root"),
    Example("no eps", lambda x: x * rsqrt(mean(x.pow(2))), X, "the root holds no eps"),
    Example(
        "eps as a tensor", lambda x, eps: x * rsqrt(mean(x.pow(2)) + eps.abs()), tensors((5, 64), (1,)),
        "eps is a tensor",
    ),
    Example("absolute values", lambda x: x / (mean(x.abs()) + EPS), X, "the mean is of absolute values"),
    Example("clamped length", lambda x: F.normalize(x, dim=-1, eps=EPS), X, "clamped from below"),
)  # fmt: skip

TRIED = {"rms_norm": (*EXAMPLES, *REJECTS)}
