"""Projections of one input, with weights that are Parameters; and those that must stay apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import tensors, with_parameters

X = (2, 3, 64)
QKV = with_parameters(X, (128, 64), (32, 64), (32, 64))
QKV_BIASED = with_parameters(X, (128, 64), (128,), (32, 64), (32,), (32, 64), (32,))
PAIR = with_parameters(X, (64, 64), (64, 64))
HALF_BIASED = with_parameters(X, (64, 64), (64,), (64, 64))
PAIR_BIASED = with_parameters(X, (64, 64), (64,), (64, 64), (64,))


def _qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q).exp(), F.linear(x, k).exp(), F.linear(x, v).exp()


def _qkv_biased(
    x: Tensor, q: Tensor, q_bias: Tensor, k: Tensor, k_bias: Tensor, v: Tensor, v_bias: Tensor
) -> tuple[Tensor, ...]:
    return F.linear(x, q, q_bias).exp(), F.linear(x, k, k_bias).exp(), F.linear(x, v, v_bias).exp()


def _heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (F.linear(x, each).unflatten(-1, (-1, 32)).transpose(1, 2) for each in (q, k, v))
    return q.exp(), k.exp(), v.exp()


def _by_matmul(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a.T).exp() + torch.matmul(x, b.mT).sin()


def _by_einsum(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bsk,nk->bsn", x, a).exp() + torch.einsum("nk,bsk->bsn", b, x).sin()


def _added_bias(x: Tensor, a: Tensor, a_bias: Tensor, b: Tensor, b_bias: Tensor) -> Tensor:
    return (x @ a.T + a_bias).exp() + (b_bias + x @ b.T).sin()


def _not_transposed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a).exp() + (x @ b).sin()


def _flat_heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q).view(-1, 32).exp(), F.linear(x, k).exp(), F.linear(x, v).exp()


def _four(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    y = x.reshape(-1, x.shape[-1])
    return tuple(F.linear(y, each).exp() for each in (a, b, c, d))


def _from_parameters(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, a[0]).exp(), F.linear(x, b[:32]).exp()


def _gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _gated_in_float(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return (F.linear(x, up).float() * F.silu(F.linear(x, gate).float())).to(x.dtype)


def _gated_biased(x: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    g, u = F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)
    return u * (g * torch.sigmoid(g))


def _gated_half_biased(x: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up)


def _gated_two_inputs(x: Tensor, z: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(z, up)


def _absorbed(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bshd,hdc->bshc", x, w.view(4, -1, 64)[:, :32]).flatten(2).exp()


def _values_up(y: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bshc,hdc->bshd", y, w.view(4, -1, 64)[:, 32:]).flatten(2).exp()


def _turned_by_hand(y: Tensor, w: Tensor) -> Tensor:
    return (y.transpose(1, 2) @ w.view(4, -1, 64)[:, 32:].mT).transpose(1, 2).flatten(2).exp()


def _packed(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x.flatten(0, 1).transpose(0, 1), w.view(4, -1, 64)[:, :32]).transpose(0, 1).reshape(6, -1).exp()


def _heads_given_first(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x, w.view(4, -1, 64)[:, :32]).transpose(0, 1).reshape(6, -1).exp()


def _own_of_each_sequence(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bshd,bhdc->bshc", x, w).flatten(2).exp()


EXAMPLES = (
    Example("queries, keys and values", _qkv, QKV),
    Example("with biases", _qkv_biased, QKV_BIASED),
    Example("cut into heads", _heads, QKV),
    Example("one that is viewed as no part of a row can be", _flat_heads, QKV),
    Example("matmul", _by_matmul, PAIR),
    Example("einsum", _by_einsum, PAIR),
    Example("biases added", _added_bias, PAIR_BIASED),
    Example("weights as [in, out]", _not_transposed, PAIR),
    Example("four, over flat rows", _four, with_parameters(X, (64, 64), (32, 64), (16, 64), (8, 64))),
    Example("weights cut from Parameters", _from_parameters, with_parameters(X, (3, 64, 64), (64, 64))),
)
NOT_PARAMETERS = "the weights do not come from Parameters alone"
REJECTS = (Example("weights that are inputs", _qkv, tensors(X, (128, 64), (32, 64), (32, 64)), NOT_PARAMETERS),)
GATED_EXAMPLES = (
    Example("silu(gate) * up", _gated, PAIR),
    Example("in float32, up first", _gated_in_float, PAIR),
    Example("with biases, silu written out", _gated_biased, PAIR_BIASED),
)
GATED_REJECTS = (
    Example("weights that are inputs", _gated, tensors(X, (64, 64), (64, 64)), NOT_PARAMETERS),
    Example("one bias", _gated_half_biased, HALF_BIASED, "only one of gate and up has a bias"),
    Example(
        "two inputs", _gated_two_inputs, with_parameters(X, X, (64, 64), (64, 64), leading=2),
        "are projections of different inputs",
    ),
)  # fmt: skip
HEADS = (
    Example("queries absorbed", _absorbed, with_parameters((2, 3, 4, 32), (256, 64))),
    Example("values of all heads", _values_up, with_parameters((2, 3, 4, 64), (256, 64))),
    Example("heads turned by hand", _turned_by_hand, with_parameters((2, 3, 4, 64), (256, 64))),
    Example("packed tokens", _packed, with_parameters((2, 3, 4, 32), (256, 64))),
    Example("heads given first", _heads_given_first, with_parameters((4, 6, 32), (256, 64))),
)
OTHER_HEADS = (
    Example(
        "each sequence has its own matrices", _own_of_each_sequence, with_parameters((2, 3, 4, 32), (2, 4, 32, 64)),
        "each sequence has matrices of its own",
    ),
)  # fmt: skip

TRIED = {
    "joined_projections": (*EXAMPLES, *REJECTS),
    "swiglu_projections": (*GATED_EXAMPLES, *GATED_REJECTS),
    "head_projection": (*HEADS, *OTHER_HEADS),
}
"""Rule -> its examples and rejects."""
