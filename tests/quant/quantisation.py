"""Linear layers in int8, as people write them: a scale of each token, one of each output channel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import DYNAMIC_QUANT, QUANT_MATMUL, Form, LookAlike, Spelling, activations, generator, look_alike

K, N = 64, 40


def divided(x):
    scale = x.float().abs().amax(dim=-1, keepdim=True) / 127.0
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def dim_dropped(x):
    scale = x.abs().amax(-1).float() / 127
    return torch.round(x / scale.unsqueeze(-1)).clamp(-127, 127).char(), scale[..., None]


def largest_value(x):
    scale = torch.max(torch.abs(x.float()), dim=-1, keepdim=True)[0] * (1 / 127)
    return torch.clamp(torch.round(x.float() / scale), -128, 127).to(dtype=torch.int8), scale


def inverse_kept(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() * scale.reciprocal()).round().to(torch.int8), scale


def other_way_round(x):
    largest = x.float().abs().amax(-1, keepdim=True)
    return (x.float() * (127.0 / largest)).round().to(torch.int8), largest / 127.0


def smooth_quant(x):
    scales = x.abs().max(dim=-1, keepdim=True)[0].float()
    scales.clamp_(min=1e-5).div_(127)
    return x.float().div(scales).round_().to(torch.int8), scales


def least_scale(x):
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-8)
    return (x.float() / scale).clamp(-128, 127).round().to(torch.int8), scale


def zeros_replaced(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x.float() / scale).round().to(torch.int8), scale


def zeros_filled(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    scale = scale.masked_fill(scale == 0, 1.0)
    return (x.float() / scale).round().to(torch.int8), scale


def in_model_dtype(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def through_int32_and_half(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    whole = (x.float() / scale).round().to(torch.int32)
    return whole.to(torch.float16).trunc().to(torch.int8), scale


def through_int64(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().long().clamp(-128, 127).to(torch.int8), scale


def smallest_and_largest(x):
    low, high = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
    scale = torch.maximum(-low, high) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def smallest_and_largest_around_zero(x):
    low, high = torch.aminmax(x.float(), dim=-1)
    zero = torch.zeros_like(low)
    scale = (torch.max(-torch.min(low, zero), torch.max(high, zero)) / 127).clamp(min=1e-8)[..., None]
    return torch.clamp(torch.round(x.float() / scale), -128, 127).to(torch.int8), scale


def zero_points_of_zeros(x):
    low, high = x.float().amin(-1), x.float().amax(-1)
    low, high = torch.min(low, torch.zeros_like(low)), torch.max(high, torch.zeros_like(high))
    scale = torch.clamp(torch.max(-low, high) / (float(127 - -127) / 2), min=1e-5)
    zero, scale = torch.full_like(scale, 0).view(*x.shape[:-1], 1), scale.view(*x.shape[:-1], 1)
    return torch.clamp(torch.round(x * (1.0 / scale)) + zero, -127, 127).to(torch.int8), scale


def magnitudes_of_both(x):
    low, high = torch.amin(x.float(), dim=-1, keepdim=True), torch.amax(x.float(), dim=-1, keepdim=True)
    low, high = torch.min(low, torch.zeros_like(low)), torch.max(high, torch.zeros_like(high))
    scale = torch.max(torch.abs(low), torch.abs(high)) / 127.0
    scale = torch.clamp(scale, min=torch.finfo(torch.float32).eps)
    return torch.round(torch.clamp(x / scale, -128, 127)).to(torch.int8), scale


def int_mm(q, tokens, weight, scale):
    total = torch._int_mm(q.view(-1, q.shape[-1]), weight.t()).view(*q.shape[:-1], -1)
    return total.float() * tokens * scale


def rows_stay_flat(q, tokens, weight, scale):
    total = torch._int_mm(q.flatten(0, -2), weight.t()) * tokens.reshape(-1, 1)
    return (total * scale).unflatten(0, q.shape[:-1])


def in_float32(q, tokens, weight, scale):
    return F.linear(q.float(), weight.float()) * (tokens * scale)


def in_int32(q, tokens, weight, scale):
    return q.int() @ weight.int().t() * scale * tokens


def channels_in_a_row(q, tokens, weight, scale):
    return torch.matmul(q.float(), weight.t().float()) * tokens * scale.view(1, 1, -1)


def by_einsum(q, tokens, weight, scale):
    return tokens * torch.einsum("bsk,nk->bsn", q.float(), weight.float()) * scale


class QuantisedLinear(nn.Module):
    def __init__(self, weight: Tensor, scale: Tensor):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.unsqueeze(-1))

    def forward(self, x):
        q, tokens = divided(x)
        total = torch._int_mm(q.view(-1, q.shape[-1]), self.weight.t()).view(*q.shape[:-1], -1)
        return (total.float() * tokens * self.scale.t()).to(x.dtype)


def with_bias(x, weight, scale):
    q, tokens = divided(x)
    bias = torch.arange(N, device=x.device) / 8
    return (int_mm(q, tokens, weight, scale) + bias).to(x.dtype)


def shared_by_two(x, weight, scale):
    q, tokens = divided(x)
    return tuple(int_mm(q, tokens, each, scale).to(x.dtype) for each in (weight, weight.flip(0)))


Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def layer(quantise: Quantise, multiply: Callable[..., Tensor] = int_mm) -> Form:
    def form(x, weight, scale):
        return multiply(*quantise(x), weight, scale).to(x.dtype)

    form.__name__ = quantise.__name__ if multiply is int_mm else multiply.__name__
    return form


def rows(B: int, S: int) -> Tensor:
    """The largest of each row is odd / 32: no quotient is halfway between two whole numbers."""
    whole = (activations(71, B, S, K) * 32).clamp(-120, 120)
    largest = whole.abs().amax(-1, keepdim=True)
    return whole.scatter(-1, whole.abs().argmax(-1, keepdim=True), largest + 1 - largest % 2) / 32


def parameters() -> tuple[Tensor, Tensor]:
    weight = torch.randint(-127, 128, (N, K), generator=generator(72), dtype=torch.int8)
    return weight, torch.randint(16, 64, (N,), generator=generator(73)).float() / 2**12


def _whole(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(-1, keepdim=True)
    return (x * 127 / largest).round(), largest / 127


def _layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    q, tokens = _whole(x)
    return torch.einsum("bsk,nk->bsn", q, weight.double()) * tokens * scale.double()


def _spelling(family: str, form: Form, note: str, meaning: Callable[..., Tensor | tuple[Tensor, ...]] = _layer,
              products: int = 1) -> Spelling:  # fmt: skip
    def make(dtype: torch.dtype, B: int, S: int):
        x, kept = rows(B, S).to(dtype), parameters()
        return (form(*kept), (x,)) if isinstance(form, type) else (form, (x, *kept))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        made = meaning(rows(B, S), *parameters())
        return made if isinstance(made, tuple) else (made,)

    narrow = {DYNAMIC_QUANT: 1, QUANT_MATMUL: products}
    name = f"{family}/{form.__name__}"
    return Spelling(name, family, make, {DYNAMIC_QUANT: 1}, expected, note, expect_narrow=narrow)


_ROWS = "dynamic_quant"
_PRODUCT = "quant_matmul"
SPELLINGS = (
    _spelling(_ROWS, layer(divided), "largest magnitude / 127, all in float32"),
    _spelling(_ROWS, layer(dim_dropped), "the scale without the last dim, .char()"),
    _spelling(_ROWS, layer(largest_value), "torch.max along a dim, its values alone"),
    _spelling(_ROWS, layer(inverse_kept), "multiplied by the reciprocal"),
    _spelling(_ROWS, layer(other_way_round), "127 / largest, and largest / 127 afterwards"),
    _spelling(_ROWS, layer(smooth_quant), "SmoothQuant: bounded and divided in place"),
    _spelling(_ROWS, layer(least_scale), "a least scale; bounds before the rounding"),
    _spelling(_ROWS, layer(zeros_replaced), "rows of zeros get the scale 1"),
    _spelling(_ROWS, layer(zeros_filled), "the same by masked_fill"),
    _spelling(_ROWS, layer(in_model_dtype), "16-bit arithmetic"),
    _spelling(_ROWS, layer(through_int32_and_half), "references of CANN: int32, float16, trunc"),
    _spelling(_ROWS, layer(through_int64), "whole numbers before their bounds"),
    _spelling(_ROWS, layer(smallest_and_largest), "max(-min, max)"),
    _spelling(_ROWS, layer(smallest_and_largest_around_zero), "torchao: both bounded by 0"),
    _spelling(_ROWS, layer(zero_points_of_zeros), "torchao, int8 dynamic: zero points that are filled with 0"),
    _spelling(_ROWS, layer(magnitudes_of_both), "compressed-tensors: the larger of two magnitudes"),
    _spelling(_PRODUCT, layer(divided, rows_stay_flat), "flat rows up to the end, one promotion to float32"),
    _spelling(_PRODUCT, layer(divided, in_float32), "whole numbers in float32; scales multiplied first"),
    _spelling(_PRODUCT, layer(divided, in_int32), "int32 matmul"),
    _spelling(_PRODUCT, layer(divided, channels_in_a_row), "transposed before the cast"),
    _spelling(_PRODUCT, layer(divided, by_einsum), "einsum"),
    _spelling(_PRODUCT, QuantisedLinear, "a module with buffers, scale [N, 1]"),
    _spelling(_PRODUCT, with_bias, "a bias behind the scales", lambda x, w, s: _layer(x, w, s) + torch.arange(N) / 8),
    _spelling(
        _PRODUCT, shared_by_two, "one quantisation, two layers",
        lambda x, w, s: (_layer(x, w, s), _layer(x, w.flip(0), s)), products=2,
    ),
)  # fmt: skip


# what resembles them -----------------------------------------------------------------------------------------------


def asymmetric(x, weight, scale):
    low, high = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
    step = (high - low) / 255
    zero = (-128 - low / step).round()
    q = ((x.float() / step).round() + zero).clamp(-128, 127).to(torch.int8)
    return ((q.float() - zero) @ weight.float().t() * step * scale).to(x.dtype)


def signed_maximum(x, weight, scale):
    tokens = x.float().amax(-1, keepdim=True) / 127
    q = (x.float() / tokens).round().clamp(-128, 127).to(torch.int8)
    return int_mm(q, tokens, weight, scale).to(x.dtype)


def along_tokens(x, weight, scale):
    channels = x.float().abs().amax(-2, keepdim=True) / 127
    q = (x.float() / channels).round().clamp(-128, 127).to(torch.int8)
    return ((q.float() * channels) @ weight.float().t() * scale).to(x.dtype)


def divided_by_128(x, weight, scale):
    tokens = x.float().abs().amax(-1, keepdim=True) / 128
    q = (x.float() / tokens).round().clamp(-128, 127).to(torch.int8)
    return int_mm(q, tokens, weight, scale).to(x.dtype)


def divided_by_half_of_255(x, weight, scale):
    low, high = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
    tokens = torch.max(torch.abs(low), torch.abs(high)) / (255.0 / 2)
    q = torch.round(torch.clamp(x.float() / tokens, -128, 127)).to(torch.int8)
    return int_mm(q, tokens, weight, scale).to(x.dtype)


def weights_alone(x, weight, scale):
    return F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)


def groups_of_channels(x, weight, scale):
    q, tokens = divided(x)
    parts = [q[..., i : i + 32].float() @ weight[:, i : i + 32].float().t() for i in (0, 32)]
    return ((parts[0] * scale + parts[1] * scale.flip(0)) * tokens).to(x.dtype)


def with_two_biases(x, weight, scale):
    q, tokens = divided(x)
    bias = torch.arange(N, device=x.device) / 8
    return (int_mm(q, tokens, weight, scale) + bias + bias.flip(0)).to(x.dtype)


def _inputs(B: int, S: int) -> tuple[Tensor, ...]:
    return rows(B, S), *parameters()


LOOKALIKES: tuple[LookAlike, ...] = (
    look_alike(_ROWS, asymmetric, "one is added to the int8", (DYNAMIC_QUANT,), _inputs, None),
    look_alike(_ROWS, signed_maximum, "it is not the largest of each row", (DYNAMIC_QUANT,), _inputs, None),
    look_alike(_ROWS, along_tokens, "several tokens share one", (DYNAMIC_QUANT,), _inputs, None),
    look_alike(_ROWS, divided_by_128, "becomes 128; npu_dynamic_quant requires 127", (DYNAMIC_QUANT,), _inputs, _layer),
    look_alike(
        _ROWS,
        divided_by_half_of_255,
        "becomes 127.5, by the operator 127",
        (DYNAMIC_QUANT,),
        _inputs,
        None,
        note="compressed-tensors as it computes scales itself",
    ),
    look_alike(_PRODUCT, weights_alone, "", (QUANT_MATMUL,), _inputs, None, note="activations are no whole numbers"),
    look_alike(
        _PRODUCT,
        with_two_biases,
        "result: it is torch.float32",
        (QUANT_MATMUL,),
        _inputs,
        _layer,
        note="the operator adds one bias, and rounds behind it",
    ),
    look_alike(
        _PRODUCT, groups_of_channels, "", (), _inputs, None, note="each group with a scale of its own is a product"
    ),
)
