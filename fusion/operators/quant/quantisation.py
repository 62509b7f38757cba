"""Int8 quantisation: activations with one scale per token, weights with one per output channel.

scale = rowmax|x| / 127,  y = rint(x / scale)        out[m, n] = (Σ_k x1[m, k] · x2[k, n]) · scale[n] · pertoken_scale[m]
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fusion.operators import encodings
from fusion.operators.attention.layouts import with_strides_of
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, HALVES, INT8, INT32, compute_dtype
from fusion.operators.encodings import FLOAT8, Encoding
from fusion.operators.flops import product
from fusion.operators.limits import A2_A3, CHIPS, Limit
from fusion.operators.norm.norms import added, rstd
from fusion.operators.operator import Operator

EXACT = 1024
"""Number of products of two int8 whose sum float32 always represents exactly: 1024 · 128² = 2²⁴."""
CODES = {5: torch.float16, 15: torch.bfloat16}
"""torch's number of a dtype, as `output_dtype` has it -> dtype of a result in floats."""


INT8_CODE, INT4_CODE = encodings.INT8.code, encodings.INT4.code
RESULTS = encodings.results(encodings.INT8, encodings.INT4)
"""torch's number of the dtype of a result, None for int8 -> its encoding."""


_DYNAMIC = encodings.results(encodings.INT8, encodings.INT4, FLOAT8)


