"""RMS norms quantised by static scales of the model: y = rint(n / scale + zero_point), from -128 to 127."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators import encodings
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, HALVES, INT8, INT32, compute_dtype
from fusion.operators.limits import A2_A3, CHIPS, Limit
from fusion.operators.norm.norms import added, rstd
from fusion.operators.operator import Operator
from fusion.operators.quant.quantisation import INT8_CODE

_OTHERS = "other results than int8 are not decomposed"


def _add_rms_norm_quant(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    x1, gamma, beta = given["x1"], given["gamma"], given["beta"]
    x, total = added(x1, given["x2"])
    if beta is not None:  # with beta the bfloat16 kernel normalises the rounded sum, too
        total = x.to(total.dtype)
    y = total * rstd(total, gamma, given["epsilon"])
    # The float16 kernel multiplies by the gain in float16, the bfloat16 kernel in float32.
    y = (y.to(x1.dtype) * gamma).to(y.dtype) if x1.dtype == torch.float16 else y * gamma.to(y.dtype)
    y = y if beta is None else y + beta.to(y.dtype)
    first, second = (
        _by_channel(y, given[f"scales{number}"], given[f"zero_points{number}"], given["div_mode"]) for number in (1, 2)
    )
    return first, second, x.contiguous()


def _by_channel(y: Tensor, scales: Tensor | None, zero_points: Tensor | None, divides: bool) -> Tensor:
    """Quantise `y` [.., D] to int8: divide by `scales` [D], or multiply unless `divides`, and add `zero_points` [D].
    Without scales return zeros."""
    if scales is None:
        return torch.zeros_like(y, dtype=torch.int8).contiguous()
    y = y / scales.to(y.dtype) if divides else y * scales.to(y.dtype)
    return encodings.INT8.stored(y if zero_points is None else y + zero_points.to(y.dtype)).contiguous()


def _add_rms_norm_quant_outputs(x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = (x1.new_empty(x1.shape, dtype=torch.int8) for _ in range(2))
    return first, second, x1.new_empty(x1.shape)


def _dtype_limits(scale: str, zero_point: str, dtype: str) -> tuple[Limit, ...]:
    """Return the limits that scales and zero points have the dtypes `scale` and `zero_point` if `x1` has `dtype`."""
    x1 = f"dtype(x1) == '{dtype}'"
    return (
        Limit(f"dtype(scales1) == '{scale}'", when=x1),
        Limit(f"dtype(zero_points1) == '{zero_point}'", when=f"{x1} and given(zero_points1)"),
        Limit(f"dtype(scales2) == '{scale}'", when=f"{x1} and given(scales2)"),
        Limit(f"dtype(zero_points2) == '{zero_point}'", when=f"{x1} and given(zero_points2)"),
    )


ADD_RMS_NORM_QUANT = Operator(
    schema=(
        "npu::npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1, "
        "Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, "
        "float epsilon=9.9999999999999995e-07, bool div_mode=True, int? dst_type=None) -> (Tensor, Tensor, Tensor)"
    ),
    compute=_add_rms_norm_quant,
    without_effect=frozenset({"axis", "dst_type"}),
    outputs=_add_rms_norm_quant_outputs,
    dims={"gamma": "D", "x1 x2": "*B D", "scales1 zero_points1 beta scales2 zero_points2": "D"},
    dtypes={
        "x1 x2 gamma beta": HALVES,
        "scales1 scales2": FLOAT32 | BFLOAT16,
        "zero_points1 zero_points2": INT32 | BFLOAT16,
    },
    limits={
        "host": (
            Limit("axis == -1", because="the page has no other axis"),
            Limit(f"dst_type in (None, {INT8_CODE})", because=_OTHERS),
            Limit("given(scales2)", when="given(zero_points2)", because="the second result is of both"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "rank(x1) <= 8",
                "dtype(x2) == dtype(x1)",
                "dtype(gamma) == dtype(x1)",
                Limit("dtype(beta) == dtype(x1)", when="given(beta)"),
                *_dtype_limits("float32", "int32", "float16"),
                *_dtype_limits("bfloat16", "bfloat16", "bfloat16"),
                "epsilon >= 0",
            ),
        ),
    },
    rounds="x1 + x2, and the norm",
    source=(
        "op-plugin: torch_npu.npu_add_rms_norm_quant (scales and zero points as gamma); CANN: aclnnAddRmsNormQuantV2 "
        "(table of the dtypes that go together); kernel: ops-nn norm/add_rms_norm_quant"
    ),
    summary=(
        "x = round(x1 + x2); n = (x1 + x2) · rstd · gamma in float32 (float16, or with beta: of x) (+ beta); "
        "y1 = rint(n / scales1 + zero_points1), or without div_mode rint(n · scales1 + zero_points1), from -128 to "
        "127; y2 likewise, zeros without scales2"
    ),
)


def _rms_norm_quant(x: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, epsilon: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    n = wide * rstd(wide, gamma, epsilon) * gamma.to(wide.dtype) + beta.to(wide.dtype)
    y = n * scale.to(wide.dtype).reciprocal() + offset.to(wide.dtype)
    # The kernel, which takes 16 bits, rounds to float16 on the way to int8.
    return encodings.INT8.stored(y.half().to(wide.dtype) if x.dtype in HALVES else y).contiguous()


RMS_NORM_QUANT = Operator(
    schema=(
        "npu::npu_rms_norm_quant(Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, "
        "float epsilon=9.9999999999999995e-07, *, int? dst_dtype=None) -> Tensor"
    ),
    compute=_rms_norm_quant,
    outputs=lambda x: x.new_empty(x.shape, dtype=torch.int8),
    dims={"gamma": "D", "x": "*B D", "beta": "D", "scale offset": "1"},
    dtypes={"x gamma beta scale": HALVES, "offset": INT8},
    without_effect=frozenset({"dst_dtype"}),
    limits={
        "host": (Limit(f"dst_dtype in (None, {INT8_CODE})", because=_OTHERS),),
        **dict.fromkeys(
            CHIPS,
            ("rank(x) <= 8", *(f"dtype({name}) == dtype(x)" for name in ("gamma", "beta", "scale")), "epsilon >= 0"),
        ),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),  # RmsNormQuant has no prototype for graphs
    source=(
        "op-plugin: torch_npu.npu_rms_norm_quant, whose formula multiplies by scale; that of CANN: aclnnRmsNormQuant, "
        "op-plugin's test and the kernel, ops-nn norm/rms_norm_quant, divide"
    ),
    summary="n = x · rstd · gamma + beta in float32; y = rint(float16(n / scale + offset)), from -128 to 127",
)
