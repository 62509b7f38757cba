"""Int8: activations with one scale per token, weights with one per output channel.

scale = rowmax|x| / 127,  y = rint(x / scale)        out[m, n] = (Σ_k x1[m, k] · x2[k, n]) · scale[n] · pertoken_scale[m]
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fusion.operators.contract import A2_A3, CHIPS, Limit, Operator, unused
from fusion.operators.dtypes import BFLOAT16, FLOAT32, HALVES, INT8, INT32, compute_dtype
from fusion.operators.flops import product
from fusion.operators.norm import added, rstd

LARGEST = 127.0
"""The largest number of a symmetric quantisation: -128 is not used."""
EXACT = 1024
"""Products of two int8 of which float32 holds every sum exactly: 1024 · 128² = 2²⁴."""
CODES = {5: torch.float16, 15: torch.bfloat16}
"""torch's numbers of the dtypes of a result."""


def int8(x: Tensor) -> Tensor:
    """The nearest int8, halves to even; what is beyond is the last of them."""
    return x.round().clamp(-128, 127).to(torch.int8)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows of x [.., D], halves to even, and their scales [..]; a row of zeros has scale 0."""
    scale = x.abs().amax(-1, keepdim=True) / LARGEST
    whole = (x / scale.masked_fill(scale == 0, 1.0)).round()
    return whole.to(torch.int8), scale.squeeze(-1).contiguous()


def int8_product(x1: Tensor, x2: Tensor) -> Tensor:
    """x1 [.., M, K] · x2 [.., K, N] of int8, exactly, as int32: in floats, that every device multiplies fast."""
    parts = zip(x1.split(EXACT, -1), x2.split(EXACT, -2), strict=True)
    return reduce(torch.add, [torch.matmul(a.float(), b.float()).to(torch.int32) for a, b in parts])


def _dynamic_quant(input: Tensor, smooth_scales: Tensor | None) -> tuple[Tensor, Tensor]:
    x = input.to(compute_dtype(input))
    return quantised(x if smooth_scales is None else x * smooth_scales.to(x.dtype))


DYNAMIC_QUANT = Operator(
    schema=(
        "npu::npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
        'int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)'
    ),
    compute=_dynamic_quant,
    outputs=lambda input: (
        torch.empty_like(input, dtype=torch.int8),
        input.new_empty(input.shape[:-1], dtype=compute_dtype(input)),
    ),
    dims={"input": "*B D", "smooth_scales": "D"},
    dtypes={"input": HALVES, "smooth_scales": HALVES},
    limits={
        "host": (
            "rank(input) >= 2",
            Limit("quant_mode == 'pertoken'", because="other modes are not decomposed"),
            Limit("not given(group_index)", because="groups of tokens are not decomposed"),
            Limit("not given(dst_type)", because="other results than int8 are not decomposed"),
            Limit("dst_type_max == 0", because="other results than int8 are not decomposed"),
        ),
        **dict.fromkeys(CHIPS, (Limit("dtype(smooth_scales) == dtype(input)", when="given(smooth_scales)"),)),
    },
    source="op-plugin: torch_npu.npu_dynamic_quant (no scale is defined for a row of zeros: 0, as rowmax / 127 is)",
    summary="v = x · smooth_scales in float32; scale = rowmax|v| / 127; y = rint(v / scale), halves to even",
)


QINT8 = 12
"""torch's number of the dtype qint8."""


def _quantize(input: Tensor, scales: Tensor, zero_points: Tensor | None, div_mode: bool) -> Tensor:
    x = input.to(compute_dtype(input))
    y = x / scales.to(x.dtype) if div_mode else x * scales.to(x.dtype)
    return int8(y if zero_points is None else y + zero_points.to(x.dtype))


