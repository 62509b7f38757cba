"""Projections of one input, with weights that are Parameters; and those that must stay apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from fusion import Example
from tests.examples.inputs import tensors, with_parameters

X = (2, 3, 64)
QKV = with_parameters(X, (128, 64), (32, 64), (32, 64))
QKV_BIASED = with_parameters(X, (128, 64), (128,), (32, 64), (32,), (32, 64), (32,))
PAIR = with_parameters(X, (64, 64), (64, 64))
HALF_BIASED = with_parameters(X, (64, 64), (64,), (64, 64))
PAIR_BIASED = with_parameters(X, (64, 64), (64,), (64, 64), (64,))
FOUR = with_parameters(X, (64, 64), (32, 64), (16, 64), (8, 64))
PARTS = with_parameters(X, (3, 64, 64), (64, 64))
TWO_INPUTS = with_parameters(X, X, (64, 64), (64, 64), leading=2)


def apart(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Layers whose results are used on their own."""
    return tuple(linear(x, each).exp() for each in weights)


def biased(x: Tensor, *layers: Tensor) -> tuple[Tensor, ...]:
    """The same with a bias behind each weight."""
    return tuple(linear(x, weight, bias).exp() for weight, bias in zip(layers[::2], layers[1::2], strict=True))


def _heads(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(linear(x, each).unflatten(-1, (-1, 32)).transpose(1, 2).exp() for each in weights)


def _flat_heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return linear(x, q).view(-1, 32).exp(), *apart(x, k, v)


def _added_bias(x: Tensor, a: Tensor, a_bias: Tensor, b: Tensor, b_bias: Tensor) -> Tensor:
    return (x @ a.T + a_bias).exp() + (b_bias + x @ b.T).sin()


def _by_einsum(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bsk,nk->bsn", x, a).exp() + torch.einsum("nk,bsk->bsn", b, x).sin()


def _gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return silu(linear(x, gate)) * linear(x, up)


def _gated_in_float(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return (linear(x, up).float() * silu(linear(x, gate).float())).to(x.dtype)


def _gated_biased(x: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    g, u = linear(x, gate, gate_bias), linear(x, up, up_bias)
    return u * (g * torch.sigmoid(g))


NOT_PARAMETERS = "they are no Parameters of the module"
JOINED = (
    Example("queries, keys and values", apart, QKV),
    Example("with biases", biased, QKV_BIASED),
    Example("cut into heads", _heads, QKV),
    Example("one that is viewed as no part of a row can be", _flat_heads, QKV),
    Example("matmul", lambda x, a, b: (x @ a.T).exp() + torch.matmul(x, b.mT).sin(), PAIR),
    Example("einsum", _by_einsum, PAIR),
    Example("biases added", _added_bias, PAIR_BIASED),
    Example("weights as [in, out]", lambda x, a, b: (x @ a).exp() + (x @ b).sin(), PAIR),
    Example("four, over flat rows", lambda x, *weights: apart(x.reshape(-1, x.shape[-1]), *weights), FOUR),
    Example("weights cut from Parameters", lambda x, a, b: apart(x, a[0], b[:32]), PARTS),
    Example("weights that are inputs", apart, tensors(X, (128, 64), (32, 64), (32, 64)), NOT_PARAMETERS),
)
ONE_BIAS = "one of gate and up alone has one"
GATED = (
    Example("two projections", _gated, PAIR),
    Example("two projections in float32, up first", _gated_in_float, PAIR),
    Example("two projections with biases, silu written out", _gated_biased, PAIR_BIASED),
    Example("two projections by weights that are inputs", _gated, tensors(X, (64, 64), (64, 64)), NOT_PARAMETERS),
    Example("one bias", lambda x, gate, bias, up: silu(linear(x, gate, bias)) * linear(x, up), HALF_BIASED, ONE_BIAS),
    Example(
        "two inputs", lambda x, z, gate, up: silu(linear(x, gate)) * linear(z, up), TWO_INPUTS,
        "are projections of different inputs",
    ),
)  # fmt: skip


def up_key(w: Tensor) -> Tensor:
    """The part [N, D, C] of the up-projection of a latent that gives keys."""
    return w.view(4, -1, 64)[:, :32]


def up_value(w: Tensor) -> Tensor:
    """The part that gives values."""
    return w.view(4, -1, 64)[:, 32:]


def by_head(x: Tensor, w: Tensor) -> Tensor:
    """Heads first, side by side in the result."""
    return torch.bmm(x, up_key(w)).transpose(0, 1).reshape(6, -1).exp()


def _turned(y: Tensor, w: Tensor) -> Tensor:
    return (y.transpose(1, 2) @ up_value(w).mT).transpose(1, 2).flatten(2).exp()


def einsum(equation: str, part: Callable[[Tensor], Tensor] = lambda w: w) -> Callable[[Tensor, Tensor], Tensor]:
    """By einsum with a part of the weight."""
    return lambda x, w: torch.einsum(equation, x, part(w)).flatten(2).exp()


QUERIES, VALUES = (with_parameters((2, 3, 4, width), (256, 64)) for width in (32, 64))
HEADS = (
    Example("queries absorbed", einsum("bshd,hdc->bshc", up_key), QUERIES),
    Example("values of all heads", einsum("bshc,hdc->bshd", up_value), VALUES),
    Example("heads turned by hand", _turned, VALUES),
    Example("packed tokens", lambda x, w: by_head(x.flatten(0, 1).transpose(0, 1), w), QUERIES),
    Example("heads given first", by_head, with_parameters((4, 6, 32), (256, 64))),
    Example(
        "each sequence has its own matrices", einsum("bshd,bhdc->bshc"),
        with_parameters((2, 3, 4, 32), (2, 4, 32, 64)), "each sequence has matrices of its own",
    ),
)  # fmt: skip

TRIED = {"joined_projections": JOINED, "activation": GATED, "head_projection": HEADS}
