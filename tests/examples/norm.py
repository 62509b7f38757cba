"""RMS norms and layer norms as models write them, and what resembles one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, rsqrt, sqrt

from fusion import Example
from tests.examples.inputs import tensors

EPS, LAYER_EPS = 1e-6, 1e-5
X = tensors((5, 64))
X_WEIGHT = tensors((2, 3, 64), (64,))
X_OTHER = tensors((2, 3, 64), (2, 3, 64))
X_WEIGHT_BIAS = tensors((2, 3, 64), (64,), (64,))


def mean(x: Tensor, dim: int = -1) -> Tensor:
    """Along one dim, which is kept."""
    return x.mean(dim, keepdim=True)


def total(x: Tensor) -> Tensor:
    """The sum over lanes, a dim of which is kept."""
    return x.sum(-1, keepdim=True)


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


OTHER = "the tensor that is multiplied by"
SUMMED = "under the root, as a sum of squares has"
RMS = (
    Example("weight after the cast", lambda x, gain: gain * cast_twice(x), X_WEIGHT),
    Example("gain 1 + weight", lambda x, gain: (unit(x.float()) * (1.0 + gain.float())).type_as(x), X_WEIGHT),
    Example("product in the narrow dtype", lambda x, gain: narrow(x) * gain, X_WEIGHT),
    Example("squares in the narrow dtype", narrow_squares, X_WEIGHT),
    Example("no weight", cast_twice, X),
    Example("no weight, product in the narrow dtype", narrow, X),
    Example("negative eps", lambda x: cast_twice(x, -EPS), X, "requires a positive number"),
    Example("damping", lambda x: cast_twice(x, 0.1), X, "so that it damps rather"),
    Example("statistics of another", lambda x, other: x * rsqrt(mean(other.pow(2)) + EPS), X_OTHER, OTHER),
    Example("mean over tokens", lambda x: x * rsqrt(mean(x.pow(2), -2) + EPS), X, "of x² over the last dim"),
    Example("sum of squares", lambda x: x * rsqrt(total(x.pow(2)) + EPS), X),
    Example("sum of squares in float32", lambda x: (x.float() * rsqrt(total(x.float().pow(2)) + EPS)).to(x.dtype), X),
    Example("sum of squares, product in the narrow dtype", lambda x: x * rsqrt(total(x.float() ** 2) + EPS).to(x), X),
    Example("unbiased variance of what is centred", lambda x: _centred(x) / sqrt(_variance(x, True) + LAYER_EPS), X),
    Example("sum of squares of another", lambda x, other: x * rsqrt(total(other.pow(2)) + EPS), X_OTHER, SUMMED),
    Example("damped sum", lambda x: x * rsqrt(total(x.pow(2)) + 64 * 0.1), X, "so that it damps rather"),
    Example("sum less", lambda x: x * rsqrt(EPS - total(x.pow(2))), X, "is multiplied by -64"),
    Example(
        "eps on each square", lambda x: x * rsqrt((x.pow(2) + EPS).sum(-1, keepdim=True)), X, "is added to each square"
    ),
    Example("eps outside", lambda x: x / (mean(x.pow(2)).sqrt() + EPS), X, "is added outside the root"),
    Example("no eps", lambda x: x * rsqrt(mean(x.pow(2))), X, "there is none under the root"),
    Example(
        "eps as a tensor", lambda x, eps: x * rsqrt(mean(x.pow(2)) + eps.abs()), tensors((5, 64), (1,)),
        "it is a tensor",
    ),
    Example("clamped square", lambda x: x * rsqrt(mean(x.pow(2)).clamp(min=EPS)), X, "it is clamped from below"),
    Example("unbiased", lambda x: x * rsqrt(x.var(-1, keepdim=True) + mean(x).square() + EPS), X, "it is unbiased"),
    Example("absolute values", lambda x: x / (mean(x.abs()) + EPS), X, "it is of absolute values"),
    Example("clamped length", lambda x: F.normalize(x, dim=-1, eps=EPS), X, "clamped from below"),
)  # fmt: skip


def _centred(x: Tensor) -> Tensor:
    return x - mean(x)


def _variance(x: Tensor, unbiased: bool = False) -> Tensor:
    return x.var(-1, unbiased=unbiased, keepdim=True)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * (_centred(x) / sqrt(_variance(x) + LAYER_EPS)) + bias


def _in_float(x: Tensor, weight: Tensor) -> Tensor:
    d = _centred(x.float())
    return weight * (d * rsqrt(mean(d.pow(2)) + LAYER_EPS)).to(x.dtype)


def _plain(x: Tensor) -> Tensor:
    h = x.float()
    return (_centred(h) * rsqrt(mean(h.square()) - mean(h).square() + LAYER_EPS)).to(x.dtype)


def _one_more(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A gain 1 + weight, all in float32."""
    d = _centred(x.float())
    return (d * rsqrt(mean(d.pow(2)) + LAYER_EPS) * (weight.float() + 1) + bias.float()).to(x.dtype)


def _whole(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Whole numbers, cast to floats and back."""
    h = _centred(x.float())
    return (h * rsqrt(mean(h.square()) + LAYER_EPS) * weight.float() + bias.float()).to(x.dtype)


OUTSIDE, UNBIASED = "is added to the standard deviation", "to an unbiased standard deviation"
SECOND = "divided by the root of its second moment"
LAYER = (
    Example("weight and bias", _affine, X_WEIGHT_BIAS),
    Example("weight alone, in float32", _in_float, tensors((2, 3, 64), (64,))),
    Example("neither, mean of squares minus square of mean", _plain, X),
    Example("a gain 1 + weight, in float32", _one_more, X_WEIGHT_BIAS),
    Example("whole numbers", _whole, tensors((torch.arange(384) * 7 % 19).view(2, 3, 64), (64,), (64,))),
    Example("negative eps", lambda x: _centred(x) / sqrt(_variance(x) - LAYER_EPS), X, "requires a positive number"),
    Example(
        "unbiased variance, a weight between",
        lambda x, w: w * _centred(x) / sqrt(_variance(x, True) + LAYER_EPS),
        X_WEIGHT,
        "it is unbiased",
    ),
    Example("eps outside", lambda x: _centred(x) / (x.std(-1, unbiased=False, keepdim=True) + LAYER_EPS), X, OUTSIDE),
    Example("eps outside, unbiased", lambda x: _centred(x) / (x.std(-1, keepdim=True) + LAYER_EPS), X, UNBIASED),
    Example(
        "not centred",
        lambda x: x * rsqrt(_variance(x) + LAYER_EPS),
        X,
        "what is divided by the root of the variance",
    ),
    Example("second moment", lambda x: _centred(x) * rsqrt(mean(x.pow(2)) + LAYER_EPS), X, SECOND),
)

TRIED = {"rms_norm": RMS, "layer_norm": LAYER}
