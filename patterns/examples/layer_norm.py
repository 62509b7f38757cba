"""Layer norms written by hand, and what resembles one."""

from __future__ import annotations

from torch import Tensor, rsqrt, sqrt

from fusion import Example
from patterns.examples.inputs import tensors
from patterns.examples.rms_norm import mean

EPS = 1e-5
X = tensors((5, 64))
X_WEIGHT_BIAS = tensors((2, 3, 64), (64,), (64,))


def _centred(x: Tensor) -> Tensor:
    return x - mean(x)


def _variance(x: Tensor, unbiased: bool = False) -> Tensor:
    return x.var(-1, unbiased=unbiased, keepdim=True)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * (_centred(x) / sqrt(_variance(x) + EPS)) + bias


def _in_float(x: Tensor, weight: Tensor) -> Tensor:
    d = _centred(x.float())
    return weight * (d * rsqrt(mean(d.pow(2)) + EPS)).to(x.dtype)


def _plain(x: Tensor) -> Tensor:
    h = x.float()
    return (_centred(h) * rsqrt(mean(h.square()) - mean(h).square() + EPS)).to(x.dtype)


EXAMPLES = (
    Example("weight and bias", _affine, X_WEIGHT_BIAS),
    Example("weight alone, in float32", _in_float, tensors((2, 3, 64), (64,))),
    Example("neither, mean of squares minus square of mean", _plain, X),
)
OUTSIDE, UNBIASED = "is added to the standard deviation", "to an unbiased standard deviation"
SECOND = "divided by the root of its second moment"
REJECTS = (
    Example("negative eps", lambda x: _centred(x) / sqrt(_variance(x) - EPS), X, "is not positive"),
    Example("unbiased variance", lambda x: _centred(x) / sqrt(_variance(x, True) + EPS), X, "it is unbiased"),
    Example("eps outside", lambda x: _centred(x) / (x.std(-1, unbiased=False, keepdim=True) + EPS), X, OUTSIDE),
    Example("eps outside, unbiased", lambda x: _centred(x) / (x.std(-1, keepdim=True) + EPS), X, UNBIASED),
    Example("not centred", lambda x: x * rsqrt(_variance(x) + EPS), X, "is not the centred tensor"),
    Example("second moment", lambda x: _centred(x) * rsqrt(mean(x.pow(2)) + EPS), X, SECOND),
)

TRIED = {"layer_norm": (*EXAMPLES, *REJECTS)}
