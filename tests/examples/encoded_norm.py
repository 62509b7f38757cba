"""Norms whose rows are quantised, of each token or static, of sums or alone, and what the operators do not take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusion import Example
from tests.examples.add_rms_norm import decoder, mixed, wide
from tests.examples.inputs import Inputs, fixed, normal, tensors, under
from tests.examples.norm import norm, unit
from tests.examples.quantisation import K, N, in_int32, int8, product, quantised, scales, weights


def layers(*rows: int) -> Inputs:
    """Two addends [*rows, K], a gain, an int8 weight and its scale."""
    return tensors((*rows, K), (*rows, K), (K,), fixed(weights(3, N, K)), fixed(scales(4, N)))


def layer(y: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A quantised layer."""
    return in_int32(*quantised(y), weight, scale)


def two_layers(y: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Two that read the same rows."""
    rows = quantised(y)
    return tuple(in_int32(*rows, each, scale) for each in (weight, -weight))


rounded_late = partial(wide, layer=layer)
TOKENS = (
    Example("the next layer", partial(decoder, layer=layer), layers(5)),
    Example("two layers", partial(decoder, layer=two_layers), layers(2, 3)),
    Example("norm of the unrounded sum", rounded_late, layers(5)),
    Example("addends of two dtypes", rounded_late, mixed(layers(5)), "their dtypes differ"),
)

Constants = Callable[[torch.dtype], torch.dtype]
ZERO = torch.tensor([3], dtype=torch.int8)
WEIGHT, SCALE, BIAS = weights(5, N, K), scales(6, N), torch.arange(N, dtype=torch.int32)


def narrow(dtype: torch.dtype) -> torch.dtype:
    """That of the model."""
    return dtype


def other(dtype: torch.dtype) -> torch.dtype:
    """Another one than that of the model."""
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


def held(*shape: int, of: Constants = narrow, bias: Constants = narrow) -> Inputs:
    """Two addends [5, K], a gain and a bias [K], a scale [*shape], about 1 / 32, and a zero point."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, residual, gain, line = tensors((5, K), (5, K), (K,), (K,))(dtype)
        scale = (1 + normal(4, *shape).abs() / 8) / 32
        constants = line.to(bias(dtype)), scale.to(of(dtype)), ZERO.clone()
        return x, residual, *(fixed(each) for each in (gain, *constants))

    return make


def constants(y: Tensor, bias: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """By a scale and a zero point."""
    return int8(y / scale + zero)


def biased(y: Tensor, bias: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The norm adds a bias."""
    return int8((y + bias) / scale + zero)


def no_zero_point(y: Tensor, bias: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """By a scale alone, perhaps one of each channel."""
    return int8(y / scale)


def numbers(y: Tensor, bias: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """By numbers."""
    return int8(y / 2**-5 - 4)


def long_number(y: Tensor, bias: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """By a number that no dtype holds."""
    return int8(y / 0.0300001)


def static_layer(y: Tensor, bias: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A layer in W8A8 static."""
    return ((product(constants(y, bias, scale, zero), WEIGHT) + BIAS).float() * SCALE).bfloat16()


def alone(x: Tensor, residual: Tensor, gain: Tensor, *more: Tensor, layer: Callable[..., Tensor] = constants) -> Tensor:
    """The norm of one tensor."""
    return layer(norm(x, gain), *more)


def no_gain(x: Tensor, residual: Tensor, gain: Tensor, *more: Tensor) -> Tensor:
    """A norm without a gain."""
    return constants(unit(x.float()).to(x.dtype), *more)


STATIC = (
    Example("a sum", partial(decoder, layer=constants), held(1)),
    Example("an unrounded sum, a bias", partial(wide, layer=biased), held(1)),
    Example("a scale of each channel", partial(decoder, layer=no_zero_point), held(K)),
    Example("numbers", partial(decoder, layer=numbers), held(1)),
    Example("a layer", partial(decoder, layer=static_layer), held(1)),
    Example("alone", alone, held(1)),
    Example("alone, a bias", partial(alone, layer=biased), held(1)),
    Example("alone, numbers", partial(alone, layer=numbers), held(1)),
    Example("alone, no gain", no_gain, held(1)),
    Example("alone, a scale of another dtype", alone, held(1, of=other), "or multiplied by a number"),
    Example("alone, a long number", partial(alone, layer=long_number), held(1), "which the dtype of x rounds"),
    Example("alone, a scale of each channel", partial(alone, layer=no_zero_point), held(K), "requires scale as [1]"),
    Example("alone, a bias of another dtype", partial(alone, layer=biased), held(1, bias=other), "in the dtype of x"),
)  # fmt: skip

TRIED = {"encoded_norm": (*TOKENS, *under("static", STATIC))}
