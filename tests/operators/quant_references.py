"""What the operators on int8 compute, in float64, row by row and number by number."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import torch
from torch import Tensor


def rows(x: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    whole = torch.zeros(x.shape).double().reshape(-1, x.shape[-1])
    scales = torch.zeros(x.shape[:-1]).double().reshape(-1)
    for i, row in enumerate(x.reshape(-1, x.shape[-1]).tolist()):
        largest = max(abs(v) for v in row)
        scales[i] = largest / most
        if largest:
            # Python rounds a fraction exactly, halves to even.
            whole[i] = torch.tensor([round(Fraction(v) * most / Fraction(largest)) for v in row]).double()
    return whole.reshape(x.shape), scales.reshape(x.shape[:-1])


def packed(whole: Tensor, each: int) -> Tensor:
    """`each` int4 of a row in one number: the first in the lowest four bits."""
    bits, lanes = 4 * each, whole.shape[-1] // each
    out = []
    for row in whole.reshape(-1, whole.shape[-1]).long().tolist():
        words = [sum((row[each * lane + i] % 16) << (4 * i) for i in range(each)) for lane in range(lanes)]
        out += [word - (1 << bits) if word >> (bits - 1) else word for word in words]
    return torch.tensor(out).double().reshape(*whole.shape[:-1], lanes)


def int4_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    whole, scale = rows(x, 7)
    return packed(whole, 8), scale


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().max(-1, keepdim=True).values / 448
    quotient = (x / scale).nan_to_num(0.0)  # Ascend C, Cast to float8: NaN, here 0 / 0 of a row of zeros, becomes 0
    return quotient.to(torch.float8_e4m3fn), scale.squeeze(-1)


def of_row(factors: Tensor, ends: list[int], row: int, otherwise: float) -> Any:
    """What the group of a row has; `otherwise` behind the last group."""
    group = next((g for g, end in enumerate(ends) if row < end), None)
    return otherwise if group is None else factors[group]


def dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None = None, group_index: Tensor | None = None, dst_type: int | None = None,
    quant_mode: str = "pertoken",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    quantised = {16: int4_rows, 24: float8_rows}.get(dst_type or 0, rows)
    if quant_mode == "perchannel":
        columns = input if smooth_scales is None else input * smooth_scales[:, None]
        assert dst_type != 16
        whole, scale = quantised(columns.transpose(-1, -2))
        return whole.transpose(-1, -2), scale
    if group_index is not None:
        flat = input.reshape(-1, input.shape[-1])
        scaled = [row * of_row(smooth_scales, group_index.tolist(), i, 1.0) for i, row in enumerate(flat)]
        input = torch.stack(scaled).reshape(input.shape)
    elif smooth_scales is not None:
        input = input * smooth_scales
    if quant_mode == "pertensor":
        whole, scale = quantised(input.reshape(1, -1))
        return whole.reshape(*input.shape[:-1], -1), scale
    return quantised(input)


def swiglu_quant(
    x: Tensor, smooth_scales: Tensor | None = None, offsets: Tensor | None = None, group_index: Tensor | None = None,
    activate_left: bool = False, quant_mode: int = 0, group_list_type: int = 0, dst_type: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Row by row; the scale is what rows were multiplied by, as CANN's formula has it."""
    assert dst_type != 16
    half, most = x.shape[-1] // 2, 127
    gate, up = (x[..., :half], x[..., half:]) if activate_left else (x[..., half:], x[..., :half])
    y = (gate / (1 + (-gate).exp()) * up).reshape(-1, half)
    counted = [] if group_index is None else group_index.tolist()
    ends = [sum(counted[: i + 1]) for i in range(len(counted))] if group_list_type else counted
    whole, scales = torch.zeros(y.shape).double(), torch.zeros(len(y)).double()
    for i, row in enumerate(y):
        factor = 1.0 if smooth_scales is None else smooth_scales[0] if not ends else of_row(smooth_scales, ends, i, 1.0)
        offset = 0.0 if offsets is None else offsets[0] if not ends else of_row(offsets, ends, i, 0.0)
        row = row * factor + offset
        if quant_mode == 1:
            scales[i] = most / row.abs().max()
            row = row * scales[i] if row.any() else row
        whole[i] = torch.tensor([max(-1 - most, min(most, round(v))) for v in row.tolist()]).double()
    return whole.reshape(*x.shape[:-1], -1), scales.reshape(x.shape[:-1])


