"""Gelu written out in primitive operators, and functions that resemble it."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import tensors

X = tensors((2, 3, 64))


def new(x: Tensor, factor: float = 0.044715) -> Tensor:
    """As GPT-2 has it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + factor * torch.pow(x, 3.0))))


def fast(x: Tensor) -> Tensor:
    """x taken out of the sum."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608028654 * (1.0 + 0.044715 * x * x)))


def with_erf(x: Tensor) -> Tensor:
    """As BERT has it."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def by_sigmoid(x: Tensor, slope: float = 1.702) -> Tensor:
    """As CLIP has it."""
    return x * torch.sigmoid(slope * x)


EXAMPLES = (
    Example("tanh of a cube", new, X),
    Example("tanh of products", fast, X),
    Example("widened", lambda x: new(x.float()).to(x.dtype), X),
    Example("erf", with_erf, X),
    Example("a sigmoid", by_sigmoid, X),
    Example("a sigmoid in float32", lambda x: by_sigmoid(x.float()).to(x.dtype), X),
    Example("a sigmoid of another slope", partial(by_sigmoid, slope=1.5), X, "x is multiplied by 1.5 in the sigmoid"),
    Example("another factor of the cube", partial(new, factor=0.04), X, "the argument of its tanh or erf is"),
)

TRIED = {"gelu": EXAMPLES}
