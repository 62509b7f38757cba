"""SwiGLU between two products in int8: sums of products dequantised, the gated product quantised again."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from fusion.operators import encodings
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, FLOATS, HALVES, INT32, INT64, compute_dtype
from fusion.operators.limits import A2_A3, HOST, Limit
from fusion.operators.operator import Operator
from fusion.operators.quant.quantisation import by_group_of_row

_CLAMPED = "swiglu_mode in (1, 2)"


def _dequant_swiglu_quant(given: Given) -> tuple[Tensor, Tensor]:
    x, groups = given["x"], given["group_index"]
    y = _gated(_dequantised(given), given)
    if given["quant_scale"] is not None:
        y = y * _per_row(given["quant_scale"].to(y.dtype), given)
    if groups is not None:
        row = torch.arange(y.shape[0], device=y.device)
        y = y.masked_fill((row >= groups.sum())[:, None], 0)
    top = y.abs().amax(-1, keepdim=True)
    stored = encodings.INT8.stored(y * (encodings.INT8.bound / top.masked_fill(top == 0, 1.0)))
    lead = x.shape[:-1]
    return stored.view(*lead, stored.shape[-1]).contiguous(), (top / encodings.INT8.bound).view(lead).contiguous()


def _per_row(factors: Tensor, given: Given) -> Tensor:
    """Return the `factors` [G, N] or [N] of the rows of a call: [N] of all, [rows, N] by the group of each row."""
    if given["group_index"] is None:
        return factors.reshape(-1)
    return by_group_of_row(factors, given["group_index"].cumsum(0), math.prod(given["x"].shape[:-1]), 0.0)


def _dequantised(given: Given) -> Tensor:
    """Return the rows [rows, D] of `x` in floats: floats as they are, sums of int8 products with bias and scales."""
    rows = given["x"].flatten(0, -2)
    if rows.dtype.is_floating_point:
        return rows.to(compute_dtype(rows))
    if given["bias"] is not None:
        rows = rows + given["bias"].reshape(-1)
    scaled = rows.to(given["weight_scale"].dtype) * _per_row(given["weight_scale"], given)
    scale = given["activation_scale"]
    return scaled if scale is None else scaled * scale.reshape(-1, 1)


def _gated(rows: Tensor, given: Given) -> Tensor:
    """Return the gated product of the halves of `rows` [rows, D], or of their even and odd lanes, clamped by mode."""
    if given["swiglu_mode"] == 1:
        gate, value = rows.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate, value = rows.chunk(2, -1)[:: 1 if given["activate_left"] else -1]
    if given["swiglu_mode"] == 0:
        return silu(gate) * value
    limit = given["clamp_limit"]
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(given["glu_alpha"] * gate) * (value + given["glu_bias"])


def _outputs(x: Tensor, weight_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(x) if weight_scale is None else weight_scale.dtype
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8)
    return y, x.new_empty(x.shape[:-1], dtype=wide)


_INTEGERS = "dtype(x) == 'int32'"
_OTHER_CHIP = "torch_npu reads it on Ascend 950 alone"

DEQUANT_SWIGLU_QUANT = Operator(
    schema=(
        "npu::npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
        "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
        "bool activate_left=False, int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, "
        "int swiglu_mode=0, float clamp_limit=7., float glu_alpha=1.702, float glu_bias=1.) -> (Tensor, Tensor)"
    ),
    compute=_dequant_swiglu_quant,
    uncomputed={
        "quant_offset": "only the static quantisation has one",
        "dst_type round_mode activate_dim": _OTHER_CHIP,
    },
    without_effect=frozenset({"quant_mode"}),
    outputs=_outputs,
    dims={
        "x": "*B D",
        "weight_scale": "*W",
        "activation_scale": "*A",
        "bias": "*Z",
        "quant_scale": "*Q",
        "group_index": "Gi",
    },
    dtypes={
        "x": HALVES | INT32,
        "weight_scale activation_scale": FLOAT32,
        "bias": INT32,
        "quant_scale": FLOATS,
        "group_index": INT64,
    },
    limits={
        HOST: (
            "rank(x) > 1",
            "D % 2 == 0",
            Limit("quant_mode == 1", because="its page multiplies by a static scale where its test divides by it"),
            "swiglu_mode in (0, 1, 2)",
            Limit("clamp_limit > 0", when=_CLAMPED),
            Limit("given(weight_scale)", when=_INTEGERS, because="sums of int8 products have no other scale"),
            Limit("not given(weight_scale)", when=f"not ({_INTEGERS})", because="its test ignores it"),
            Limit("not given(activation_scale)", when=f"not ({_INTEGERS})", because="floats have none"),
            Limit(
                "not given(bias)", when=f"not ({_INTEGERS}) or given(group_index)", because="its page has none there"
            ),
            Limit("shape(weight_scale) == (Gi, D)", when="given(group_index) and given(weight_scale)"),
            Limit("numel(weight_scale) == D", when="not given(group_index) and given(weight_scale)"),
            Limit("numel(activation_scale) * D == numel(x)", when="given(activation_scale)", because="one of each row"),
            Limit("numel(bias) == D", when="given(bias)"),
            Limit("shape(quant_scale) == (Gi, D // 2)", when="given(group_index) and given(quant_scale)"),
            Limit("numel(quant_scale) * 2 == D", when="not given(group_index) and given(quant_scale)"),
        ),
        **dict.fromkeys(A2_A3, (Limit("D // 2 <= 10496 and D % 128 == 0", when="given(group_index)"), "rank(x) == 2")),
    },
    source=(
        "op-plugin: torch_npu.npu_dequant_swiglu_quant (A2 and A3), DequantSwigluQuantOpApi.cpp and "
        "test_npu_dequant_swiglu_quant.py"
    ),
    summary=(
        "v = (x + bias) · weight_scale[group] · activation_scale of int32, or x; a, b = its halves, the first or, "
        "without activate_left, the second activated, or its even and odd lanes (swiglu_mode 1); mode 0: "
        "y = a · sigmoid(a) · b; 1, 2: a, |b| ≤ clamp_limit, y = a · sigmoid(glu_alpha · a) · (b + glu_bias); "
        "y · quant_scale[group] quantised token by token; rows behind the groups are not documented, here 0"
    ),
)