RANGES = {0: (0, 255), 13: (0, 255), 3: (-(2**31), 2**31 - 1), 14: (-(2**31), 2**31 - 1), 16: (-8, 7)}


def quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:  # fmt: skip
    """Number by number; without div_mode an axis is the last, whatever is told, unless it is -2."""
    least, most = RANGES.get(dtype, (-128, 127))
    axis = axis % input.ndim if div_mode or axis == -2 else input.ndim - 1

    def of(each: Tensor, place: tuple[int, ...]) -> Fraction:
        if each.ndim == input.ndim and input.ndim > 1:
            return Fraction(each[tuple(min(i, n - 1) for i, n in zip(place, each.shape, strict=True))].item())
        return Fraction(each[place[axis] if len(each) > 1 else 0].item())

    out = torch.zeros(input.shape).double()
    for place in product(*map(range, input.shape)):
        value, scale = Fraction(input[place].item()), of(scales, place)
        number = value / scale if div_mode else value * scale
        zero = 0 if zero_points is None else of(zero_points, place)
        out[place] = max(least, min(most, round(number + zero)))
    return packed(out, 8) if dtype == 16 else out


def quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, output_dtype: int | None = None, pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None, offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    total = (x1.long().unsqueeze(-1) * x2.long().unsqueeze(-3)).sum(-2)
    whole = bias is not None and not bias.is_floating_point()
    if output_dtype == 3:
        return total + bias if whole else total
    out = (total + bias if whole else total).double() * scale
    out = out if pertoken_scale is None else out * pertoken_scale[:, None]
    out = out if bias is None or whole else out + bias
    if output_dtype not in (None, 1):
        return out
    return (out + (0 if offset is None else offset)).round().clamp(-128, 127)


def norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6, **more: Any) -> tuple[Tensor, ...]:
    total, quantised = x1 + x2, int4_rows if more.get("y_dtype") == 16 else rows
    y = total / (total.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma + more.get("beta", 0)
    factors = [more.get("smooth_scale1"), more.get("smooth_scale2")]
    wanted = more.get("output_mask") or [True, factors[1] is not None]
    made = [
        quantised(y if factor is None else y * factor) if each else (torch.zeros(0).double(), torch.zeros(0).double())
        for factor, each in zip(factors, wanted, strict=True)
    ]
    return made[0][0], made[1][0], total, made[0][1], made[1][1]


def fixed(x: Tensor, scale: Tensor, zero: Tensor | None, divides: bool = True) -> Tensor:
    """Each number by its scale, and its zero point, rounded once; exactly, halves to even."""
    scales, zeros = scale.expand(x.shape), torch.zeros(1).expand(x.shape) if zero is None else zero.expand(x.shape)
    rounded = [
        min(max(round((Fraction(n) / Fraction(s) if divides else Fraction(n) * Fraction(s)) + int(z)), -128), 127)
        for n, s, z in zip(*(each.flatten().tolist() for each in (x, scales, zeros)), strict=True)
    ]
    return torch.tensor(rounded).double().reshape(x.shape)


def static_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, epsilon: float = 1e-6,
    dst_dtype: int | None = None,
) -> Tensor:  # fmt: skip
    assert dst_dtype in (None, 1)
    return fixed(x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma + beta, scale, offset)


def added_static_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, scales1: Tensor, zero_points1: Tensor | None, epsilon: float = 1e-6,
    beta: Tensor | None = None, scales2: Tensor | None = None, zero_points2: Tensor | None = None,
    div_mode: bool = True, axis: int = -1, dst_type: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert axis == -1
    assert dst_type in (None, 1)
    total = x1 + x2
    y = total / (total.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma + (0 if beta is None else beta)
    second = torch.zeros_like(total) if scales2 is None else fixed(y, scales2, zero_points2, div_mode)
    return fixed(y, scales1, zero_points1, div_mode), second, total


def weight_quant_batchmatmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_group_size: int = 0,
    antiquant_offset: Tensor | None = None, bias: Tensor | None = None, inner_precise: int = 0,
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


def rotate_quant(x: Tensor, rotation: Tensor, dst_dtype: int | None = None, **same: Any) -> tuple[Tensor, Tensor]:
    k = rotation.shape[0]
    parts = [torch.einsum("mi,ij->mj", x[:, start : start + k], rotation) for start in range(0, x.shape[1], k)]
    return (int4_rows if dst_dtype == 16 else rows)(torch.cat(parts, 1))


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
