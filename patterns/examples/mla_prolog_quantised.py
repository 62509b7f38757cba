"""What stands before latent attention, with layers in whole numbers of 8 bits, as models write it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from patterns.examples.inputs import Inputs
from patterns.examples.mla_prolog import (
    CACHES,
    DR,
    HCQ,
    HE,
    C,
    D,
    Joined,
    N,
    S,
    T,
    attended,
    copied,
    fresh,
    norm,
    rope_last,
    turned,
)  # fmt: skip
from patterns.examples.mla_prolog import prolog as floats
from patterns.examples.quantisation import product, quantised, scales, weights

Layer = tuple[Tensor, Tensor]


def whole(number: int, rows: int, columns: int) -> Layer:
    """A weight in whole numbers and its scales."""
    return weights(number, rows, columns), scales(number + 1, rows) / 8


def prolog(queries: int, *quantised_layers: str, cached: bool = True) -> Inputs:
    """As in floats, with these of the layers dq, uq, dkv in whole numbers, their scales behind everything else."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, dq, uq, dkv, *rest = (floats(queries, T, *CACHES) if cached else floats(queries, queries))(dtype)
        layers = {"dq": (dq, HCQ, HE), "uq": (uq, N * (D + DR), HCQ), "dkv": (dkv, C + DR, HE)}
        made = {name: whole(20 + 2 * n, *size) for n, (name, (_, *size)) in enumerate(layers.items())}
        kept = [made[name][0] if name in quantised_layers else given for name, (given, *_) in layers.items()]
        fixed = [torch.nn.Parameter(each, requires_grad=False) for each in kept]
        more = [made[name][1] for name in quantised_layers]
        return x, *fixed, *rest, *(torch.nn.Parameter(each, requires_grad=False) for each in more)

    return make


def multiplied(x: Layer, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A layer in whole numbers."""
    return (product(x[0], weight).float() * x[1] * scale).to(dtype)


def attention(q: Tensor, line: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
    """What follows the layers: heads [B, S, N · (D + Dr)], lines [B, S, C + Dr]."""
    gain_kv, ukv, cos, sin, places, at, *caches = rest
    q = q.reshape(*places.shape[:2], N, -1).transpose(1, 2)
    q = rope_last(q, cos.unsqueeze(-3), sin.unsqueeze(-3))
    nope, rope = line.split((C, DR), dim=-1)
    join: Joined = copied if caches else fresh
    return attended(q, *join(norm(nope, gain_kv), turned(rope, cos, sin), at, *caches), ukv, places)


def heads_alone(x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain_q: Tensor, *rest: Tensor) -> Tensor:
    """The layer of the heads is quantised."""
    *others, uq_scale = rest
    latent = norm(linear(x, dq), gain_q)
    q = multiplied(quantised(latent), uq, uq_scale, x.dtype)
    return attention(q, linear(x, dkv), tuple(others))


def all_layers(x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain_q: Tensor, *rest: Tensor) -> Tensor:
    """All three layers are quantised."""
    *others, dq_scale, uq_scale, dkv_scale = rest
    rows = quantised(x)
    latent = norm(multiplied(rows, dq, dq_scale, x.dtype), gain_q)
    q = multiplied(quantised(latent), uq, uq_scale, x.dtype)
    return attention(q, multiplied(rows, dkv, dkv_scale, x.dtype), tuple(others))


EXAMPLES = (
    Example("a token, the heads quantised", heads_alone, prolog(1, "uq")),
    Example("a prompt, all quantised", all_layers, prolog(S, "dq", "uq", "dkv")),
)
ROW_EXAMPLES = (
    Example("no cache, the heads quantised", heads_alone, prolog(S, "uq", cached=False)),
    Example("no cache, all quantised", all_layers, prolog(S, "dq", "uq", "dkv", cached=False)),
)
