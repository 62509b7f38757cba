"""Gated activations whose rows become int8, and gates of layers in W8A8."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, fixed, tensors, weight
from tests.examples.quantisation import grid, int8_layer, product, quantised
from tests.examples.routed_int8_experts import kept
from tests.examples.swiglu import gated

X = tensors((2, 3, 128))
K, H = 48, 24


def _layers(parameters: bool = True) -> Inputs:
    """x [2, 3, K], and two weights [H, K] in int8, each with its scales [H]."""
    layers = (each for seed in (1, 3) for each in int8_layer(seed, H, K))
    return tensors(grid(0, 2, 3, K), *(fixed(each) if parameters else each for each in layers))


def _layer(int8: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    return kept(product(int8, weight).float() * tokens * scale, like)


def two_layers(
    x: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, activation: Callable[[Tensor], Tensor] = F.silu
) -> Tensor:
    """Gate and up as layers in W8A8 of one input."""
    rows = quantised(x)
    return activation(_layer(*rows, gate, of_gate, x)) * _layer(*rows, up, of_up, x)


def in_floats(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The same in floats."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _then(form: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *given: quantised(form(*given))


SWIGLU = (
    Example("two layers in int8", two_layers, _layers()),
    Example(
        "two layers in int8 that are passed in", two_layers, _layers(False), "they are no Parameters of the module"
    ),
)
EXAMPLES = (
    Example("two chunks, quantised", _then(gated), X),
    Example("two projections, quantised", _then(in_floats), tensors((2, 3, K), weight(1, H, K), weight(2, H, K))),
    Example("two layers in int8, quantised", _then(two_layers), _layers()),
    Example("of lanes, quantised", _then(lambda x: F.silu(x[..., ::2]) * x[..., 1::2]), X, "every second lane"),
    Example(
        "two layers in int8 that are passed in, quantised",
        _then(two_layers),
        _layers(False),
        "they are no Parameters of the module",
    ),
)

TRIED = {"activation": (*SWIGLU, *EXAMPLES)}