QUANTIZE = Operator(
    schema=(
        "npu::npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
        "bool div_mode=True) -> Tensor"
    ),
    compute=_quantize,
    outputs=lambda input: torch.empty_like(input, dtype=torch.int8),
    dims={"input": "*B D", "scales": "1|D", "zero_points": "1|D"},
    dtypes={"input": HALVES | FLOAT32, "scales": HALVES | FLOAT32, "zero_points": HALVES | FLOAT32 | INT8 | INT32},
    limits={
        "host": (
            Limit(f"dtype == {QINT8}", because="other results than int8 are not decomposed"),
            Limit("axis == -1", because="scales of other dims than the last are not decomposed"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "rank(input) <= 8",
                "dtype(scales) == dtype(input)",
                Limit("dtype(input) in ('float32', 'bfloat16')", when="div_mode", because="float16 scales multiply"),
                Limit("shape(zero_points) == shape(scales)", when="given(zero_points)"),
                Limit(
                    "dtype(zero_points) in ('int8', 'int32') or "
                    "dtype(zero_points) == 'bfloat16' and dtype(input) == 'bfloat16'",
                    when="given(zero_points) and div_mode",
                ),
                Limit("dtype(zero_points) == dtype(scales)", when="given(zero_points) and not div_mode"),
            ),
        ),
    },
    source=(
        "op-plugin: torch_npu.npu_quantize; CANN: aclnnQuantize (its page asks for scales in the dtype of x, that of "
        "op-plugin takes none in float16 that divide), aclnnAscendQuantV3"
    ),
    summary="y = rint(input / scales + zero_points), or input · scales, in float32, from -128 to 127",
)


def _quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, pertoken_scale: Tensor | None, bias: Tensor | None, output_dtype: int | None
) -> Tensor:
    total = int8_product(x1, x2)
    if bias is not None and not bias.is_floating_point():
        total = total + bias
    wide = compute_dtype(scale)
    out = total.to(wide) * scale.to(wide)
    if pertoken_scale is not None:
        out = out * pertoken_scale.unsqueeze(-1)
    if bias is not None and bias.is_floating_point():
        out = out + bias.to(wide)
    return out.to(result_dtype(scale, output_dtype))


def result_dtype(scale: Tensor, output_dtype: int | None) -> torch.dtype:
    """The dtype asked for; a widened graph, whose scales are float64, keeps that."""
    return scale.dtype if scale.dtype == torch.float64 else CODES.get(output_dtype or 0, torch.int8)


_UNUSED = ("offset", "group_sizes", "y_scale", "x1_dtype", "x2_dtype", "scale_dtype", "pertoken_scale_dtype")
_NOT = "not decomposed"
_KERNEL = (
    Limit("K <= 65535 and N <= 65535"),
    Limit("rank(x1) <= 6"),
    Limit("dtype(scale) == 'float32'", when="output_dtype == 5", because="bfloat16 scales give bfloat16"),
    Limit("dtype(bias) != 'bfloat16'", when="output_dtype == 5 and given(bias)", because="it gives bfloat16"),
    Limit(
        "given(pertoken_scale)",
        when="output_dtype == 5",
        lowering="torchair",
        because="without, a graph needs the scale as npu_trans_quant_param packs it",
    ),
)

QUANT_MATMUL = Operator(
    schema=(
        "npu::npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
        "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, "
        "Tensor? y_scale=None) -> Tensor"
    ),
    compute=_quant_matmul,
    outputs=lambda x1, x2, scale, output_dtype: x1.new_empty(
        (*x1.shape[:-1], x2.shape[-1]), dtype=result_dtype(scale, output_dtype)
    ),
    dims={"x2": "K N", "x1": "*B M K", "scale": "1|N", "pertoken_scale": "M", "bias": "N"},
    dtypes={"x1 x2": INT8, "scale": FLOAT32 | BFLOAT16, "pertoken_scale": FLOAT32, "bias": INT32 | BFLOAT16 | FLOAT32},
    limits={
        "host": (
            Limit(f"output_dtype in {tuple(CODES)}", because=f"results of whole numbers are {_NOT}"),
            *unused(_UNUSED, f"offsets, groups, and other dtypes than int8 are {_NOT}"),
        ),
        **dict.fromkeys(A2_A3, _KERNEL),
    },
    either=frozenset({"x2"}),
    source="op-plugin: torch_npu.npu_quant_matmul (A2 and A3; table of the dtypes that go together)",
    # Int8 is multiplied twice as fast as the 16-bit numbers that targets are rated in.
    flops=lambda x1, x2: product(x1, x2.shape[-1]) / 2,
    summary="out = round(int32(x1 · x2 + bias) · scale · pertoken_scale), or + bias at the end where it is floating",
)


