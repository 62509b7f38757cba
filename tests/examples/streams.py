"""Residual streams of hyper-connections: their gates, matrices and updates, and what resembles them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, fixed, in_dtype, normal

N, D, EPS, NORM_EPS = 4, 32, 1e-3, 1e-5
SIZES = [N, N, N * N]


def wide(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def balanced(x: Tensor, times: int = 3, eps: float = EPS) -> Tensor:
    """Divide columns, then rows and columns in turns, by their sums, as DeepSeek-V4 does."""
    y = x.softmax(-1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(times - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


def split(mixes: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of the three gates."""
    parts, biases = mixes.split(SIZES, -1), bias.split(SIZES)
    pre, post, matrix = (w * a + b for w, a, b in zip(parts, alpha, biases, strict=True))
    return pre, post, matrix.unflatten(-1, (N, N))


def gates(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of streams that are normalised before the linear layer."""
    flat = wide(x.flatten(-2))
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    return split(F.linear(flat, wide(phi)), alpha, bias)


def collapsed(x: Tensor, pre: Tensor) -> Tensor:
    """The input of the layer."""
    return (pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def connection(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, times: int = 3) -> tuple[Tensor, ...]:
    """Written as transformers has DeepSeek-V4."""
    pre, post, matrix = gates(x, phi, alpha, bias)
    return collapsed(x, pre.sigmoid() + EPS), 2 * post.sigmoid(), balanced(matrix, times)


def norm_behind(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Written as the model's own inference code: the norm behind the linear layer."""
    flat = wide(x.flatten(-2))
    mixes = F.linear(flat, wide(phi)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    pre, post, matrix = split(mixes, alpha, bias)
    return collapsed(x, pre.sigmoid() + EPS), 2 * post.sigmoid(), balanced(matrix)


def shares_alone(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """A matrix of shares of rows, which no columns are divided in."""
    pre, post, matrix = gates(x, phi, alpha, bias)
    return collapsed(x, pre.sigmoid() + EPS), 2 * post.sigmoid(), matrix.softmax(-1)


def other_factor(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """An output gate between 0 and 3."""
    pre, post, matrix = gates(x, phi, alpha, bias)
    return collapsed(x, pre.sigmoid() + EPS), 3 * post.sigmoid(), balanced(matrix)


def shifted_gate(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """An output gate that is not 0."""
    pre, post, matrix = gates(x, phi, alpha, bias)
    return collapsed(x, pre.sigmoid() + EPS), 2 * post.sigmoid() + EPS, balanced(matrix)


def head(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Tensor:
    """The collapse behind the last layer."""
    flat = wide(x.flatten(-2))
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
    return collapsed(x, (F.linear(flat, wide(phi[:N])) * alpha[:1] + bias[:N]).sigmoid() + EPS)


def streams(*lead: int, narrow: bool = False) -> Inputs:
    """Streams, and the Parameters of their gates, of which phi has 16 bits if it is narrow."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        kept = torch.promote_types(dtype, torch.float32)
        count = N * N + 2 * N
        weights = (normal(1, count, N * D) / 8, normal(2, 3) / 2, normal(3, count) / 2)
        phi, alpha, bias = (fixed(each.to(kept)) for each in weights)
        narrowed = fixed(phi.to(torch.bfloat16 if dtype == torch.float32 else dtype)) if narrow else phi
        return in_dtype(normal(0, *lead, N, D), dtype), narrowed, alpha, bias

    return make


def behind(*lead: int, out: int = D) -> Inputs:
    """Streams, matrix, result of a layer and gate; matrix and gate in float32."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        kept = torch.promote_types(dtype, torch.float32)
        shapes = ((*lead, N, D), (*lead, N, N), (*lead, out), (*lead, N))
        made = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
        return tuple(each.to(to) for each, to in zip(made, (dtype, kept) * 2, strict=True))

    def with_result(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, matrix, result, gate = make(dtype)
        return x, matrix, result.to(dtype), gate

    return with_result


def updated(x: Tensor, matrix: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    """Written as transformers has DeepSeek-V4: gate and matrix are rounded before."""
    added = gate.to(x.dtype).unsqueeze(-1) * out.unsqueeze(-2)
    return added + matrix.to(x.dtype).transpose(-1, -2) @ x


def summed(x: Tensor, matrix: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    """Written as the model's own inference code: a product that is summed, in float32."""
    mixed = (matrix.unsqueeze(-1) * x.unsqueeze(-2)).sum(-3)
    return (gate.unsqueeze(-1) * out.unsqueeze(-2) + mixed).type_as(x)


def not_mixed(x: Tensor, matrix: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    """Written as HY-V4: streams that stay apart."""
    return (x + gate.unsqueeze(-1) * out.unsqueeze(-2)).to(x.dtype)


def logits(*lead: int) -> Inputs:
    """Logits of matrices, in float32."""
    return lambda dtype: (normal(0, *lead, N, N).to(torch.promote_types(dtype, torch.float32)),)


def rows_last(x: Tensor) -> Tensor:
    """The same order, and rows once more."""
    y = balanced(x)
    return y / (y.sum(-1, keepdim=True) + EPS)


def exponentials(x: Tensor) -> Tensor:
    """Exponentials, of which columns are divided first."""
    y = x.exp()
    for axis in (-2, -1, -2, -1):
        y = y / (y.sum(axis, keepdim=True) + EPS)
    return y


def without_one_eps(x: Tensor) -> Tensor:
    """The softmax without its eps."""
    y = x.softmax(-1)
    for axis in (-2, -1, -2):
        y = y / (y.sum(axis, keepdim=True) + EPS)
    return y


def _gates(name: str, function: Callable[..., object], *lead: int, refusal: str = "", narrow: bool = False) -> Example:
    return Example(name, function, streams(*(lead or (2, 3)), narrow=narrow), refusal=refusal)


_REJECTS = (
    _gates("another factor", other_factor, refusal="output gate: it is 3 * sigmoid"),
    _gates("an output gate that is shifted", shifted_gate, refusal="output gate: it is 2 * sigmoid + 0.001"),
    _gates("a head", head, refusal="collapsed by a gate alone"),
)
_EXAMPLES = (
    _gates("norm before", connection),
    _gates("norm behind, one row of tokens", norm_behind, 5),
    _gates("phi of 16 bits", connection, narrow=True),
    _gates("a matrix of shares", shares_alone),
    _gates("a matrix of shares, phi of 16 bits", shares_alone, narrow=True),
)
MATRICES = (
    Example("three times", balanced, logits(2, 3)),
    Example("twice", lambda x: balanced(x, 2), logits(5)),
    Example("rows last", rows_last, logits(2, 3), refusal="rows last"),
    Example("exponentials", exponentials, logits(2, 3), refusal="without a softmax as the first"),
    Example("without one eps", without_one_eps, logits(2, 3), refusal="0 and 0.001 added"),
)
UPDATES = (
    Example("matmul", updated, behind(2, 3)),
    Example("a product that is summed", summed, behind(5)),
    Example("without a matrix", not_mixed, behind(2, 3)),
)
TRIED = {
    "stream_gates": (*_EXAMPLES, *_REJECTS),
    "stream_gates_hf32": _EXAMPLES,
    "sinkhorn": MATRICES,
    "stream_update": UPDATES,
}
