"""Gated activations of feed-forward networks: SwiGLU, with quantised results or clamps, and GELU."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fusion.operators import encodings
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, FLOATS, INT32, INT64, compute_dtype
from fusion.operators.limits import A2_A3, CHIPS, Limit
from fusion.operators.operator import Operator
from fusion.operators.quant.quantisation import INT8_CODE, by_group_of_row


def _swiglu(input: Tensor, dim: int) -> Tensor:
    gate, value = input.chunk(2, dim)
    return (silu(gate.to(compute_dtype(input))) * value).to(input.dtype).contiguous()


def _halved(input: Tensor, dim: int) -> list[int]:
    """Return the shape of `input` with half the size along `dim`."""
    shape = list(input.shape)
    shape[dim] = shape[dim] // 2
    return shape


SWIGLU = Operator(
    schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    compute=_swiglu,
    outputs=lambda input, dim: input.new_empty(_halved(input, dim)),
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={
        "host": ("-rank(input) <= dim and dim < rank(input)", "size(input, dim) % 2 == 0"),
        **dict.fromkeys(CHIPS, ("rank(input) <= 8",)),
    },
    source="op-plugin: torch_npu.npu_swiglu; CANN: aclnnSwiGlu",
    summary="a, b = halves of input along dim; out = round(a · sigmoid(a) · b), in float32",
)


def _swiglu_quant(given: Given) -> tuple[Tensor, Tensor]:
    x = given["x"]
    gate, value = x.to(compute_dtype(x)).chunk(2, -1)[:: 1 if given["activate_left"] else -1]
    y = _smoothed(silu(gate) * value, given)
    if given["quant_mode"]:
        top = y.abs().amax(-1, keepdim=True)
        y = y * (encodings.INT8.bound / top.masked_fill(top == 0, 1.0))
        scale = (encodings.INT8.bound / top).squeeze(-1)
    else:
        scale = torch.zeros_like(y[..., 0])
    return encodings.INT8.stored(y).contiguous(), scale.contiguous()


def _smoothed(y: Tensor, given: Given) -> Tensor:
    """Return `y` [.., N] · smooth_scales + offsets, arguments [1, N] of all lanes or [1].

    With `group_index` they are [G, N] or [G], and each row takes those of its group. `y` itself without smooth_scales.
    """
    factors, offsets, groups = given["smooth_scales"], given["offsets"], given["group_index"]
    if factors is None:
        return y
    if groups is None:
        y = y * factors.to(y.dtype).reshape(-1)
        return y if offsets is None else y + offsets.to(y.dtype).reshape(-1)
    ends, rows = groups.cumsum(0) if given["group_list_type"] else groups, math.prod(y.shape[:-1])

    def per_row(each: Tensor, behind: float) -> Tensor:
        return by_group_of_row(each.to(y.dtype).reshape(each.shape[0], -1), ends, rows, behind)

    flat = y.reshape(rows, y.shape[-1]) * per_row(factors, 1.0)
    return (flat if offsets is None else flat + per_row(offsets, 0.0)).view(y.shape)


def _swiglu_quant_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8)
    return y, x.new_empty(x.shape[:-1], dtype=compute_dtype(x))


SWIGLU_QUANT = Operator(
    schema=(
        "npu::npu_swiglu_quant(Tensor x, *, Tensor? smooth_scales=None, Tensor? offsets=None, "
        "Tensor? group_index=None, bool activate_left=False, int quant_mode=0, int group_list_type=0, "
        "ScalarType? dst_type=None) -> (Tensor, Tensor)"
    ),
    compute=_swiglu_quant,
    without_effect=frozenset({"dst_type"}),
    outputs=_swiglu_quant_outputs,
    dims={"x": "*B D", "smooth_scales": "G / G F", "offsets": "G / G F", "group_index": "Gi"},
    dtypes={"x": FLOATS, "smooth_scales offsets": FLOAT32, "group_index": INT32},
    limits={
        "host": (
            "D % 2 == 0",
            "quant_mode in (0, 1)",
            "group_list_type in (0, 1)",
            Limit(f"dst_type in (None, {INT8_CODE})", because="results of int4 are not decomposed"),
            Limit("given(smooth_scales)", when="quant_mode == 0", because="rows have no other scale"),
            Limit("given(smooth_scales)", when="given(group_index)", because="it groups their factors"),
            Limit("not given(offsets)", when="quant_mode == 1", because="a dynamic quantisation has none"),
            Limit("F == D // 2", when="given(smooth_scales) and rank(smooth_scales) == 2"),
            Limit("G == Gi", when="given(group_index) and given(smooth_scales)"),
            Limit("G == 1", when="not given(group_index) and given(smooth_scales)", because="rows are of one group"),
        ),
        **dict.fromkeys(CHIPS, ("rank(x) > 1", "D <= 8192")),
    },
    source=(
        "op-plugin: torch_npu.npu_swiglu_quant and its test; CANN: aclnnSwiGluQuantV2; kernel: ops-nn "
        "quant/swi_glu_quant, whose second result is 127 / rowmax, where npu_dynamic_quant gives rowmax / 127 (ATB "
        "takes its reciprocal behind the operator)"
    ),
    summary=(
        "a, b = halves of x, the first or, without activate_left, the second activated; v = a · sigmoid(a) · b · "
        "smooth_scales + offsets in float32, both of the group of a row; quant_mode 1: scale = 127 / rowmax|v|, "
        "y = rint(v · scale); 0: y = rint(v), scale = 0"
    ),
)


GELU = Operator(
    schema='npu::npu_gelu(Tensor input, *, str approximate="none") -> Tensor',
    compute=lambda input, approximate: gelu(input.to(compute_dtype(input)), approximate=approximate).to(input.dtype),
    outputs=lambda input: torch.empty_like(input),
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={"host": ("approximate in ('none', 'tanh')",), CHIPS[0]: ("rank(input) <= 8",)},
    source="op-plugin: torch_npu.npu_gelu, whose table names A2 and not A3; there gelu of torch is that of tanh",
    summary=(
        "approximate none: y = x · (1 + erf(x / √2)) / 2; tanh: y = x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2; "
        "in float32"
    ),
)


FAST_GELU = Operator(
    schema="npu::npu_fast_gelu(Tensor input) -> Tensor",
    compute=lambda input: (wide := input.to(compute_dtype(input))).mul(torch.sigmoid(1.702 * wide)).to(input.dtype),
    outputs=lambda input: torch.empty_like(input),
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={"host": (), **dict.fromkeys(A2_A3, ("rank(input) <= 8",))},
    source="op-plugin: torch_npu.npu_fast_gelu; CANN: aclnnFastGelu",
    summary="y = x · sigmoid(1.702 · x), in float32",
)


def _geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    halves = input.to(compute_dtype(input)).chunk(2, dim)
    gate, value = halves if activate_left else halves[::-1]
    activated = gelu(gate, approximate=GELU_CODES[approximate]).to(input.dtype)
    return (activated.to(value.dtype) * value).to(input.dtype).contiguous(), activated.contiguous()


GELU_CODES = ("none", "tanh")
"""How gelu is computed, at the number that npu_geglu has for it."""
GEGLU = Operator(
    schema=(
        "npu::npu_geglu(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)"
    ),
    compute=_geglu,
    outputs=lambda input, dim: (input.new_empty(_halved(input, dim)), input.new_empty(_halved(input, dim))),
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={
        "host": (
            "-rank(input) <= dim and dim < rank(input)",
            "size(input, dim) % 2 == 0",
            f"approximate in {tuple(range(len(GELU_CODES)))}",
        ),
        **dict.fromkeys(A2_A3, ("rank(input) <= 8",)),
    },
    source=(
        "op-plugin: torch_npu.npu_geglu; CANN: aclnnGeGluV3, whose pages of CANN 8.0.0 to 8.2 exchange the directions "
        "of activate_left; those before and since agree. How the gelu is rounded before the product is not "
        "documented: here as it is returned"
    ),
    summary=(
        "a, b = the halves of input along dim, or exchanged without activate_left; gelu = round(Φ(a) · a), by erf or "
        "with approximate 1 by tanh; out = round(gelu · b)"
    ),
)


def _clipped_swiglu(given: Given) -> Tensor:
    """Compute the gated product of `x`, whose dims from `dim` on are flattened to one.

    With `group_index`, the numbers of rows of groups, rows behind the last group are 0.
    """
    x, dim, limit = given["x"], given["dim"] % given["x"].ndim, given["limit"]
    wide = x.to(compute_dtype(x)).flatten(dim)
    gate, value = wide.unflatten(-1, (-1, 2)).unbind(-1) if given["interleaved"] else wide.chunk(2, -1)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    y = gate * torch.sigmoid(given["alpha"] * gate) * (value + given["bias"])
    if given["group_index"] is not None:
        row = torch.arange(math.prod(x.shape[:dim]), device=x.device).reshape(x.shape[:dim])
        y = y.masked_fill((row >= given["group_index"].sum()).unsqueeze(-1), 0.0)
    return y.to(x.dtype).reshape(_halved(x, dim)).contiguous()


CLIPPED_SWIGLU = Operator(
    schema=(
        "npu::npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, "
        "float limit=7., float bias=1., bool interleaved=True) -> Tensor"
    ),
    compute=_clipped_swiglu,
    outputs=lambda x, dim: x.new_empty(_halved(x, dim)),
    dims={"x": "*S", "group_index": "G"},
    dtypes={"x": FLOATS, "group_index": INT64},
    limits={
        "host": (
            "-rank(x) <= dim and dim < rank(x)",
            "size(x, dim) % 2 == 0",
            Limit("dim % rank(x) > 0", when="given(group_index)", because="groups are of the dims before"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "rank(x) > 1",
                Limit(
                    "dim in (-1, rank(x) - 1) or not interleaved",
                    because="its page pairs elements of the dim joined with those behind it, where they are no pairs",
                ),
            ),
        ),
    },
    source="torch_npu 2.13.0: docstring of npu_clipped_swiglu; op-plugin: test_npu_clipped_swiglu.py; CANN: "
    "aclnnClippedSwiglu",
    summary="a, b = every second element, or the halves, of the dims of x from dim on, joined, a ≤ limit, |b| ≤ limit; "
    "out = round(a · sigmoid(alpha · a) · (b + bias)), in float32; rows behind the sum of group_index are not "
    "documented, here 0",
)