def group_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the group of each of `rows` rows, for groups that end at `ends` [G]; G for rows behind the last group."""
    return torch.searchsorted(ends.to(torch.int64), torch.arange(rows, device=ends.device), right=True)


def by_group_of_row(factors: Tensor, ends: Tensor, rows: int, fill: float) -> Tensor:
    """Gather for each of `rows` rows the entry of `factors` [G, ..] of its group; `fill` behind the last group."""
    behind = torch.full_like(factors[:1], fill)
    return torch.cat((factors, behind))[group_of_rows(ends, rows)]


def int8_product(x1: Tensor, x2: Tensor) -> Tensor:
    """Multiply int8 `x1` [.., M, K] by `x2` [.., K, N] exactly, as int32, in parts of float32, which every device
    multiplies fast."""
    parts = zip(x1.split(EXACT, -1), x2.split(EXACT, -2), strict=True)
    return reduce(torch.add, [torch.matmul(a.float(), b.float()).to(torch.int32) for a, b in parts])


def _dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None, dst_type: int | None, quant_mode: str
) -> tuple[Tensor, Tensor]:
    x = input.to(compute_dtype(input))
    if smooth_scales is not None:
        x = x * _smooth(smooth_scales.to(x.dtype), x, group_index, quant_mode)
    encoding = _per(quant_mode, _DYNAMIC[dst_type], x)
    y, scale = encoding.quantised(x)
    return (y if encoding.packing > 1 else with_strides_of(y, input)), scale.reshape(scale.shape or (1,))


def _per(mode: str, encoding: Encoding, x: Tensor) -> Encoding:
    """Return `encoding` with the granularity of `mode`: a scale of each row of `x` [.., S, D], each column, or all."""
    if mode == "pertoken":
        return encoding
    return encoding.per("channel", -2) if mode == "perchannel" else encoding.per("channel", *range(x.dim()))


def _smooth(factors: Tensor, x: Tensor, ends: Tensor | None, mode: str) -> Tensor:
    """Return the smooth scales `factors` in a shape that broadcasts to `x` [.., S, D].

    They are [D], of all rows; [G, D], of groups of rows that end at `ends`; or [S], of each row, in mode "perchannel".
    """
    if mode == "perchannel":
        return factors.unsqueeze(-1)
    return factors if ends is None else by_group_of_row(factors, ends, math.prod(x.shape[:-1]), 1.0).view(x.shape)


def _dynamic_quant_outputs(input: Tensor, dst_type: int | None, quant_mode: str) -> tuple[Tensor, Tensor]:
    *lead, rows, lanes = input.shape
    sizes = {"pertoken": [*lead, rows], "perchannel": [*lead, lanes], "pertensor": [1]}[quant_mode]
    scale = input.new_empty(sizes, dtype=compute_dtype(input))
    encoding = _DYNAMIC[dst_type]
    if encoding.packing > 1:
        return encoding.empty(input), scale
    return torch.empty_like(input, dtype=encoding.torch_dtype), scale


_OTHER_RESULTS = "the formats of 8 bits and fewer of Ascend 950 are not decomposed"

_ROWS = (
    Limit("dtype(smooth_scales) == dtype(input)", when="given(smooth_scales)"),
    Limit("quant_mode == 'pertoken'", because="the page has no other mode"),
)

DYNAMIC_QUANT = Operator(
    schema=(
        "npu::npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
        'int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)'
    ),
    compute=_dynamic_quant,
    uncomputed={"dst_type_max": _OTHER_RESULTS},
    outputs=_dynamic_quant_outputs,
    dims={"input": "*B S D", "smooth_scales": "F / G F", "group_index": "Gi"},
    dtypes={"input": HALVES, "smooth_scales": HALVES, "group_index": INT32},
    limits={
        "host": (
            Limit(f"dst_type in {tuple(_DYNAMIC)}", because=_OTHER_RESULTS),
            Limit("D % 8 == 0", when=f"dst_type == {INT4_CODE}", because="eight int4 fill an int32"),
            "quant_mode in ('pertoken', 'perchannel', 'pertensor')",
            Limit(
                "quant_mode != 'perchannel'",
                when=f"dst_type == {INT4_CODE}",
                because="the shape of the result contradicts that of the Meta kernel",
            ),
            Limit("given(smooth_scales)", when="given(group_index)", because="it groups their factors"),
            Limit("quant_mode == 'pertoken'", when="given(group_index)", because="groups are of tokens"),
            Limit("rank(smooth_scales) == 2 and Gi == G", when="given(smooth_scales) and given(group_index)"),
            Limit("rank(smooth_scales) == 1", when="given(smooth_scales) and not given(group_index)"),
            Limit("F == D", when="given(smooth_scales) and quant_mode != 'perchannel'"),
            Limit("F == S", when="given(smooth_scales) and quant_mode == 'perchannel'"),
        ),
        **dict.fromkeys(
            A2_A3, (*_ROWS, Limit(f"dst_type in {tuple(RESULTS)}", because=f"{FLOAT8.name} is of Ascend 950"))
        ),
        "ascend950": _ROWS,
    },
    source=(
        "op-plugin: torch_npu.npu_dynamic_quant (no scale is defined for a row of zeros: 0, as rowmax / 127 is), "
        "test_npu_dynamic_quant.py (groups, int4, perchannel); CANN: aclnnDynamicQuantV4 (quant_mode, float8)"
    ),
    summary=(
        "v = x · smooth_scales, of the group of a row where group_index [G] says where groups end, in float32; "
        "scale = rowmax|v| / 127; y = rint(v / scale), halves to even; perchannel: of columns, pertensor: of all; "
        "quint4x2: / 7, eight int4 in an int32; float8_e4m3fn: scale = rowmax|v| / 448, y = v / scale"
    ),
)


_UINT8, _INT32 = encodings.Encoding(torch.uint8, 255.0), encodings.Encoding(torch.int32, 2.0**31 - 1)
_STORED = {
    INT8_CODE: encodings.INT8, 12: encodings.INT8, 0: _UINT8, 13: _UINT8, 3: _INT32, 14: _INT32,
    INT4_CODE: encodings.INT4,
}  # fmt: skip
"""torch's number of a dtype (int8, qint8, uint8, quint8, int32, qint32, quint4x2) -> encoding."""


