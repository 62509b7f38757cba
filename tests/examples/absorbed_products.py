"""Products of attention over keys and values of a latent, whatever stands between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, sigmoid

from fusion import Example
from tests.examples.inputs import tensors, weight

B, N, T, D, E, C, DR = 1, 8, 96, 32, 32, 16, 16
SCALE = (D + DR) ** -0.5
Weigh = Callable[[Tensor, Tensor], Tensor]


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (N, -1)).transpose(1, 2)


def biased(scores: Tensor, bias: Tensor) -> Tensor:
    """A softmax in float32 behind a bias of which nothing is known."""
    return torch.softmax((scores + bias).float(), -1).to(scores.dtype)


def capped(scores: Tensor, bias: Tensor) -> Tensor:
    """A softmax behind a soft cap."""
    return torch.softmax(30 * torch.tanh(scores / 30) + bias, -1)


def gated(scores: Tensor, bias: Tensor) -> Tensor:
    """No softmax at all."""
    return sigmoid(scores + bias) / T


def added(weigh: Weigh = biased) -> Callable[..., Any]:
    """Two products of queries are added."""

    def forward(q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, bias: Tensor, up: Tensor, up_value: Tensor):
        k, v = (_heads(linear(latent, each)) for each in (up, up_value))
        scores = q @ k.transpose(2, 3) + q_rope @ rope.unsqueeze(1).transpose(2, 3)
        return weigh(scores * SCALE, bias) @ v

    return forward


def _joined(q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, bias: Tensor, up: Tensor, up_value: Tensor):
    k, v = (_heads(linear(latent, each)) for each in (up, up_value))
    k = torch.cat((k, rope.unsqueeze(1).expand(-1, N, -1, -1)), -1)
    return scaled_dot_product_attention(torch.cat((q, q_rope), -1), k, v, attn_mask=bias, scale=SCALE)


def _alone(q: Tensor, latent: Tensor, bias: Tensor, up: Tensor, up_value: Tensor) -> Tensor:
    k, v = (_heads(linear(latent, each)) for each in (up, up_value))
    return biased((q * SCALE) @ k.transpose(2, 3), bias) @ v


def _of_two(q: Tensor, latent: Tensor, bias: Tensor, up: Tensor, up_value: Tensor) -> Tensor:
    k, v = _heads(linear(latent, up)), _heads(linear(latent.flip(-1), up_value))
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def inputs(queries: int = 1, keys: int = T) -> Any:
    """Queries of both kinds, latents, rotated keys, a bias, and two projections that are Parameters."""
    shapes = ((B, N, queries, D), (B, N, queries, DR), (B, keys, C), (B, keys, DR), (B, N, queries, keys))
    return tensors(*shapes, weight(8, N * D, C), weight(9, N * E, C))


UNROTATED = tensors((B, N, 1, D), (B, T, C), (B, N, 1, T), weight(8, N * D, C), weight(9, N * E, C))
MANY = tensors((B, N, 64, D), (B, T, 256), (B, N, 64, T), weight(8, N * D, 256), weight(9, N * E, 256))
TRIED = {
    "absorbed_products": (
        Example("behind a bias", added(), inputs()),
        Example("behind a soft cap", added(capped), inputs()),
        Example("weights by a sigmoid", added(gated), inputs()),
        Example("by sdpa", _joined, inputs()),
        Example("without rotated lanes", _alone, UNROTATED),
        Example("values of another latent, by sdpa", _of_two, UNROTATED),
        Example("so many queries that expanding costs less", _alone, MANY, "us slower than"),
    )
}
