"""Merges of attention over parts of the keys, as models write them, and what only looks like one."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal

T, N, D = 5, 4, 16


def parts(count: int) -> Inputs:
    """Outputs [T, N, D] and log-sum-exps [T, N] in float32, `count` of each."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        outs = (normal(seed, T, N, D).to(dtype) for seed in range(count))
        return *outs, *(2 * normal(9 + seed, T, N).float() for seed in range(count))

    return make


def stacked(x: Tensor, y: Tensor, z: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Three parts, through the log-sum-exp of all."""
    sums = torch.stack((a, b, c))
    weights = (sums - sums.logsumexp(0)).exp()
    return (weights.unsqueeze(-1) * torch.stack((x, y, z)).float()).sum(0).to(x.dtype)


def shares(x: Tensor, y: Tensor, z: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Three parts, through a softmax."""
    weights = torch.stack((a, b, c)).softmax(0).unsqueeze(-1)
    return (weights * torch.stack((x, y, z))).sum(0).to(x.dtype)


def pair(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two parts, in float32."""
    both = torch.logaddexp(a, b)
    return (a - both).exp().unsqueeze(-1) * x.float() + (b - both).exp().unsqueeze(-1) * y.float()


def below_maximum(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two parts, divided at the end."""
    top = torch.maximum(a, b)
    old, new = ((each - top).exp().unsqueeze(-1) for each in (a, b))
    return ((x.float() * old + y.float() * new) / (old + new)).to(x.dtype)


def sigmoid(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two parts, through the difference of their sums."""
    x, y, a, b = x.float(), y.float(), a.unsqueeze(-1), b.unsqueeze(-1)
    return x - torch.sigmoid(b - a) * (x - y)


def one_by_one(x: Tensor, y: Tensor, z: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A merge of two parts, merged with a third."""
    both = torch.logaddexp(a, b)
    first = (a - both).exp().unsqueeze(-1) * x + (b - both).exp().unsqueeze(-1) * y
    every = torch.logaddexp(both, c)
    return ((both - every).exp().unsqueeze(-1) * first + (c - every).exp().unsqueeze(-1) * z).to(x.dtype)


def heads_first(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two parts whose sums have heads before tokens."""
    top = torch.maximum(a, b)
    old, new = (a - top).exp(), (b - top).exp()
    old, new = ((each / (old + new)).transpose(0, 1).unsqueeze(-1) for each in (old, new))
    return (x * old + y * new).to(x.dtype)


def turned(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two parts, their sums [N, T]."""
    *outs, a, b = parts(2)(dtype)
    return *outs, a.T.contiguous(), b.T.contiguous()


def rounded(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two parts, with weights in the dtype of the parts."""
    both = torch.logaddexp(a, b)
    old, new = ((each - both).exp().unsqueeze(-1).to(x.dtype) for each in (a, b))
    return x * old + y * new


def contracted(x: Tensor, y: Tensor, z: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Three parts, by one product."""
    weights = torch.stack((a, b, c)).softmax(0)
    return torch.einsum("ptn,ptnd->tnd", weights, torch.stack((x, y, z)).float()).to(x.dtype)


def undivided(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Weights that do not add up to one."""
    top = torch.maximum(a, b)
    return ((a - top).exp().unsqueeze(-1) * x.float() + (b - top).exp().unsqueeze(-1) * y.float()).to(x.dtype)


def gated(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A gate, and what it leaves."""
    share = a.sigmoid().unsqueeze(-1)
    return (share * x.float() + (1 - share) * y.float()).to(x.dtype)


EXAMPLES = (
    Example("log-sum-exp of all", stacked, parts(3)),
    Example("softmax", shares, parts(3)),
    Example("two", pair, parts(2)),
    Example("below a maximum", below_maximum, parts(2)),
    Example("sigmoid", sigmoid, parts(2)),
    Example("one by one", one_by_one, parts(3)),
    Example("heads before tokens", heads_first, turned),
    Example("rounded weights", rounded, parts(2)),
    Example("one product", contracted, parts(3)),
)
REJECTS = (
    Example("undivided", undivided, parts(2), "not shares of one"),
    Example("a gate", gated, parts(2), "log-sum-exps of the parts are not in the graph"),
)

TRIED = {"attention_update": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
