"""Layers of floats with int8 weights: scales by channels, groups or heads, before or behind the product.

Scales are powers of two, so that every way to write a layer gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from tests.examples.inputs import Inputs, normal, tensors
from tests.examples.quantisation import K, N, grid, weights


def narrow_layer(*rows: int, groups: int = 0, zeros: bool = False, bias: bool = False, k: int = 2 * K) -> Inputs:
    """x [*rows, K], weight [N, K] of int8, powers of two as scales [N] or [N, G], zero points alike, a bias [N]."""
    shape = (N, groups) if groups else (N,)
    numbers = torch.Generator().manual_seed(4)
    scale = 2.0 ** torch.randint(-9, -5, shape, generator=numbers)
    points = [torch.randint(-9, 9, shape, generator=numbers).float()] if zeros else []
    return tensors(grid(0, *rows, k), weights(1, N, k), scale, *points, *([normal(3, N).float()] if bias else []))


def of_channels(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A scale of each output channel on the weight."""
    return linear(x, weight.to(x.dtype) * scale.to(x.dtype).unsqueeze(-1))


def behind(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The same behind the product."""
    return linear(x, weight.to(x.dtype)) * scale.to(x.dtype)


def transposed(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A weight [K, N], and a bias."""
    return x @ (weight.t().to(x.dtype) * scale.to(x.dtype)) + bias.to(x.dtype)


def with_zeros(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Zero points of each channel."""
    return linear(x, (weight.to(x.dtype) - zero.to(x.dtype).unsqueeze(-1)) * scale.to(x.dtype).unsqueeze(-1))


def of_groups(x: Tensor, weight: Tensor, scale: Tensor, *zero: Tensor) -> Tensor:
    """Scales, and zero points, of groups of inputs."""
    parts = weight.to(x.dtype).unflatten(-1, (scale.shape[1], -1))
    parts = parts - zero[0].to(x.dtype).unsqueeze(-1) if zero else parts
    return linear(x, (parts * scale.to(x.dtype).unsqueeze(-1)).flatten(1))


def of_inputs(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Scales of inputs."""
    return linear(x, weight.to(x.dtype) * scale.repeat(4).to(x.dtype))


def zeros_behind(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Zero points that are added to the scaled weight."""
    return linear(x, weight.to(x.dtype) * scale.to(x.dtype).unsqueeze(-1) - zero.to(x.dtype).unsqueeze(-1))


def rows_of_groups(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Each group of inputs a row."""
    rows = weight.view(-1, weight.shape[1] // scale.shape[1]).to(x.dtype) * scale.to(x.dtype).view(-1, 1)
    return linear(x, rows.view(weight.shape))


def groups_of_columns(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A weight [K, N], the scales and zero points of groups repeated."""
    columns = weight.t()
    each, point = (
        kept.t().to(x.dtype).repeat_interleave(weight.shape[1] // kept.shape[1], 0) for kept in (scale, zero)
    )
    return x @ ((columns.to(x.dtype) - point) * each)


def by_heads(equation: str) -> Callable[..., Tensor]:
    """A weight [H, D, K] and its scales [H, D, 1], its result in heads."""

    def heads(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        lanes = weight.view(4, -1, weight.shape[1]).to(x.dtype) * scale.to(x.dtype).view(4, -1, 1)
        return torch.einsum(equation, x, lanes)

    return heads


def joined_heads(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The same weight, its heads joined for a layer."""
    lanes = weight.view(4, -1, weight.shape[1]).to(x.dtype) * scale.to(x.dtype).view(4, -1, 1)
    return linear(x, lanes.view(weight.shape))


def one_behind(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """One scale behind the product."""
    return linear(x, weight.to(x.dtype)) * scale[0].to(x.dtype)


def float32_behind(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Scales of float32 behind the product."""
    return (linear(x, weight.to(x.dtype)).float() * scale).to(x.dtype)


def unsigned(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Of uint8, around 128."""
    return linear(x, (weight.to(torch.uint8).to(x.dtype) - 128) * scale.to(x.dtype).unsqueeze(-1))


def shifted_by_number(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A number as the zero point of all."""
    return linear(x, (weight.to(x.dtype) - 8) * scale.to(x.dtype).unsqueeze(-1))


def listed(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The group of each input by a list."""
    group = torch.arange(weight.shape[1], device=x.device).flip(0) // 32
    return x @ (weight.t().to(x.dtype) * scale.t().to(x.dtype)[group])


WEIGHTS = (
    Example("scales of channels", of_channels, narrow_layer(5)),
    Example("scales behind the product", behind, narrow_layer(2, 3)),
    Example("turned, with a bias", transposed, narrow_layer(5, bias=True)),
    Example("zero points", with_zeros, narrow_layer(2, 3, zeros=True)),
    Example("groups of inputs", of_groups, narrow_layer(5, groups=3)),
    Example("groups of inputs with zero points", of_groups, narrow_layer(2, 3, groups=3, zeros=True)),
    Example("a row of each group", rows_of_groups, narrow_layer(5, groups=3)),
    Example("groups of a turned weight", groups_of_columns, narrow_layer(2, 3, groups=3, zeros=True)),
    Example("heads", by_heads("tk,hdk->thd"), narrow_layer(5)),
    Example("heads of a batch", by_heads("btk,hdk->bthd"), narrow_layer(2, 3)),
    Example("joined heads", joined_heads, narrow_layer(5)),
    Example("one scale behind", one_behind, narrow_layer(5)),
    Example("scales of float32 behind", float32_behind, narrow_layer(5)),
    Example("in uint8", unsigned, narrow_layer(5), "it is uint8"),
    Example("a number as zero point", shifted_by_number, narrow_layer(5), "it is a number"),
    Example("groups in a list", listed, narrow_layer(5, groups=3), "groups of inputs look theirs up by a list"),
    Example("scales of inputs", of_inputs, narrow_layer(5), "neither one of each output channel"),
    Example(
        "zero points behind", zeros_behind, narrow_layer(5, zeros=True), "added to the int8 weight behind its scale"
    ),
)

TRIED = {"quantised_linear": WEIGHTS}
