"""Layer norms written by hand, and what resembles one."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import tensors

EPS = 1e-5
X = tensors((5, 64))
X_WEIGHT_BIAS = tensors((2, 3, 64), (64,), (64,))


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return weight * (_centred(x) / torch.sqrt(variance + EPS)) + bias


def _in_float(x: Tensor, weight: Tensor) -> Tensor:
    d = _centred(x.float())
    return weight * (d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _plain(x: Tensor) -> Tensor:
    h = x.float()
    variance = h.square().mean(-1, keepdim=True) - h.mean(-1, keepdim=True).square()
    return (_centred(h) * torch.rsqrt(variance + EPS)).to(x.dtype)


def _variance(x: Tensor, unbiased: bool = False) -> Tensor:
    return x.var(-1, unbiased=unbiased, keepdim=True)


EXAMPLES = (
    Example("weight and bias", _affine, X_WEIGHT_BIAS),
    Example("weight alone, in float32", _in_float, tensors((2, 3, 64), (64,))),
    Example("neither, mean of squares minus square of mean", _plain, X),
)
REJECTS = (
    Example("negative eps", lambda x: _centred(x) / torch.sqrt(_variance(x) - EPS), X, "is not positive"),
    Example("unbiased variance", lambda x: _centred(x) / torch.sqrt(_variance(x, True) + EPS), X, "it is unbiased"),
    Example(
        "eps outside",
        lambda x: _centred(x) / (x.std(-1, unbiased=False, keepdim=True) + EPS),
        X,
        "is added to the standard deviation",
    ),
    Example(
        "eps outside, unbiased",
        lambda x: _centred(x) / (x.std(-1, keepdim=True) + EPS),
        X,
        "to an unbiased standard deviation",
    ),
    Example("not centred", lambda x: x * torch.rsqrt(_variance(x) + EPS), X, "is not the centred tensor"),
    Example(
        "second moment",
        lambda x: _centred(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
        X,
        "divided by the root of its second moment",
    ),
)

TRIED = {"layer_norm": (*EXAMPLES, *REJECTS)}
