"""RMS norms as models write them, and what resembles one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import tensors

EPS = 1e-6
X = tensors((5, 64))
X_WEIGHT = tensors((2, 3, 64), (64,))
X_OTHER = tensors((2, 3, 64), (2, 3, 64))


def _root(x: Tensor, eps: float = EPS, dim: int = -1) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def _normed(x: Tensor, eps: float = EPS) -> Tensor:
    return (x.float() * _root(x.float(), eps)).to(x.dtype)


def _narrow(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return ((h * _root(h)) * (1.0 + weight.float())).type_as(x)


def _narrow_squares(x: Tensor, weight: Tensor) -> Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float32) + EPS)).to(x.dtype) * weight


def _eps_tensor(x: Tensor, eps: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps.abs())


EXAMPLES = (
    Example("weight after the cast", lambda x, weight: weight * _normed(x), X_WEIGHT),
    Example("gain 1 + weight", _gemma, X_WEIGHT),
    Example("product in the narrow dtype", lambda x, weight: _narrow(x) * weight, X_WEIGHT),
    Example("squares in the narrow dtype", _narrow_squares, X_WEIGHT),
    Example("no weight", lambda x: _normed(x, EPS), X),
    Example("no weight, product in the narrow dtype", _narrow, X),
)
OTHER = "is not the tensor whose mean square is under the root"
REJECTS = (
    Example("negative eps", lambda x: _normed(x, -EPS), X, "is not positive"),
    Example("damping", lambda x: _normed(x, 0.1), X, "is no guard against division by zero"),
    Example("statistics of another", lambda x, other: x * _root(other), X_OTHER, OTHER),
    Example("mean over tokens", lambda x: x * _root(x, dim=-2), X, "of x² over the last dim"),
    Example(
        "sum of squares",
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS),
        X,
        "the squares are summed, not averaged",
    ),
    Example(
        "eps on each square",
        lambda x: x * torch.rsqrt((x.pow(2) + EPS).sum(-1, keepdim=True)),
        X,
        "is added to each square",
    ),
    Example(
        "eps outside", lambda x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + EPS), X, "is added outside the root"
    ),
    Example("no eps", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), X, "the root holds no eps"),
    Example("eps as a tensor", _eps_tensor, tensors((5, 64), (1,)), "eps is a tensor"),
    Example(
        "absolute values", lambda x: x / (x.abs().mean(-1, keepdim=True) + EPS), X, "the mean is of absolute values"
    ),
    Example("clamped length", lambda x: F.normalize(x, dim=-1, eps=EPS), X, "clamped from below"),
)

TRIED = {"rms_norm": (*EXAMPLES, *REJECTS)}
