"""What the operators on int8 compute, in float64, row by row and number by number."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.zeros(x.shape).double().reshape(-1, x.shape[-1])
    scales = torch.zeros(x.shape[:-1]).double().reshape(-1)
    for i, row in enumerate(x.reshape(-1, x.shape[-1]).tolist()):
        largest = max(abs(v) for v in row)
        scales[i] = largest / 127
        if largest:
            # Python rounds a fraction exactly, halves to even.
            whole[i] = torch.tensor([round(Fraction(v) * 127 / Fraction(largest)) for v in row]).double()
    return whole.reshape(x.shape), scales.reshape(x.shape[:-1])


def dynamic_quant(input: Tensor, smooth_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return rows(input if smooth_scales is None else input * smooth_scales)


def swiglu_quant(x: Tensor, activate_left: bool, quant_mode: int) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    gate, up = (x[..., :half], x[..., half:]) if activate_left else (x[..., half:], x[..., :half])
    return rows(gate / (1 + (-gate).exp()) * up)


def quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:  # fmt: skip
    out = torch.zeros(input.shape).double().reshape(-1, input.shape[-1])
    for i, row in enumerate(input.reshape(-1, input.shape[-1]).tolist()):
        for j, v in enumerate(row):
            of = scales[j % len(scales)].item()
            zero = 0 if zero_points is None else zero_points[j % len(scales)].item()
            number = Fraction(v) / Fraction(of) if div_mode else Fraction(v) * Fraction(of)
            out[i, j] = max(-128, min(127, round(number + Fraction(zero))))
    return out.reshape(input.shape)


def quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, output_dtype: int, pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    total = (x1.long().unsqueeze(-1) * x2.long()).sum(-2)
    whole = bias is not None and not bias.is_floating_point()
    out = (total + bias if whole else total).double() * scale
    out = out if pertoken_scale is None else out * pertoken_scale[:, None]
    return out if bias is None or whole else out + bias


def norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, **more: Any) -> tuple[Tensor, ...]:
    total = x1 + x2
    y = total / (total.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma + more.get("beta", 0)
    factors = [more.get("smooth_scale1"), more.get("smooth_scale2")]
    wanted = more.get("output_mask") or [True, factors[1] is not None]
    made = [
        rows(y if factor is None else y * factor) if each else (torch.zeros(0).double(), torch.zeros(0).double())
        for factor, each in zip(factors, wanted, strict=True)
    ]
    return made[0][0], made[1][0], total, made[0][1], made[1][1]


def fixed(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Each number by its scale, and its zero point, rounded once; exactly, halves to even."""
    scales, zeros = scale.expand(x.shape), torch.zeros(1).expand(x.shape) if zero is None else zero.expand(x.shape)
    rounded = [
        min(max(round(Fraction(n) / Fraction(s) + int(z)), -128), 127)
        for n, s, z in zip(*(each.flatten().tolist() for each in (x, scales, zeros)), strict=True)
    ]
    return torch.tensor(rounded).double().reshape(x.shape)


def static_norm(x: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, epsilon: float) -> Tensor:
    return fixed(x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma + beta, scale, offset)


def added_static_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, scales1: Tensor, zero_points1: Tensor | None, epsilon: float,
    beta: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    total = x1 + x2
    y = total / (total.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma + (0 if beta is None else beta)
    return fixed(y, scales1, zero_points1), torch.zeros_like(total), total


def weight_quant_batchmatmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_group_size: int,
    antiquant_offset: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    k, n = weight.shape
    group = [row // antiquant_group_size for row in range(k)] if antiquant_group_size else None
    scale, offset = (
        None if each is None else each[group] if group else each.expand(k, n)
        for each in (antiquant_scale, antiquant_offset)
    )
    real = (weight.double() + (0 if offset is None else offset)) * scale
    out = torch.stack([(row[:, None] * real).sum(0) for row in x])
    return out if bias is None else out + bias


def rotate_quant(x: Tensor, rotation: Tensor, dst_dtype: int) -> tuple[Tensor, Tensor]:
    k = rotation.shape[0]
    parts = [torch.einsum("mi,ij->mj", x[:, start : start + k], rotation) for start in range(0, x.shape[1], k)]
    return rows(torch.cat(parts, 1))


REFERENCES = {
    "npu_dynamic_quant": dynamic_quant,
    "npu_swiglu_quant": swiglu_quant,
    "npu_quant_matmul": quant_matmul,
    "npu_add_rms_norm_dynamic_quant": norm,
    "npu_add_rms_norm_quant": added_static_norm,
    "npu_rms_norm_quant": static_norm,
    "npu_weight_quant_batchmatmul": weight_quant_batchmatmul,
    "npu_rotate_quant": rotate_quant,
    "npu_quantize": quantize,
}
