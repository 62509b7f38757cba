"""What stands before latent attention with layers in whole numbers by scales and zero points that the model holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.caches import Read, Write, by_block, in_nz, of_nz, viewed
from patterns.examples.caches import of_pages as in_rows
from patterns.examples.inputs import Inputs, normal, under
from patterns.examples.latent_model import attended
from patterns.examples.mla_preprocess import (
    SIZES,
    Rotate,
    Sizes,
    norm,
    of_halves,
    of_pairs,
)  # fmt: skip
from patterns.examples.mla_preprocess import (
    inputs as tokens,
)
from patterns.examples.mla_preprocess import (
    lines as tokens_in_lines,
)
from patterns.examples.quantisation import product

Quantise = Callable[[Tensor, Tensor, Tensor], Tensor]
STEP = 1 / 32
"""A scale that every dtype holds as it is."""


def fixed(given: Inputs, beta: bool = True, zero: torch.dtype = torch.int8) -> Inputs:
    """The inputs of `mla_preprocess`; behind them biases of two norms and three layers, two scales and zero points."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, gain, dq, dq_scale, uq, uq_scale, dkv, dkv_scale, gain_q, *rest = given(dtype)
        scales = (dq_scale / 32, uq_scale / 32, dkv_scale / 32)
        betas = [(normal(30 + n, each.shape[0]) / 8).to(dtype) for n, each in enumerate((gain, gain_q))]
        biases = [(normal(40 + n, each.shape[0]) * 900).to(torch.int32) for n, each in enumerate(scales)]
        constants = [torch.tensor([each]).to(dtype) for each in (0.03, 0.025)]
        zeros = [torch.tensor([each]).to(zero) for each in (5, -9)]
        more = [torch.nn.Parameter(each, requires_grad=False) for each in (*betas, *biases, *constants, *zeros)]
        kept = [torch.nn.Parameter(each, requires_grad=False) for each in scales]
        return (x, gain, dq, kept[0], uq, kept[1], dkv, kept[2], gain_q, *rest, *more)

    return make


