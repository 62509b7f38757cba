"""Products of floats with int8 weights; and quantisation of rows that are multiplied by a rotation matrix before.

w[k, n] = round((weight[k, n] + offset[k / g, n]) · scale[k / g, n])        out[m, n] = Σ_k x[m, k] · w[k, n] + bias[n]
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.dtype_sets import FLOAT32, HALVES, INT8, compute_dtype
from fusion.operators.flops import product
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator
from fusion.operators.quant.quantisation import INT4_CODE, INT8_CODE, RESULTS


def _per_input(each: Tensor, inputs: int, group: int) -> Tensor:
    """Repeat numbers of groups [G, N] of `group` inputs to [`inputs`, N]; return those of channels, [N] or [1, N], for
    which `group` is 0, unchanged."""
    return each.repeat_interleave(group, 0)[:inputs] if group else each


def _weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None,
    bias: Tensor | None,
    antiquant_group_size: int,
) -> Tensor:
    wide, how = compute_dtype(x), (weight.shape[0], antiquant_group_size)
    w = weight.to(wide)
    w = w if antiquant_offset is None else w + _per_input(antiquant_offset.to(wide), *how)
    w = (w * _per_input(antiquant_scale.to(wide), *how)).to(x.dtype)
    out = torch.matmul(x.to(wide), w.to(wide))
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


_GROUPS = "antiquant_group_size > 0"
_KERNEL = (
    "K <= 65535 and N <= 65535",
    "dtype(antiquant_scale) == dtype(x)",
    Limit("dtype(antiquant_offset) == dtype(x)", when="given(antiquant_offset)"),
    Limit("dtype(bias) == 'float32'", when="given(bias) and dtype(x) == 'bfloat16'"),
    Limit("dtype(bias) == 'float16'", when="given(bias) and dtype(x) == 'float16'"),
    Limit("antiquant_group_size >= 32 and antiquant_group_size < K", when=_GROUPS),
    Limit("antiquant_group_size % 32 == 0", when=_GROUPS),
)

WEIGHT_QUANT_BATCHMATMUL = Operator(
    schema=(
        "npu::npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, "
        "Tensor? antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, "
        "int antiquant_group_size=0, int inner_precise=0, int? weight_dtype=None) -> Tensor"
    ),
    compute=_weight_quant_batchmatmul,
    uncomputed={
        "quant_scale quant_offset": "results of int8 are not decomposed",
        "weight_dtype": "packed weights are not decomposed",
    },
    without_effect=frozenset({"inner_precise"}),
    outputs=lambda x, weight: x.new_empty((x.shape[0], weight.shape[1])),
    dims={"weight": "K N", "x": "M K", "antiquant_scale antiquant_offset": "1|N / G N", "bias": "N"},
    dtypes={"x": HALVES, "weight": INT8, "antiquant_scale antiquant_offset": HALVES, "bias": HALVES | FLOAT32},
    limits={
        "host": (
            Limit("rank(antiquant_scale) == 1 or length(antiquant_scale) == 1", when="antiquant_group_size == 0"),
            Limit("rank(antiquant_scale) == 2", when=_GROUPS),
            Limit(
                "K <= length(antiquant_scale) * antiquant_group_size", when=_GROUPS, because="each input has a group"
            ),
            Limit("length(antiquant_scale) * antiquant_group_size < K + antiquant_group_size", when=_GROUPS),
            Limit("shape(antiquant_offset) == shape(antiquant_scale)", when="given(antiquant_offset)"),
            Limit("inner_precise == 0", because="the faster sums are not decomposed"),
        ),
        **dict.fromkeys(A2_A3, _KERNEL),
    },
    flops=lambda x, weight: product(x, weight.shape[1]),
    source="op-plugin: torch_npu.npu_weight_quant_batchmatmul (A2 and A3; a weight of int8, ND)",
    rounds="(weight + antiquant_offset) · antiquant_scale",
    summary="out = round(x · round((weight + antiquant_offset) · antiquant_scale) + bias), sums in float32",
)


def _rotate_quant(x: Tensor, rotation: Tensor, dst_dtype: int | None) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(x)
    blocks = x.to(wide).unflatten(-1, (-1, rotation.shape[0]))
    rotated = torch.matmul(blocks, rotation.to(wide)).flatten(-2).to(x.dtype)
    return RESULTS[dst_dtype].quantised(rotated.to(wide))


def _rotate_quant_outputs(x: Tensor, dst_dtype: int | None) -> tuple[Tensor, Tensor]:
    return RESULTS[dst_dtype].empty(x), x.new_empty(x.shape[:1], dtype=compute_dtype(x))


_MX = "of MX formats, which Ascend 950 alone has"

ROTATE_QUANT = Operator(
    schema=(
        "npu::npu_rotate_quant(Tensor x, Tensor rotation, *, Tensor? alpha=None, int? dst_dtype=None, int? axis=-1, "
        'str? round_mode="rint", int? scale_alg=0, float? dst_type_max=0., bool? transpose_y=False) -> (Tensor, Tensor)'
    ),
    compute=_rotate_quant,
    uncomputed={"alpha": f"it is {_MX}"},
    without_effect=frozenset({"axis", "round_mode", "scale_alg", "dst_type_max", "transpose_y"}),
    outputs=_rotate_quant_outputs,
    dims={"rotation": "K K", "x": "M D"},
    dtypes={"x rotation": HALVES},
    limits={
        "host": (
            "D % K == 0",
            "axis in (-1, 1)",
            Limit(f"dst_dtype in {tuple(RESULTS)}", because=f"other results are {_MX}"),
            Limit("D % 8 == 0", when=f"dst_dtype == {INT4_CODE}", because="eight int4 fill an int32"),
            Limit("round_mode == 'rint'", because="other roundings are not decomposed"),
            Limit("scale_alg == 0", because=f"it is {_MX}"),
            Limit("dst_type_max == 0", because=f"it is {_MX}"),
            Limit("transpose_y == False", because="the operator does not turn its result"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "dtype(rotation) == dtype(x)",
                "K >= 16 and K <= 1024",
                Limit("D >= 128 and D <= 16000", because="D is the width of a row"),
                "D % 8 == 0",
                Limit(
                    f"dst_dtype == {INT8_CODE}",
                    lowering="torchair",
                    because="its converter takes a dtype that is not given for uint8",
                ),
            ),
        ),
    },
    flops=lambda x, rotation: product(x, rotation.shape[0]),
    source="op-plugin: torch_npu.npu_rotate_quant (int8 on A2 and A3 alone); CANN: aclnnRotateQuant",
    summary="v = round(x · rotation), each K lanes of a row; scale = rowmax|v| / 127; y = rint(v / scale); quint4x2: "
    "/ 7, eight int4 in an int32",
)
