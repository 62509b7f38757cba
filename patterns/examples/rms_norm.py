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


def _normed(x: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    return weight * _normed(x.float()).to(x.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    return (_normed(x.float()) * (1.0 + weight.float())).type_as(x)


def _narrow(x: Tensor, weight: Tensor) -> Tensor:
    root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return x * root.to(x.dtype) * weight


def _narrow_squares(x: Tensor, weight: Tensor) -> Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float32) + EPS)).to(x.dtype) * weight


def _narrow_without_weight(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


def _without_weight(x: Tensor) -> Tensor:
    return _normed(x.float()).to(x.dtype)


def _negative(x: Tensor) -> Tensor:
    return _normed(x.float(), -EPS).to(x.dtype)


def _damped(x: Tensor) -> Tensor:
    return _normed(x.float(), 0.1).to(x.dtype)


def _of_another(x: Tensor, other: Tensor) -> Tensor:
    return x * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + EPS)


def _over_tokens(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + EPS)


def _summed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def _eps_on_squares(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x.pow(2) + EPS).sum(-1, keepdim=True))


def _eps_outside(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + EPS)


def _no_eps(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def _eps_tensor(x: Tensor, eps: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps.abs())


def _absolute(x: Tensor) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + EPS)


def _clamped(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=EPS)


EXAMPLES = (
    Example("weight after the cast", _llama, X_WEIGHT),
    Example("gain 1 + weight", _gemma, X_WEIGHT),
    Example("product in the narrow dtype", _narrow, X_WEIGHT),
    Example("squares in the narrow dtype", _narrow_squares, X_WEIGHT),
    Example("no weight", _without_weight, X),
    Example("no weight, product in the narrow dtype", _narrow_without_weight, X),
)
REJECTS = (
    Example("negative eps", _negative, X, "is not positive"),
    Example("damping", _damped, X, "is no guard against division by zero"),
    Example("statistics of another", _of_another, X_OTHER, "is not the tensor whose mean square is under the root"),
    Example("mean over tokens", _over_tokens, X, "of x² over the last dim"),
    Example("sum of squares", _summed, X, "the squares are summed, not averaged"),
    Example("eps on each square", _eps_on_squares, X, "is added to each square"),
    Example("eps outside", _eps_outside, X, "is added outside the root"),
    Example("no eps", _no_eps, X, "the root holds no eps"),
    Example("eps as a tensor", _eps_tensor, tensors((5, 64), (1,)), "eps is a tensor"),
    Example("absolute values", _absolute, X, "the mean is of absolute values"),
    Example("clamped length", _clamped, X, "clamped from below"),
)

TRIED = {"rms_norm": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
