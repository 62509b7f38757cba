"""Small rules of a third party, for tests of the engine: none of them is part of the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor


@dataclass(frozen=True)
class DoubleExp(Rule):
    """exp(x)·2, which `npu_swiglu` has nothing to do with: a stand-in that is easy to count."""

    @pattern
    def written(self, p, x=tensor("*B D"), factor=scalar()):
        """A scaled exponential."""
        return p.scale(p.op("exp", x), factor)

    def guard(self, factor):
        """Only 2."""
        require(factor == 2, "the factor is {factor}, not 2", factor=factor)

    @lowering
    def plain(self, x: Tensor):
        """As it was, in one call less."""
        return torch.ops.aten.exp2(x)


@dataclass(frozen=True)
class WrongNorm(Rule):
    """A norm whose lowering forgets the weight: what verification is for."""

    @pattern
    def written(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """y · gamma."""
        h = p.maybe_cast(x, to=torch.float32)
        y = h * p.rsqrt(p.mean(p.square(h)) + eps)
        return p.as_dtype(p.maybe_cast(y, to=x) * gamma, like=x)

    @lowering
    def npu(self, x: Tensor, gamma: Tensor, eps: float):
        """The weight is forgotten."""
        return torch.ops.npu.npu_rms_norm(x, torch.ones_like(gamma), eps)[0]


@dataclass(frozen=True)
class WrongShape(WrongNorm):
    """A lowering that gives another shape than what it replaces."""

    @lowering
    def npu(self, x: Tensor, gamma: Tensor, eps: float):
        """The first dim exchanged with the second."""
        return torch.ops.npu.npu_rms_norm(x, gamma, eps)[0].transpose(0, 1)


@dataclass(frozen=True)
class NotTurned(Rule):
    """An exponential that is turned, whose lowering forgets to turn it."""

    @pattern
    def written(self, p, x=tensor("B D")):
        """exp(x)ᵀ."""
        return p.permuted(p.op("exp", x), (1, 0))

    @lowering
    def plain(self, x: Tensor):
        """As many numbers, in rows of another length."""
        return torch.ops.aten.exp2(x)


@dataclass(frozen=True)
class Scores(Rule):
    """(x·a) + (x·b) with a pinned cast, an attribute and several results."""

    @pattern
    def written(self, p, x=tensor("*B D"), a=tensor("D"), b=tensor("D"), dims=attribute()):
        """The products' sum, and its mean."""
        s = p.maybe_cast(x * a, to=torch.float32) + p.maybe_cast(x * b, to=torch.float32)
        return s, p.mean(s, dims)

    @lookalike("the two factors are the same", apart=("x", "a"))
    def same(self, p, x=tensor("*B D"), a=tensor("D")):
        """x·a alone."""
        return x * a

    @lowering
    def plain(self, x: Tensor, a: Tensor, b: Tensor):
        """One product."""
        s = torch.ops.aten.mul(x, a + b)
        return s, torch.ops.aten.mean(s, -1, True)