def summed(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The sum with the zero point is rounded."""
    return (n.float() / scale.float() + zero).round().clamp(-128, 127).to(torch.int8)


def bounded(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """In the dtype of the model, bounded first."""
    return torch.clamp(n / scale + zero, -128, 127).round().to(torch.int8)


def by_numbers(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Scale and zero point are numbers."""
    return torch.clamp((n.float() / STEP).add(3).round(), -128, 127).to(torch.int8)


def symmetric(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """No zero point."""
    return (n.float() / scale.float()).round().clamp(-128, 127).to(torch.int8)


Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_bias(x: Tensor, gain: Tensor, beta: Tensor) -> Tensor:
    """A norm and a bias."""
    return norm(x, gain) + beta


def without(x: Tensor, gain: Tensor, beta: Tensor) -> Tensor:
    """A norm alone."""
    return norm(x, gain)


Layer = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


def biased(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias among the whole numbers."""
    return ((product(x, weight) + bias).float() * scale).to(dtype)


def bare(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """No bias."""
    return (product(x, weight).float() * scale).to(dtype)


def model(
    write: Write, quantise: Quantise = summed, normed: Norm = with_bias, layer: Layer = biased,
    rotate: Rotate = of_pairs, heads: int = SIZES.n, read: Read = in_rows,
) -> Callable[..., Tensor]:  # fmt: skip
    """A function that writes the rows of a token, or of several, and attends to the pages."""

    def forward(
        x: Tensor, gain: Tensor, dq: Tensor, dq_scale: Tensor, uq: Tensor, uq_scale: Tensor, dkv: Tensor,
        dkv_scale: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor, sin: Tensor, latents: Tensor,
        ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, beta: Tensor, beta_q: Tensor, dq_bias: Tensor,
        uq_bias: Tensor, dkv_bias: Tensor, scale: Tensor, scale_q: Tensor, zero: Tensor, zero_q: Tensor,
    ) -> Tensor:  # fmt: skip
        width, turning = gain_kv.shape[0], cos.shape[-1]
        whole = quantise(normed(x, gain, beta), scale, zero)
        low = normed(layer(whole, dq, dq_scale, dq_bias, x.dtype), gain_q, beta_q)
        q = layer(quantise(low, scale_q, zero_q), uq, uq_scale, uq_bias, x.dtype).unflatten(-1, (heads, -1))
        nope, rope = q.transpose(1, 2).split((q.shape[-1] - turning, turning), dim=-1)
        q = torch.cat((nope, rotate(rope, cos.unsqueeze(1), sin.unsqueeze(1))), dim=-1)
        latent, rope = layer(whole, dkv, dkv_scale, dkv_bias, x.dtype).split((width, turning), dim=-1)
        for pages, rows in ((latents, norm(latent, gain_kv)), (ropes, rotate(rope, cos, sin))):
            write(pages, rows.flatten(0, 1), slots)
        latent, rope = (read(pages, table) for pages in (latents, ropes))
        return attended(q, latent, rope, ukv, lengths)

    return forward


def inputs(queries: int, zero: torch.dtype = torch.int8, sizes: Sizes = SIZES) -> Inputs:
    """With whole pages."""
    return fixed(tokens(queries, sizes=sizes), zero=zero)


def lines(queries: int, line: int = 16, sizes: Sizes = SIZES) -> Inputs:
    """With pages in lines."""
    return fixed(tokens_in_lines(queries, line=line, sizes=sizes))


def behind(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The zero point is added to rounded numbers."""
    return ((n.float() / scale.float()).round() + zero).clamp(-128, 127).to(torch.int8)


def cut(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Cut off toward zero."""
    return (n.float() / scale.float() + zero).clamp(-128, 127).to(torch.int8)


def of_channels(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A scale of each channel."""
    scales = torch.linspace(1, 2, n.shape[-1]) * scale.float()
    return (n.float() / scales + zero).round().clamp(-128, 127).to(torch.int8)


def narrow(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Between -127 and 127."""
    return (n.float() / scale.float() + zero).round().clamp(-127, 127).to(torch.int8)


def odd(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A scale that the dtype of the model does not hold."""
    return (n.float() / 0.0300001 + zero).round().clamp(-128, 127).to(torch.int8)


def times(n: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The scale is that of the other way."""
    return (n.float() * scale.float() + zero).round().clamp(-128, 127).to(torch.int8)


def late(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias behind the scales."""
    return (product(x, weight).float() * scale + bias.float() / 4096).to(dtype)


EXAMPLES = (
    Example("a token", model(viewed), inputs(1)),
    Example("two tokens in lines, no bias", model(in_nz, bounded, without, bare, of_halves, read=of_nz), lines(2)),
    Example("a token by block", model(by_block), inputs(1)),
    Example("numbers", model(viewed, by_numbers), inputs(1)),
    Example("no zero point", model(viewed, symmetric), inputs(1)),
)
REJECTS = (
    Example("rounded before the zero point", model(viewed, behind), inputs(1), "added to rounded numbers"),
    Example("cut off", model(viewed, cut), inputs(1), "cut off toward zero"),
    Example("a scale of each channel", model(viewed, of_channels), inputs(1), "not divided by one scale"),
    Example("other bounds", model(viewed, narrow), inputs(1), "bounded by -127"),
    Example("a zero point in floats", model(viewed), inputs(1, torch.float32), "not proven to be a whole number"),
    Example("a scale that is rounded", model(viewed, odd), inputs(1), "does not hold the scale"),
    Example("multiplied by the scale", model(viewed, times), inputs(1), "where the operator divides"),
    Example("a bias behind the scales", model(viewed, layer=late), inputs(1), "the operator one of int32"),
    Example("short lines", model(in_nz, read=of_nz), lines(1, 8), "in lines of 8 numbers"),
)

TRIED = {"mla_preprocess": under("static", (*EXAMPLES, *REJECTS))}
"""Rule -> its examples and rejects."""