def _norm_quant(
    x1: Tensor, x2: Tensor, gamma: Tensor, smooth_scale1: Tensor | None, smooth_scale2: Tensor | None,
    beta: Tensor | None, epsilon: float, output_mask: Sequence[bool] | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    x, total = added(x1, x2)
    y = total * rstd(total, gamma, epsilon) * gamma.to(total.dtype)
    y = (y if beta is None else y + beta.to(y.dtype)).contiguous()
    made = [
        quantised(y if smooth is None else y * smooth.to(y.dtype)) if wanted else (_none(y, torch.int8), _none(y))
        for smooth, wanted in zip((smooth_scale1, smooth_scale2), _wanted(smooth_scale2, output_mask), strict=True)
    ]
    return made[0][0], made[1][0], x.contiguous(), made[0][1], made[1][1]


def _wanted(smooth_scale2: Tensor | None, output_mask: Sequence[bool] | None) -> Sequence[bool]:
    return (True, smooth_scale2 is not None) if output_mask is None else output_mask


def _none(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What stands for a result that is not there."""
    return like.new_empty([0], dtype=dtype)


def _norm_quant_outputs(
    x1: Tensor, smooth_scale2: Tensor | None, output_mask: Sequence[bool] | None
) -> tuple[Tensor, ...]:
    wanted = _wanted(smooth_scale2, output_mask)
    whole = [x1.new_empty(x1.shape if each else [0], dtype=torch.int8) for each in wanted]
    scales = [x1.new_empty(x1.shape[:-1] if each else [0], dtype=compute_dtype(x1)) for each in wanted]
    return *whole, x1.new_empty(x1.shape), *scales


_SAME = ("x2", "gamma", "smooth_scale1", "smooth_scale2", "beta")
_NORM = (
    "rank(x1) >= 2 and rank(x1) <= 8",
    *(Limit(f"dtype({name}) == dtype(x1)", when=f"given({name})") for name in _SAME),
    "epsilon >= 0",
)

ADD_RMS_NORM_DYNAMIC_QUANT = Operator(
    schema=(
        "npu::npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None, "
        "Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=9.9999999999999995e-07, "
        "bool[2]? output_mask=None, int? y_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_norm_quant,
    outputs=_norm_quant_outputs,
    dims={"gamma": "D", "x1 x2": "*B D", "smooth_scale1 smooth_scale2 beta": "D"},
    dtypes=dict.fromkeys(("x1", *_SAME), HALVES),
    limits={
        "host": (
            Limit("not given(y_dtype)", because="other results than int8 are not decomposed"),
            Limit("given(smooth_scale1)", when="not given(output_mask) and given(smooth_scale2)"),
            Limit("output_mask != (False, False)", when="given(output_mask)"),
            *(
                Limit(f"output_mask in ({alone}, (True, True))", when=f"given(output_mask) and given({factor})")
                for factor, alone in (("smooth_scale1", (True, False)), ("smooth_scale2", (False, True)))
            ),
        ),
        **dict.fromkeys(CHIPS, _NORM),
    },
    source="op-plugin: torch_npu.npu_add_rms_norm_dynamic_quant; kernel: ops-nn norm/add_rms_norm_dynamic_quant",
    summary=(
        "x = round(x1 + x2); n = (x1 + x2) · rstd · gamma (+ beta) in float32 (float16: of x); "
        "y_i, scale_i = dynamic quantisation of n · smooth_scale_i"
    ),
)
