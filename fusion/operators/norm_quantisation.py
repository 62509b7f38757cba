"""RMS norms quantised by a scale that the model holds: y = rint(n / scale + zero_point), from -128 to 127."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.contract import A2_A3, CHIPS, Limit, Operator, unused
from fusion.operators.dtypes import BFLOAT16, FLOAT32, HALVES, INT8, INT32, compute_dtype
from fusion.operators.norm import added, rstd
from fusion.operators.quantisation import int8

_EAGER = frozenset({"eager", "npugraph_ex"})
_OTHERS = "other results than int8 are not decomposed"


def _add_rms_norm_quant(
    x1: Tensor, x2: Tensor, gamma: Tensor, scales1: Tensor, zero_points1: Tensor | None, beta: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, total = added(x1, x2)
    if beta is not None:  # with an offset the bfloat16 kernel normalises the rounded sum, too
        total = x.to(total.dtype)
    y = total * rstd(total, gamma, epsilon)
    # The float16 kernel multiplies by the gain in float16, the bfloat16 kernel in float32.
    y = (y.to(x1.dtype) * gamma).to(y.dtype) if x1.dtype == torch.float16 else y * gamma.to(y.dtype)
    y = y if beta is None else y + beta.to(y.dtype)
    y = y / scales1.to(y.dtype)
    y = y if zero_points1 is None else y + zero_points1.to(y.dtype)
    whole = int8(y).contiguous()
    return whole, torch.zeros_like(whole), x.contiguous()


def _add_rms_norm_quant_outputs(x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    whole = [x1.new_empty(x1.shape, dtype=torch.int8) for _ in range(2)]
    return whole[0], whole[1], x1.new_empty(x1.shape)


def _beside(scale: str, zero_point: str, dtype: str) -> tuple[Limit, ...]:
    """The dtypes of scale and zero point beside x1 of this dtype."""
    return (
        Limit(f"dtype(scales1) == '{scale}'", when=f"dtype(x1) == '{dtype}'"),
        Limit(f"dtype(zero_points1) == '{zero_point}'", when=f"dtype(x1) == '{dtype}' and given(zero_points1)"),
    )


ADD_RMS_NORM_QUANT = Operator(
    schema=(
        "npu::npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1, "
        "Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, "
        "float epsilon=9.9999999999999995e-07, bool div_mode=True, int? dst_type=None) -> (Tensor, Tensor, Tensor)"
    ),
    compute=_add_rms_norm_quant,
    outputs=_add_rms_norm_quant_outputs,
    dims={"gamma": "D", "x1 x2": "*B D", "scales1 zero_points1 beta": "D"},
    dtypes={
        "x1 x2 gamma beta": HALVES,
        "scales1": FLOAT32 | BFLOAT16,
        "zero_points1": INT32 | BFLOAT16,
    },
    limits={
        "host": (
            *unused(("scales2", "zero_points2"), "a second result is not decomposed"),
            Limit("axis == -1", because="other axes are not quantised along"),
            Limit("div_mode", because="multiplying by scales is not decomposed"),
            *unused(("dst_type",), _OTHERS),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "rank(x1) <= 8",
                "dtype(x2) == dtype(x1)",
                "dtype(gamma) == dtype(x1)",
                Limit("dtype(beta) == dtype(x1)", when="given(beta)"),
                *_beside("float32", "int32", "float16"),
                *_beside("bfloat16", "bfloat16", "bfloat16"),
                "epsilon >= 0",
            ),
        ),
    },
    lowerings=_EAGER,
    source=(
        "op-plugin: torch_npu.npu_add_rms_norm_quant (scales and zero points as gamma); CANN: aclnnAddRmsNormQuantV2 "
        "(table of the dtypes that go together); kernel: ops-nn norm/add_rms_norm_quant"
    ),
    summary=(
        "x = round(x1 + x2); n = (x1 + x2) · rstd · gamma in float32 (float16, or with beta: of x) (+ beta); "
        "y1 = rint(n / scales1 + zero_points1), from -128 to 127"
    ),
)


def _rms_norm_quant(x: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, epsilon: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    n = wide * rstd(wide, gamma, epsilon) * gamma.to(wide.dtype) + beta.to(wide.dtype)
    y = n * scale.to(wide.dtype).reciprocal() + offset.to(wide.dtype)
    # The kernel, which takes 16 bits, rounds to float16 on the way to int8.
    return int8(y.half().to(wide.dtype) if x.dtype in HALVES else y).contiguous()


RMS_NORM_QUANT = Operator(
    schema=(
        "npu::npu_rms_norm_quant(Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, "
        "float epsilon=9.9999999999999995e-07, *, int? dst_dtype=None) -> Tensor"
    ),
    compute=_rms_norm_quant,
    outputs=lambda x: x.new_empty(x.shape, dtype=torch.int8),
    dims={"gamma": "D", "x": "*B D", "beta": "D", "scale offset": "1"},
    dtypes={"x gamma beta scale": HALVES, "offset": INT8},
    limits={
        "host": unused(("dst_dtype",), _OTHERS),
        **dict.fromkeys(
            CHIPS,
            ("rank(x) <= 8", *(f"dtype({name}) == dtype(x)" for name in ("gamma", "beta", "scale")), "epsilon >= 0"),
        ),
    },
    lowerings=_EAGER,
    source=(
        "op-plugin: torch_npu.npu_rms_norm_quant, whose formula multiplies by scale; that of CANN: aclnnRmsNormQuant, "
        "op-plugin's test and the kernel, ops-nn norm/rms_norm_quant, divide"
    ),
    summary="n = x · rstd · gamma + beta in float32; y = rint(float16(n / scale + offset)), from -128 to 127",
)
