"""Linear layers of floats whose weights are kept in int8, as people write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import (
    QUANT_MATMUL,
    WEIGHT_QUANT,
    Form,
    LookAlike,
    Spelling,
    activations,
    generator,
    look_alike,
    weights,
)

K, N, G = 128, 40, 4


class WeightOnlyInt8Linear(nn.Module):
    def __init__(self, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scale)

    def forward(self, x):
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


def dequantised(x, weight, scale, zero, bias):
    return F.linear(x, weight.to(x.dtype) * scale[:, None], bias)


def in_float32(x, weight, scale, zero, bias):
    return F.linear(x, (weight.float() * scale.float().unsqueeze(1)).to(x.dtype))


def columns(x, weight, scale, zero, bias):
    return x @ (weight.t().contiguous().to(x.dtype) * scale) + bias


def columns_behind(x, weight, scale, zero, bias):
    return torch.matmul(x, weight.t().to(x.dtype)) * scale.view(1, -1) + bias


def by_einsum(x, weight, scale, zero, bias):
    return torch.einsum("bsk,nk->bsn", x, weight.type_as(x) * scale[..., None])


def flat_rows(x, weight, scale, zero, bias):
    y = torch.mm(x.flatten(0, 1), weight.to(x.dtype).t()).mul(scale)
    return y.view(*x.shape[:2], -1)


def whole_scale(x, weight, scale, zero, bias):
    return F.linear(x, weight.to(x.dtype) * scale[0])


def zero_points(x, weight, scale, zero, bias):
    return F.linear(x, (weight.to(x.dtype) - zero[:, None]) * scale[:, None])


def zero_points_in_int8(x, weight, scale, zero, bias):
    return F.linear(x, (weight.to(x.dtype) + zero.to(torch.int8).to(x.dtype)[:, None]) * scale[:, None], bias)


def scaled_twice(x, weight, scale, zero, bias):
    return F.linear(x, weight.to(x.dtype) * scale[:, None]) * scale.flip(0)


def groups(x, weight, scale, zero, bias):
    real = weight.to(x.dtype).view(N, G, -1) * scale.unsqueeze(-1)
    return F.linear(x, real.view(N, K), bias)


def groups_repeated(x, weight, scale, zero, bias):
    scale, zero = (each.repeat_interleave(K // G, dim=-1) for each in (scale, zero))
    return F.linear(x, (weight.to(x.dtype) - zero) * scale)


class PlainInt8(nn.Module):
    def __init__(self, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor):
        super().__init__()
        self.int_data, self.scale, self.bias = (nn.Parameter(each, False) for each in (weight, scale, bias))

    def forward(self, x):
        rows = torch.mm(x.reshape(-1, x.shape[-1]), self.int_data.t().to(x.dtype))
        y = (rows * self.scale.to(rows.dtype)).reshape(*x.shape[:-1], rows.shape[-1])
        y += self.bias.to(rows.dtype)
        return y


def zeros_in_int32(x, weight, scale, zero, bias):
    points = zero.to(torch.int8).view(N, G, 1)
    real = weight.view(N, G, K // G).to(torch.int32) - points.to(torch.int32)
    return F.linear(x, (real.to(x.dtype) * scale.view(N, G, 1)).view(N, K))


def dequantised_groups(x, weight, scale, zero, bias):
    real = weight.unflatten(-1, (-1, K // G)).to(scale.dtype) - zero.to(torch.int8).unsqueeze(-1).to(scale.dtype)
    return F.linear(x, (real * scale.unsqueeze(-1)).flatten(start_dim=-2))


def packed_int4(x, weight, scale, zero, bias):
    packed = sum((weight[:, lane::8].int() % 16) << (4 * lane) for lane in range(8))
    rows = torch.zeros(N, K, dtype=torch.int32, device=x.device)
    for lane in range(8):
        rows[:, lane::8] = (packed >> (4 * lane)) & 15
    real = (rows - 8).to(torch.int8).unflatten(-1, (-1, K // G)).to(scale.dtype) * scale.unsqueeze(-1)
    return F.linear(x, real.flatten(start_dim=-2))


def groups_of_columns(x, weight, scale, zero, bias):
    real = weight.t().to(x.dtype).reshape(G, K // G, N) * scale.t()[:, None]
    return x @ real.reshape(K, N)


Meaning = Callable[..., Tensor]


def _real(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """The weight [N, K] in float64, entry by entry of its channel, or of its group of inputs."""
    wide = [
        each if each.dim() == 1 else each.repeat_interleave(K // G, 1) for each in (scale, zero) if each is not None
    ]
    wide = [each.view(N, -1).expand(N, K) for each in wide]
    return (weight.double() - (wide[1] if len(wide) > 1 else 0)) * wide[0]


def _layer(x, weight, scale, zero, bias):
    return x @ _real(weight, scale).t()


def _with_bias(x, weight, scale, zero, bias):
    return _layer(x, weight, scale, zero, bias) + bias


def _with_zeros(x, weight, scale, zero, bias):
    return x @ _real(weight, scale, zero).t()


def _with_negative_zeros_and_bias(x, weight, scale, zero, bias):
    return x @ _real(weight, scale, -zero).t() + bias


def _of_one_scale(x, weight, scale, zero, bias):
    return x @ _real(weight, scale[:1].expand(N)).t()


def _of_both_scales(x, weight, scale, zero, bias):
    return x @ _real(weight, scale * scale.flip(0)).t()


def _of_int4(x, weight, scale, zero, bias):
    return x @ _real(weight % 16 - 8, scale).t()


def parameters(grouped: bool) -> tuple[Tensor, ...]:
    """A weight [N, K] of int8; scales, powers of two, and zero points [N], or [N, G]; a bias [N]."""
    shape = (N, G) if grouped else (N,)
    weight = torch.randint(-100, 101, (N, K), generator=generator(82), dtype=torch.int8)
    scale = 2.0 ** torch.randint(-9, -6, shape, generator=generator(83)).double()
    zero = torch.randint(-9, 10, shape, generator=generator(84)).double()
    return weight, scale, zero, weights(85, N)


def _spelling(form: Form, note: str, meaning: Meaning = _layer, grouped: bool = False) -> Spelling:
    def make(dtype: torch.dtype, B: int, S: int):
        given = [each.to(dtype) if each.is_floating_point() else each for each in parameters(grouped)]
        x = activations(81, B, S, K).to(dtype)
        return (form(*given).eval(), (x,)) if isinstance(form, type) else (form, (x, *given))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return (meaning(activations(81, B, S, K), *parameters(grouped)),)

    name = form.__name__
    return Spelling(f"weight_only_linear/{name}", "weight_only_linear", make, {WEIGHT_QUANT: 1}, expected, note)


SPELLINGS = (
    _spelling(WeightOnlyInt8Linear, "gpt-fast: the scale behind the product"),
    _spelling(dequantised, "the weight made floats, and a bias", _with_bias),
    _spelling(in_float32, "the weight made floats in float32"),
    _spelling(columns, "a weight [K, N]", _with_bias),
    _spelling(columns_behind, "a weight [K, N], its scale behind the product", _with_bias),
    _spelling(by_einsum, "einsum"),
    _spelling(flat_rows, "flat rows, mm"),
    _spelling(whole_scale, "one scale", _of_one_scale),
    _spelling(zero_points, "zero points of channels", _with_zeros),
    _spelling(zero_points_in_int8, "zero points of int8 that are added", _with_negative_zeros_and_bias),
    _spelling(scaled_twice, "SmoothQuant and a scale: on both sides", _of_both_scales),
    _spelling(groups, "groups of inputs", _with_bias, grouped=True),
    _spelling(groups_repeated, "GPTQ and AWQ references: repeated scales and zero points", _with_zeros, grouped=True),
    _spelling(groups_of_columns, "groups of a weight [K, N]", grouped=True),
    _spelling(PlainInt8, "torchao, int8 weights alone: flat rows, a bias in place", _with_bias),
    _spelling(zeros_in_int32, "torchao, zero points that are whole: differences in int32", _with_zeros, grouped=True),
    _spelling(dequantised_groups, "compressed-tensors, groups with zero points of int8", _with_zeros, grouped=True),
    _spelling(packed_int4, "compressed-tensors, pack-quantized: eight in an int32", _of_int4, grouped=True),
)


# what resembles them -----------------------------------------------------------------------------------------------


def scales_of_inputs(x, weight, scale, zero, bias):
    return F.linear(x, weight.to(x.dtype) * bias.repeat(4)[:K])


def zeros_behind_the_scale(x, weight, scale, zero, bias):
    return F.linear(x, weight.to(x.dtype) * scale[:, None] - zero[:, None])


def scale_of_tokens(x, weight, scale, zero, bias):
    return F.linear(x, weight.to(x.dtype)) * x[..., :1]


def interleaved_groups(x, weight, scale, zero, bias):
    return F.linear(x, (weight.to(x.dtype).view(N, -1, G) * scale[:, None]).view(N, K))


def gated(x, weight, scale, zero, bias):
    return F.linear(x, weight.to(x.dtype)) * F.silu(x[..., :N] + x[..., N : 2 * N])


def tinygemm(x, weight, scale, zero, bias):
    real = (weight.view(N, G, -1) - 8).to(x.dtype) * scale.unsqueeze(-1) + zero.unsqueeze(-1)
    return F.linear(x, real.view(N, K))


def unsigned(x, weight, scale, zero, bias):
    points = zero.to(torch.int8).unsqueeze(-1).to(torch.int32)
    real = (weight.to(torch.uint8).view(N, G, -1).to(torch.int32) - points).to(x.dtype) * scale.unsqueeze(-1)
    return F.linear(x, real.view(N, K))


def wide_zeros(x, weight, scale, zero, bias):
    real = (weight.view(N, G, -1).to(torch.int32) - zero.unsqueeze(-1).to(torch.int32)).to(x.dtype)
    return F.linear(x, (real * scale.unsqueeze(-1)).view(N, K))


def _inputs(grouped: bool) -> Callable[[int, int], tuple[Tensor, ...]]:
    return lambda B, S: (activations(81, B, S, K), *parameters(grouped))


def _not(form: Form, reason: str, meaning: Meaning | None, grouped: bool = False, note: str = "") -> LookAlike:
    return look_alike("weight_only_linear", form, reason, (WEIGHT_QUANT, QUANT_MATMUL), _inputs(grouped), meaning, note)


LOOKALIKES: tuple[LookAlike, ...] = (
    _not(scales_of_inputs, "neither one of each output channel nor of each group", _layer),
    _not(zeros_behind_the_scale, "behind its scale", _with_zeros),
    _not(scale_of_tokens, "", None, note="the weight has no scale"),
    _not(interleaved_groups, "neither one of each output channel nor of each group", _layer, grouped=True),
    _not(tinygemm, "behind its scale", _with_zeros, grouped=True, note="torchao, int4 for tinygemm"),
    _not(unsigned, "it is uint8", _with_zeros, grouped=True, note="torchao, int4 in uint8"),
    _not(wide_zeros, "not proven to be int8", None, grouped=True, note="a zero point may be any whole number"),
    _not(gated, "", None, note="activations are no scale of the weight, not even those of one token"),
)