def _quantize(given: Given) -> Tensor:
    input, divides = given["input"], given["div_mode"]
    axis = _quantised_axis(given)
    x = input.to(compute_dtype(input))
    scales = _along(given["scales"], x, axis)
    y = x / scales if divides else x * scales
    y = y if given["zero_points"] is None else y + _along(given["zero_points"], x, axis)
    encoding = _STORED[given["dtype"]]
    return encoding.stored(y.double() if encoding is _INT32 else y)  # float32 does not represent the ends of int32


def _quantised_axis(given: Given) -> int:
    """Return the axis along which scales of one dim are: the argument `axis` if `div_mode` is set or `axis` is -2, else
    -1.
    """
    return given["axis"] if given["div_mode"] or given["axis"] == -2 else -1


def _along(each: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return scales or offsets `each` in a shape that broadcasts to `x`: [D] along `axis`, or [1], or already of x's
    rank.
    """
    sizes = [1] * x.ndim
    sizes[axis] = each.shape[0]
    return (each if each.ndim == x.ndim and x.ndim > 1 else each.reshape(sizes)).to(x.dtype)


def _quantize_outputs(input: Tensor, dtype: int) -> Tensor:
    encoding = _STORED[dtype]
    return encoding.empty(input) if encoding.packing > 1 else torch.empty_like(input, dtype=encoding.torch_dtype)


_QINT8 = 12
_ONE_DIM, _ALL_DIMS = "rank(scales) == 1 and rank(input) > 1", "rank(scales) == rank(input)"
_OF_AXIS = "numel(scales) == size(scales, {0}) and size(scales, {0}) in (1, size(input, {0}))"

QUANTIZE = Operator(
    schema=(
        "npu::npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
        "bool div_mode=True) -> Tensor"
    ),
    compute=_quantize,
    outputs=_quantize_outputs,
    dims={"input": "*B D", "scales": "*S", "zero_points": "*Z"},
    dtypes={
        "input": HALVES | FLOAT32,
        "scales": HALVES | FLOAT32,
        "zero_points": HALVES | FLOAT32 | INT8 | INT32 | frozenset({torch.uint8}),
    },
    limits={
        "host": (
            Limit("dtype in (0, 1, 3, 12, 13, 14)", when="div_mode", because=_OTHER_RESULTS),
            Limit(f"dtype in (1, 12, {INT4_CODE})", when="not div_mode", because=_OTHER_RESULTS),
            Limit("D % 8 == 0", when=f"dtype == {INT4_CODE}", because="eight int4 fill an int32"),
            Limit("-rank(input) <= axis and axis < rank(input)", when="div_mode"),
            Limit("axis >= -2 and axis < rank(input)", when="not div_mode"),
            Limit("rank(scales) in (1, rank(input))"),
            Limit("size(scales, 0) in (1, size(input, axis))", when=f"{_ONE_DIM} and (div_mode or axis == -2)"),
            Limit("size(scales, 0) in (1, D)", when=f"{_ONE_DIM} and not div_mode and axis != -2"),
            Limit(_OF_AXIS.format("axis"), when=f"{_ALL_DIMS} and (div_mode or axis == -2)"),
            Limit(_OF_AXIS.format("-1"), when=f"{_ALL_DIMS} and not div_mode and axis != -2"),
            Limit("rank(zero_points) in (1, rank(scales))", when="given(zero_points)"),
            Limit("shape(zero_points) in (shape(scales), (1,))", when="given(zero_points)"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                Limit(f"dtype == {_QINT8}", because="scales of other results are told in other dtypes"),
                Limit("axis == -1", because="the page counts axes differently with and without div_mode"),
                Limit("rank(scales) == 1"),
                "rank(input) <= 8",
                Limit("dtype(scales) == dtype(input)", because="store the scales in the dtype of the input"),
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
        "op-plugin: torch_npu.npu_quantize, test_npu_quantize.py, QuantizeKernelNpuOpApi (axes, int4); CANN: "
        "aclnnQuantize (its page asks for scales in the dtype of x, that of op-plugin takes none in float16 that "
        "divide), aclnnAscendQuantV3"
    ),
    summary=(
        "y = rint(input / scales + zero_points), or input · scales, in float32, within the range of dtype; scales of "
        "one dim are of axis, without div_mode of the last dim, or for axis -2 of that before it; quint4x2: eight int4 "
        "in an int32"
    ),
)


def _quant_matmul(given: Given) -> Tensor:
    scale, bias, wide = given["scale"], given["bias"], compute_dtype(given["scale"])
    total = int8_product(given["x1"], given["x2"])
    if bias is not None and not bias.is_floating_point():
        total = total + bias
    if given["output_dtype"] == _INT32_CODE:
        return total
    out = total.to(wide) * scale.to(wide)
    if given["pertoken_scale"] is not None:
        out = out * given["pertoken_scale"].unsqueeze(-1)
    if bias is not None and bias.is_floating_point():
        out = out + bias.to(wide)
    if given["offset"] is not None:
        out = out + given["offset"].to(wide)
    if given["output_dtype"] in _TO_INT8:
        return encodings.INT8.stored(out)
    return out.to(result_dtype(scale, given["output_dtype"]))


def _quant_matmul_outputs(x1: Tensor, x2: Tensor, scale: Tensor, output_dtype: int | None) -> Tensor:
    lead = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    integers = {None: torch.int8, INT8_CODE: torch.int8, _INT32_CODE: torch.int32}
    dtype = integers[output_dtype] if output_dtype in integers else result_dtype(scale, output_dtype)
    return x1.new_empty((*lead, x1.shape[-2], x2.shape[-1]), dtype=dtype)


def result_dtype(scale: Tensor, output_dtype: int | None) -> torch.dtype:
    """Return float64 if `scale` is float64, as where a graph is widened to compare it; else the dtype of code
    `output_dtype`.
    """
    return scale.dtype if scale.dtype == torch.float64 else CODES.get(output_dtype or 0, torch.int8)


_TO_INT8, _INT32_CODE = (None, INT8_CODE), 3
_INT8_RESULT = f"output_dtype in {_TO_INT8}"
_INTEGER_RESULT = f"output_dtype in {(*_TO_INT8, _INT32_CODE)}"
_CODES = "it tells of formats of 8 bits and fewer that are not int8, of which none is decomposed"
_KERNEL = (
    Limit("K <= 65535 and N <= 65535"),
    Limit("rank(x1) <= 6"),
    Limit("rank(x2) == 2", because="a product of batches is of another kernel"),
    Limit("dtype(scale) == 'float32'", when="output_dtype == 5", because="bfloat16 scales give bfloat16"),
    Limit("dtype(bias) != 'bfloat16'", when="output_dtype == 5 and given(bias)", because="it gives bfloat16"),
    Limit(
        "given(pertoken_scale)",
        when=f"output_dtype == 5 or {_INT8_RESULT}",
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
    uncomputed={
        "group_sizes": "products by groups of lanes are not decomposed",
        "y_scale": "results in formats of 8 bits are not decomposed",
        "x1_dtype x2_dtype scale_dtype pertoken_scale_dtype": _CODES,
    },
    outputs=_quant_matmul_outputs,
    dims={
        "x2": "*C K N", "x1": "*B M K", "scale": "1|N", "pertoken_scale": "M", "bias": "N / Bb 1 N", "offset": "1|N",
    },
    dtypes={
        "x1 x2": INT8,
        "scale": FLOAT32 | BFLOAT16,
        "pertoken_scale offset": FLOAT32,
        "bias": INT32 | BFLOAT16 | FLOAT32,
    },
    limits={
        "host": (
            Limit(f"output_dtype in {(*_TO_INT8, _INT32_CODE, *CODES)}", because="its page has no other results"),
            Limit(_INT8_RESULT, when="given(offset)", because="other results have none"),
            Limit("not given(pertoken_scale)", when=_INTEGER_RESULT, because="no page has them beside integer results"),
            Limit("dtype(bias) == 'int32'", when=f"given(bias) and {_INTEGER_RESULT}", because="the page has no other"),
            Limit("rank(bias) == 1 or rank(x1) == 3 or rank(x2) == 3", when="given(bias)"),
            *(
                Limit(f"rank({name}) < 3 or size({name}, 0) in (1, Bb)", when="given(bias) and rank(bias) == 3")
                for name in ("x1", "x2")
            ),
        ),
        **dict.fromkeys(A2_A3, _KERNEL),
    },
    either=frozenset({"x2"}),
    source=(
        "op-plugin: torch_npu.npu_quant_matmul (A2 and A3; table of the dtypes that go together); cann-recipes-infer: "
        "module/linear.py, which hands results in int32 and the same scale on to npu_dequant_swiglu_quant"
    ),
    # A chip multiplies int8 twice as fast as 16-bit floats, by which targets are rated.
    flops=lambda x1, x2: product(x1, x2.shape[-1]) / 2,
    summary=(
        "out = round(int32(x1 · x2 + bias) · scale · pertoken_scale), or + bias at the end where it is floating; in "
        "int8: rint(int32(x1 · x2 + bias) · scale + offset), from -128 to 127; in int32: x1 · x2 + bias, without scale"
    ),
)  # fmt: skip


def _norm_quant(given: Given) -> tuple[Tensor, ...]:
    gamma, beta, encoding = given["gamma"], given["beta"], RESULTS[given["y_dtype"]]
    x, total = added(given["x1"], given["x2"])
    y = total * rstd(total, gamma, given["epsilon"]) * gamma.to(total.dtype)
    y = (y if beta is None else y + beta.to(y.dtype)).contiguous()
    made: list[tuple[Tensor, Tensor]] = []
    for smooth, wanted in zip((given["smooth_scale1"], given["smooth_scale2"]), _wanted(given), strict=True):
        if not wanted:
            made.append((y.new_empty([0], dtype=encoding.torch_dtype), y.new_empty([0])))
            continue
        made.append(encoding.quantised(y if smooth is None else y * smooth.to(y.dtype)))
    return made[0][0], made[1][0], x.contiguous(), made[0][1], made[1][1]


def _wanted(given: Given) -> Sequence[bool]:
    """Return for the first and the second quantised result whether the call requests it."""
    return given["output_mask"] or (True, given["smooth_scale2"] is not None)


def _norm_quant_outputs(given: Given) -> tuple[Tensor, ...]:
    x1, encoding = given["x1"], RESULTS[given["y_dtype"]]
    results = [encoding.empty(x1 if each else x1.new_empty([0])) for each in _wanted(given)]
    scales = [x1.new_empty(x1.shape[:-1] if each else [0], dtype=compute_dtype(x1)) for each in _wanted(given)]
    return *results, x1.new_empty(x1.shape), *scales


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
            Limit(f"y_dtype in {tuple(RESULTS)}", because="the page has no other result"),
            Limit("D % 8 == 0", when=f"y_dtype == {INT4_CODE}", because="eight int4 fill an int32"),
            Limit("given(smooth_scale1)", when="not given(output_mask) and given(smooth_scale2)"),
            Limit("output_mask != (False, False)", when="given(output_mask)"),
            *(
                Limit(f"output_mask in ({alone}, (True, True))", when=f"given(output_mask) and given({factor})")
                for factor, alone in (("smooth_scale1", (True, False)), ("smooth_scale2", (False, True)))
            ),
        ),
        **dict.fromkeys(CHIPS, _NORM),
    },
    rounds="x1 + x2",
    source="op-plugin: torch_npu.npu_add_rms_norm_dynamic_quant; kernel: ops-nn norm/add_rms_norm_dynamic_quant",
    summary=(
        "x = round(x1 + x2); n = (x1 + x2) · rstd · gamma (+ beta) in float32 (float16: of x); "
        "y_i, scale_i = dynamic quantisation of n · smooth_scale_i, with y_dtype quint4x2 up to 7, eight in an int32"
    ),
)
