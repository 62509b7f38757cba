"""Residual adds with the norm that follows, and sums that the operator does not take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, tensors
from tests.examples.norm import norm, unit

TWO_AND_WEIGHT = tensors((2, 3, 64), (2, 3, 64), (64,))
Layer = Callable[..., Any]


def decoder(x: Tensor, residual: Tensor, gain: Tensor, *more: Tensor, layer: Layer = lambda y: y) -> Any:
    """The norm of a sum in the dtype of the model, with what reads it, and the sum."""
    residual = residual + x
    return layer(norm(residual, gain), *more), residual


def wide(x: Tensor, residual: Tensor, gain: Tensor, *more: Tensor, layer: Layer = lambda y: y) -> Any:
    """The norm of the unrounded sum, with what reads it, and the sum."""
    s = x.float() + residual.float()
    return layer((gain * unit(s)).to(x.dtype), *more), s.to(x.dtype)


def serving(x: Tensor, residual: Tensor, gain: Tensor, layer: Layer = lambda y: y) -> Any:
    """The same, rounded before the gain."""
    s = x.float() + residual.float()
    residual = s.to(x.dtype)
    return layer(unit(s).to(x.dtype) * gain), residual


def norm_alone(x: Tensor, residual: Tensor, gain: Tensor) -> Tensor:
    """The sum is not read again."""
    return wide(x, residual, gain)[0]


def mixed(inputs: Inputs) -> Inputs:
    """The second of these tensors in float32, all others in a narrow dtype."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, residual, *rest = inputs(torch.float16 if dtype == torch.float32 else dtype)
        return x, residual.float(), *rest

    return make


def shifted(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gain is 1 + weight, in float32."""
    residual = residual + x
    return (unit(residual.float()) * (1.0 + weight.float())).to(x.dtype), residual


EXAMPLES = (
    Example("the next layer's norm", decoder, TWO_AND_WEIGHT),
    Example("a gain of 1 + weight", shifted, TWO_AND_WEIGHT),
    Example("norm of the unrounded sum", wide, TWO_AND_WEIGHT),
    Example("the same, rounded before the weight", serving, TWO_AND_WEIGHT),
    Example("the sum is not read again", norm_alone, TWO_AND_WEIGHT),
    Example("addends of two dtypes, summed in float32", norm_alone, mixed(TWO_AND_WEIGHT)),
    Example("bias", decoder, tensors((2, 3, 64), (64,), (64,)), "one of them is broadcast or multiplied"),
)


def narrow(inputs: Inputs) -> Inputs:
    """These tensors in float16 instead of float32."""
    return lambda dtype: inputs(torch.float16 if dtype == torch.float32 else dtype)


def in_both(y: Tensor) -> tuple[Tensor, Tensor]:
    """A norm that experts read as it is and a router in float32."""
    return y, y.float()


def of_tokens(y: Tensor) -> tuple[Tensor, Tensor]:
    """The same, of the tokens of all sequences."""
    return y, y.view(-1, y.shape[-1]).to(torch.float32) * 2


def by_head(y: Tensor) -> tuple[Tensor, Tensor]:
    """In float32 with other dims than a router has."""
    return y, y.unflatten(-1, (4, -1)).float()


WIDENED = (
    Example("the router, widened", partial(decoder, layer=in_both), narrow(TWO_AND_WEIGHT)),
    Example("the router of all tokens, widened", partial(decoder, layer=of_tokens), narrow(TWO_AND_WEIGHT)),
    Example("norm of the unrounded sum, widened", partial(wide, layer=in_both), narrow(TWO_AND_WEIGHT)),
    Example("rounded before the weight, widened", partial(serving, layer=in_both), narrow(TWO_AND_WEIGHT)),
    Example(
        "addends of two dtypes, widened", partial(wide, layer=in_both), mixed(TWO_AND_WEIGHT), "their dtypes differ"
    ),
    Example("heads, widened", partial(decoder, layer=by_head), narrow(TWO_AND_WEIGHT), "the rewrite gives"),
)


TRIED = {"add_norm": EXAMPLES, "encoded_norm": WIDENED}
