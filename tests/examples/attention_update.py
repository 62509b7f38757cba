"""Merges of attention over parts of the keys, as models write them, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, normal, tensors

T, N, D = 5, 4, 16
Merge = Callable[..., Tensor]


def parts(count: int, turned: bool = False) -> Inputs:
    """Outputs [T, N, D] and log-sum-exps [T, N] in float32, or [N, T], `count` of each."""
    sums = (2 * normal(9 + seed, T, N).float() for seed in range(count))
    return tensors(*count * ((T, N, D),), *(each.T.contiguous() if turned else each for each in sums))


def stacked(merge: Callable[[Tensor, Tensor], Tensor]) -> Merge:
    """Three parts, merged from their sums [3, T, N] and outputs [3, T, N, D]."""
    return lambda x, y, z, *sums: merge(torch.stack(sums), torch.stack((x, y, z))).to(x.dtype)


def pair(x: Tensor, y: Tensor, a: Tensor, b: Tensor, total: Callable[..., Tensor] = torch.logaddexp) -> Tensor:
    """Two parts, weighed in float32 by exponentials of what their sums are below a total of both."""
    both = total(a, b)
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


def rounded(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two parts, with weights in the dtype of the parts."""
    both = torch.logaddexp(a, b)
    old, new = ((each - both).exp().unsqueeze(-1).to(x.dtype) for each in (a, b))
    return x * old + y * new


def gated(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A gate, and what it leaves."""
    share = a.sigmoid().unsqueeze(-1)
    return (share * x.float() + (1 - share) * y.float()).to(x.dtype)


OF_ALL = stacked(lambda sums, outs: ((sums - sums.logsumexp(0)).exp().unsqueeze(-1) * outs.float()).sum(0))
SOFTMAX = stacked(lambda sums, outs: (sums.softmax(0).unsqueeze(-1) * outs).sum(0))
PRODUCT = stacked(lambda sums, outs: torch.einsum("ptn,ptnd->tnd", sums.softmax(0), outs.float()))
EXAMPLES = (
    Example("log-sum-exp of all", OF_ALL, parts(3)),
    Example("softmax", SOFTMAX, parts(3)),
    Example("two", pair, parts(2)),
    Example("below a maximum", below_maximum, parts(2)),
    Example("sigmoid", sigmoid, parts(2)),
    Example("one by one", one_by_one, parts(3)),
    Example("heads before tokens", heads_first, parts(2, turned=True)),
    Example("rounded weights", rounded, parts(2)),
    Example("one product", PRODUCT, parts(3)),
    Example(
        "undivided",
        lambda x, *of: pair(x, *of, total=torch.maximum).to(x.dtype),
        parts(2),
        "they are not exp(lseᵢ - lse) with lse =",
    ),
    Example("a gate", gated, parts(2), "the weights of the parts are computed from"),
)

TRIED = {"attention_update": EXAMPLES}
