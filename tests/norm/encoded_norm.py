"""Norms in front of layers in W8A8 static, as people write them: one scale of all activations, and a zero point."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_QUANT,
    QUANT_MATMUL,
    RMS_NORM_QUANT,
    LookAlike,
    Spelling,
    activations,
    generator,
    look_alike,
    weights,
)

from .rms_norm import reference as rms_norm_reference

D, N, EPS = 128, 40, 1e-6
SCALE, ZERO = 5 / 512, 3
CHANNELS = [2.0 ** -(8 + n % 5) for n in range(N)]
"""Scales of channels, by which whole numbers are multiplied without rounding."""


def rms_norm(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(x.dtype)


def torch_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def layer(q, weight, dtype):
    total = torch._int_mm(q.view(-1, q.shape[-1]), weight.t()).view(*q.shape[:-1], -1)
    return (total.float() * torch.tensor(CHANNELS, device=q.device)).to(dtype)


def fixed(x):
    return nn.Parameter(x, requires_grad=False)


class W8A8Static(nn.Module):
    """A linear layer whose input has one scale and one zero point; what that adds is in its bias."""

    def __init__(self, weight: Tensor, scale: Tensor, offset: Tensor):
        super().__init__()
        bias, channels = -ZERO * weight.sum(-1, dtype=torch.int32), torch.tensor(CHANNELS)
        self.weight, self.quant_bias, self.deq_scale = map(fixed, (weight, bias, channels))
        self.hold(scale, offset)

    def hold(self, scale, offset):
        self.input_scale, self.input_offset = fixed(scale), fixed(offset)

    def quantised(self, x):
        return torch.clamp(torch.round(x / self.input_scale + self.input_offset), -128, 127).to(torch.int8)

    def forward(self, x):
        q = self.quantised(x)
        total = torch._int_mm(q.flatten(0, -2), self.weight.t()) + self.quant_bias
        return (total.float() * self.deq_scale).to(x.dtype).unflatten(0, x.shape[:-1])


class HeldInBuffers(W8A8Static):
    def hold(self, scale, offset):
        self.register_buffer("input_scale", scale)
        self.register_buffer("input_offset", offset)


class BoundedFirst(W8A8Static):
    def quantised(self, x):
        scaled = x / self.input_scale
        scaled += self.input_offset.to(x.dtype)
        return scaled.clamp(-128, 127).round().to(torch.int8)


class InFloat(W8A8Static):
    def quantised(self, x):
        q = x.float().div(self.input_scale.float()).add_(self.input_offset).round_().clamp_(min=-128, max=127)
        return q.to(dtype=torch.int8)


class RoundedFirst(W8A8Static):
    def quantised(self, x):
        q = torch.round(x.float() * (1.0 / self.input_scale.float())) + self.input_offset
        return torch.clamp(q, -128, 127).to(torch.int8)


class Numbers(W8A8Static):
    def quantised(self, x):
        return (x / SCALE + ZERO).round().clamp(-128, 127).char()


class Block(nn.Module):
    """A residual add and a norm, which may add a bias, in front of a layer."""

    def __init__(
        self, linear: type[W8A8Static], norm: Callable[..., Tensor], gain: Tensor, bias: Tensor, *kept: Tensor
    ):
        super().__init__()
        self.weight, self.bias = nn.Parameter(gain), nn.Parameter(bias)
        self.norm, self.linear = norm, linear(*kept)

    def normed(self, x):
        return self.norm(x, self.weight)

    def forward(self, x, residual):
        residual = residual + x
        return self.linear(self.normed(residual)), residual


class WithBias(Block):
    def normed(self, x):
        return self.norm(x, self.weight) + self.bias


class UnroundedSum(Block):
    def forward(self, x, residual):
        h = x.float() + residual.float()
        y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return self.linear((y * self.weight.float()).to(x.dtype)), h.to(x.dtype)


class ReadTwice(Block):
    def forward(self, x, residual):
        n = self.normed(residual + x)
        return self.linear(n), n


class NoResidual(Block):
    def forward(self, x, residual):
        return self.linear(self.normed(x)), residual


class NoResidualWithBias(WithBias):
    def forward(self, x, residual):
        return self.linear(self.normed(x)), residual


def _inputs(B: int, S: int) -> tuple[Tensor, ...]:
    """x and residual [B, S, D], gain and bias [D] of the norm, weight [N, D] of the layer, scale and zero point [1]."""
    kept = torch.randint(-127, 128, (N, D), generator=generator(84), dtype=torch.int8)
    constants = torch.tensor([SCALE], dtype=torch.float64), torch.tensor([ZERO], dtype=torch.int8)
    x, residual = (activations(seed, B, S, D) for seed in (81, 82))
    return x, residual, weights(83, D), weights(85, D, center=0.0), kept, *constants


def _meaning(x: Tensor, gain: Tensor, bias: Tensor | float, weight: Tensor) -> Tensor:
    n = rms_norm_reference(x, gain, EPS) + bias
    q = (n / SCALE + ZERO).round().clamp(-128, 127) - ZERO
    return torch.einsum("bsk,nk->bsn", q, weight.double()) * torch.tensor(CHANNELS)


def _spelling(label: str, block: type[Block], note: str, emitted: tuple[str, ...] = (ADD_RMS_NORM_QUANT,), *,
              linear: type[W8A8Static] = W8A8Static, norm: Callable[..., Tensor] = rms_norm) -> Spelling:  # fmt: skip
    biased, added = issubclass(block, WithBias), not issubclass(block, NoResidual | NoResidualWithBias)

    def make(dtype: torch.dtype, B: int, S: int):
        x, residual, *kept = (each.to(dtype) if each.is_floating_point() else each for each in _inputs(B, S))
        module = block(linear, norm, *kept).eval().requires_grad_(False)
        return module, (x, residual)

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        x, residual, gain, bias, weight, *_ = _inputs(B, S)
        total = x + residual if added else x
        kept = rms_norm_reference(total, gain, EPS) if block is ReadTwice else total if added else residual
        return _meaning(total, gain, bias if biased else 0, weight), kept

    expect, name = dict.fromkeys(emitted, 1), f"encoded_norm/{label}"
    return Spelling(name, "encoded_norm", make, expect, expected, note, expect_narrow={**expect, QUANT_MATMUL: 1})


ALONE = (RMS_NORM_QUANT,)
SPELLINGS = (
    _spelling("scales_of_parameters", Block, "vLLM-Ascend's layers of msmodelslim: scale and offset held [1]"),
    _spelling("torch_norm", Block, "the same behind F.rms_norm", norm=torch_norm),
    _spelling("anti_outlier", WithBias, "msmodelslim's anti-outlier norms add a bias"),
    _spelling("bounded_first", Block, "compressed-tensors: zero point added in place, bounds before the rounding",
              linear=BoundedFirst),
    _spelling("in_float", Block, "SmoothQuant and torch-int: in place in float32", linear=InFloat),
    _spelling("rounded_first", Block, "torchao and PT2E: a zero point behind the rounding", linear=RoundedFirst),
    _spelling("numbers", Block, "a calibrated model whose constants were folded", linear=Numbers),
    _spelling("unrounded_sum", UnroundedSum, "vLLM's native norm: float32 sum, float32 weight"),
    _spelling("scales_of_buffers", Block, "MindIE: lines of a scale in a buffer would cost a launch each", ALONE,
              linear=HeldInBuffers),
    _spelling("read_twice", ReadTwice, "the norm in floats is a result, too", (ADD_RMS_NORM, "npu::npu_quantize")),
    _spelling("no_residual", NoResidual, "the first layer of a model", ALONE),
    _spelling("no_residual_torch", NoResidual, "behind F.rms_norm, in float32", ALONE, norm=torch_norm, linear=InFloat),
    _spelling("no_residual_rounded", NoResidual, "the same, rounded first", ALONE, linear=RoundedFirst),
    _spelling("no_residual_bias", NoResidualWithBias, "the same with a bias", ALONE),
)  # fmt: skip


# what resembles them -----------------------------------------------------------------------------------------------


def added_behind(n, scale, zero):
    return ((n / scale).round() + (zero + 0.25)).clamp(-128, 127).to(torch.int8)


def bounded_between(n, scale, zero):
    return ((n / scale).clamp(-20, 20) + zero).round().clamp(-128, 127).to(torch.int8)


def bounded_rounded_between(n, scale, zero):
    return ((n / scale).clamp(-20, 20).round() + zero).clamp(-128, 127).to(torch.int8)


def cut_between(n, scale, zero):
    return ((n / scale).trunc() + zero).round().clamp(-128, 127).to(torch.int8)


def whole_between(n, scale, zero):
    return ((n / scale).round().to(torch.int32) + zero).clamp(-128, 127).to(torch.int8)


def cut_off(n, scale, zero):
    return (n / scale + zero).clamp(-128, 127).to(torch.int8)


def seven_bits(n, scale, zero):
    return (n / scale + zero).round().clamp(-64, 63).to(torch.int8)


def multiplied(n, scale, zero):
    return (n * scale.reciprocal() * 0.5 + n * (0.5 / scale) + zero).round().clamp(-128, 127).to(torch.int8)


def other_norm(n, scale, zero):
    return ((n - n.mean(-1, keepdim=True)) / scale + zero).round().clamp(-128, 127).to(torch.int8)


def zero_in_float(n, scale, zero):
    return (n / scale + (zero + 0.25)).round().clamp(-128, 127).to(torch.int8)


def _form(quantise: Callable[..., Tensor]):
    def form(x, residual, gain, bias, weight, scale, zero):
        h = x + residual
        return layer(quantise(rms_norm(h, gain), scale, zero), weight, x.dtype), h

    form.__name__ = quantise.__name__
    return form


def _fused(x, residual, gain, bias, weight, scale, zero):
    n = rms_norm_reference(x + residual, gain, EPS)
    q = (n / scale + zero).round().clamp(-128, 127)
    return torch.einsum("bsk,nk->bsn", q, weight.double()) * torch.arange(1, N + 1) / 2**12, x + residual


_look = partial(look_alike, "encoded_norm", forbid=(ADD_RMS_NORM_QUANT, RMS_NORM_QUANT), inputs=_inputs)
LOOKALIKES: tuple[LookAlike, ...] = (
    _look(_form(added_behind), "it is added to rounded numbers", meaning=None),
    _look(_form(bounded_between), "clamped to -20 and 20 before the zero point", meaning=_fused),
    _look(_form(bounded_rounded_between), "clamped to -20 and 20 before the zero point", meaning=_fused),
    _look(_form(cut_between), "numbers are cut off toward zero", meaning=_fused),
    _look(_form(whole_between), "and may overflow there", meaning=None),
    _look(_form(cut_off), "numbers are cut off toward zero", meaning=_fused),
    _look(_form(seven_bits), "bounded by -64 and 63", meaning=_fused),
    _look(_form(other_norm), "", meaning=_fused, note="what is quantised is centred behind the norm"),
    _look(_form(zero_in_float), "", meaning=_fused, note="the zero point is no whole number"),
)
