"""Experts in W8A8: int8 matrices with a scale of each channel, rows quantised by token, and what the operators lack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, fixed
from patterns.examples.quantisation import by_row, divided, grid, quantised, scales, weights
from patterns.examples.routed_experts import CHOICES, EXPERTS, INNER, TOKENS, WIDTH, clipped_halves, halves, routed


def _inputs(parameters: bool = True) -> Inputs:
    """Tokens, logits in such steps that every dtype chooses the same, and matrices in int8, each with its scales."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(11)
        logits = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(TOKENS)]) / 2
        layers = (
            weights(1, EXPERTS, 2 * INNER, WIDTH), scales(2, EXPERTS, 2 * INNER) / 8,
            weights(3, EXPERTS, WIDTH, INNER), scales(4, EXPERTS, WIDTH) / 8,
        )  # fmt: skip
        return grid(0, TOKENS, WIDTH).to(dtype), logits.to(dtype), *(map(fixed, layers) if parameters else layers)

    return make


FIXED, PASSED = _inputs(), _inputs(parameters=False)


def kept(x: Tensor, like: Tensor) -> Tensor:
    """In 16 bits, as the operators give products."""
    return x.to(torch.bfloat16 if like.dtype == torch.float32 else like.dtype)


def _product(int8: Tensor, matrices: Tensor) -> Tensor:
    """Each row [T, K, M] by the matrix [T, K, N, M] that was gathered for it, sums in int32."""
    return torch.matmul(matrices.int(), int8.int().unsqueeze(-1)).squeeze(-1).float()


def gathered(
    tokens: Tensor, logits: Tensor, gate_up: Tensor, of_gates: Tensor, down: Tensor, of_down: Tensor,
    activation: Callable[[Tensor], Tensor] = halves, result: Callable[[Tensor, Tensor], Tensor] = kept,
    between: Callable[[Tensor], tuple[Tensor, Tensor]] = quantised,
) -> Tensor:  # fmt: skip
    """Tokens are quantised, then repeated for the experts that they chose."""
    shares, experts = routed(logits)
    rows, scale = (each.unsqueeze(1).expand(-1, CHOICES, -1) for each in quantised(tokens))
    both = kept(_product(rows, gate_up[experts]) * scale * of_gates[experts], tokens)
    rows, scale = between(activation(both))
    given = result(_product(rows, down[experts]) * scale * of_down[experts], tokens)
    return (given * shares.to(given.dtype).unsqueeze(-1)).sum(1)


def listed(tokens: Tensor, logits: Tensor, gate_up: Tensor, of_gates: Tensor, down: Tensor, of_down: Tensor) -> Tensor:
    """Tokens are repeated for the experts that they chose, and each row quantised."""
    shares, experts = routed(logits)
    rows, scale = quantised(tokens.repeat_interleave(CHOICES, dim=0).unflatten(0, experts.shape))
    both = kept(_product(rows, gate_up[experts]) * scale * of_gates[experts], tokens)
    rows, scale = quantised(halves(both))
    given = kept(_product(rows, down[experts]) * scale * of_down[experts], tokens)
    return (given * shares.to(given.dtype).unsqueeze(-1)).sum(1)


def beside(
    tokens: Tensor, logits: Tensor, gate_up: Tensor, of_gates: Tensor, down: Tensor, of_down: Tensor
) -> tuple[Tensor, Tensor]:
    """What the experts read is given as well."""
    return gathered(tokens, logits, gate_up, of_gates, down, of_down), quantised(tokens)[0]


def _by_7(x: Tensor) -> tuple[Tensor, Tensor]:
    return divided(x, by_row(x, 7), -8, 7)


EXAMPLES = (
    Example("tokens in int8", gathered, FIXED),
    Example("rows in int8", listed, FIXED),
    Example("tokens in int8 that are given as well", beside, FIXED),
    Example("in int8, bounded", partial(gathered, activation=clipped_halves), FIXED),
    Example("int8 matrices that are passed in", gathered, PASSED),
    Example("in int8, a sum in float32", partial(gathered, result=lambda x, _: x), FIXED, "gives float16 and bfloat16"),
    Example("four bits between the products", partial(gathered, between=_by_7), FIXED, "whose rows are quantised"),
)  # fmt: skip

TRIED = {"routed_experts": EXAMPLES}
