"""Experts in W8A8: int8 matrices with a scale of each channel, rows quantised by token, and what the operators lack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, fixed
from tests.examples.quantisation import by_row, divided, grid, quantised, scales, weights
from tests.examples.routed_experts import CHOICES, EXPERTS, INNER, TOKENS, WIDTH, clipped_halves, halves, routed


def _inputs(parameters: bool = True, inner: int = 2 * INNER, in_int8: bool = False) -> Inputs:
    """Tokens, logits in such steps that every dtype chooses the same, and matrices in int8, each with its scales."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(11)
        logits = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(TOKENS)]) / 2
        layers = (
            weights(1, EXPERTS, inner, WIDTH), scales(2, EXPERTS, inner) / 8,
            weights(3, EXPERTS, WIDTH, INNER), scales(4, EXPERTS, WIDTH) / 8,
        )  # fmt: skip
        tokens = grid(0, TOKENS, WIDTH).to(dtype)
        given = quantised(tokens) if in_int8 else (tokens,)
        return *given, logits.to(dtype), *(map(fixed, layers) if parameters else layers)

    return make


FIXED, PASSED, IN_INT8 = _inputs(), _inputs(parameters=False), _inputs(in_int8=True)
PLAIN, PLAIN_IN_INT8 = _inputs(inner=INNER), _inputs(inner=INNER, in_int8=True)


def biased(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same, and a line of biases for each expert."""
    return *FIXED(dtype), fixed(kept(grid(5, EXPERTS, 2 * INNER), torch.empty(0, dtype=dtype)))


def kept(x: Tensor, like: Tensor) -> Tensor:
    """In 16 bits, as the operators give products."""
    return x.to(torch.bfloat16 if like.dtype == torch.float32 else like.dtype)


def _product(int8: Tensor, matrices: Tensor) -> Tensor:
    """Each row [T, K, M] by the matrix [T, K, N, M] that was gathered for it, sums in int32."""
    return torch.matmul(matrices.int(), int8.int().unsqueeze(-1)).squeeze(-1).float()


Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def _experts(
    rows: tuple[Tensor, Tensor], routing: tuple[Tensor, Tensor], layers: tuple[Tensor, ...], like: Tensor,
    activation: Callable[[Tensor], Tensor], result: Callable[[Tensor, Tensor], Tensor] = kept,
    between: Quantise = quantised,
) -> Tensor:  # fmt: skip
    """What experts give of rows in int8 [T, K, H] with their scales; biases of the first product may come last."""
    (shares, experts), (first, of_first, down, of_down, *biases) = routing, layers
    hidden = kept(_product(rows[0], first[experts]) * rows[1] * of_first[experts], like)
    hidden = hidden + biases[0][experts] if biases else hidden
    int8, scale = between(activation(hidden))
    given = result(_product(int8, down[experts]) * scale * of_down[experts], like)
    return (given * shares.to(given.dtype).unsqueeze(-1)).sum(1)


def _repeated(int8: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and their scales, for the experts that they chose."""
    return int8.unsqueeze(1).expand(-1, CHOICES, -1), scale.unsqueeze(1).expand(-1, CHOICES, -1)


def gathered(
    tokens: Tensor, logits: Tensor, *layers: Tensor, activation: Callable[[Tensor], Tensor] = halves, **how: Any
) -> Tensor:
    """Tokens are quantised, then repeated."""
    return _experts(_repeated(*quantised(tokens)), routed(logits), layers, tokens, activation, **how)


def listed(tokens: Tensor, logits: Tensor, *layers: Tensor, activation: Callable[[Tensor], Tensor] = halves) -> Tensor:
    """Tokens are repeated, and each row quantised."""
    rows = tokens.repeat_interleave(CHOICES, dim=0).unflatten(0, (-1, CHOICES))
    return _experts(quantised(rows), routed(logits), layers, tokens, activation)


def passed(
    int8: Tensor, scale: Tensor, logits: Tensor, *layers: Tensor, activation: Callable[[Tensor], Tensor] = halves
) -> Tensor:
    """Tokens come in int8, with their scales."""
    return _experts(_repeated(int8, scale), routed(logits), layers, logits, activation)


def _by_7(x: Tensor) -> tuple[Tensor, Tensor]:
    return divided(x, by_row(x, 7), -8, 7)


EXAMPLES = (
    Example("tokens that become int8", gathered, FIXED),
    Example("rows that become int8", listed, FIXED),
    Example("tokens in int8", passed, IN_INT8),
    Example("tokens that become int8, bounded", partial(gathered, activation=clipped_halves), FIXED),
    Example("tokens that become int8, no gate", partial(gathered, activation=F.relu), PLAIN),
    Example("rows that become int8, no gate", partial(listed, activation=F.relu), PLAIN),
    Example("tokens in int8, no gate", partial(passed, activation=F.relu), PLAIN_IN_INT8),
    Example("tokens that become int8, biases", gathered, biased),
    Example("int8 matrices that are passed in", gathered, PASSED),
    Example(
        "in int8, a sum in float32",
        partial(gathered, result=lambda x, _: x),
        FIXED,
        "npu_grouped_matmul requires float16 or",
    ),
    Example("four bits between the products", partial(gathered, between=_by_7), FIXED, "whose rows are quantised"),
)

TRIED = {"routed_experts": EXAMPLES}
