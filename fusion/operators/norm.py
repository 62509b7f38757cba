"""RMS normalisation: y = x / sqrt(mean(x²) + eps) · gamma, over the trailing dims that gamma has."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.contract import Limit, Operator
from fusion.operators.dtypes import FLOATS, compute_dtype

_RANK = "rank(input) <= 8"
_TRAILING = {"gamma": "*D", "input": "*B *D"}
_SAME_OR_FLOAT32 = Limit("dtype(gamma) in (dtype(input), 'float32')")


def _rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x²) + epsilon) over the trailing dims of gamma, which stay as 1."""
    mean = x.square().mean(dim=tuple(range(-gamma.ndim, 0)), keepdim=True)
    return (mean + epsilon).rsqrt()


def _norm_meta(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    shape = (*input.shape[: input.ndim - gamma.ndim], *(1,) * gamma.ndim)
    return torch.empty_like(input), input.new_empty(shape, dtype=compute_dtype(input))


def _rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(input)
    x = input.to(compute)
    rstd = _rstd(x, gamma, epsilon)
    return (x * rstd * gamma.to(compute)).to(input.dtype), rstd.contiguous()


RMS_NORM = Operator(
    schema="npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)",
    fallback=_rms_norm,
    meta=_norm_meta,
    dims=_TRAILING,
    dtypes={"input": FLOATS, "gamma": FLOATS},
    limits={
        "host": ("rank(gamma) >= 1",),
        "ascend910b": (_RANK, _SAME_OR_FLOAT32),
        "ascend910_93": (_RANK, _SAME_OR_FLOAT32),
        "ascend950": (_RANK, _SAME_OR_FLOAT32),
    },
    lowerings=frozenset({"eager", "torchair", "npugraph_ex"}),
    source="op-plugin: torch_npu.npu_rms_norm; CANN: aclnnRmsNorm; kernel: ops-nn norm/rms_norm (one rounding)",
    summary="rstd = 1/sqrt(mean(x²) + epsilon) in float32; y = round(x · rstd · gamma)",
)


def _gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(input)
    x = input.to(compute)
    rstd = _rstd(x, gamma, epsilon)
    return (x * rstd * (gamma.to(compute) + 1)).to(input.dtype), rstd.contiguous()


GEMMA_RMS_NORM = Operator(
    schema=(
        "npu::npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)"
    ),
    fallback=_gemma_rms_norm,
    meta=_norm_meta,
    dims=_TRAILING,
    dtypes={"input": FLOATS, "gamma": FLOATS},
    limits={
        "host": ("rank(gamma) >= 1",),
        "ascend910b": (_RANK, "dtype(gamma) == dtype(input)"),
        "ascend910_93": (_RANK, "dtype(gamma) == dtype(input)"),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="CANN: aclnnGemmaRmsNorm (not on Ascend 950); torch_npu.npu_gemma_rms_norm; no GE converter in 2.13.0",
    summary="rstd = 1/sqrt(mean(x²) + epsilon) in float32; y = round(x · rstd · (1 + gamma))",
)


def _add_rms_norm_meta(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _norm_meta(x1, gamma)
    return y, rstd, torch.empty_like(x1)


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    compute = compute_dtype(x1)
    total = x1.to(compute) + x2.to(compute)
    x = total.to(x1.dtype)
    # The bfloat16 kernel normalises the sum before it is rounded, the float16 kernel after.
    normalised = x.to(compute) if x1.dtype == torch.float16 else total
    rstd = _rstd(normalised, gamma, epsilon)
    y = (normalised * rstd).to(x1.dtype) * gamma
    return y.to(x1.dtype), rstd.contiguous(), x


_ADD_SAME = ("rank(x1) <= 8", "dtype(x2) == dtype(x1)", "dtype(gamma) == dtype(x1)", "epsilon >= 0")

ADD_RMS_NORM = Operator(
    schema=(
        "npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    fallback=_add_rms_norm,
    meta=_add_rms_norm_meta,
    dims={"gamma": "*D", "x1": "*B *D", "x2": "*B *D"},
    dtypes={"x1": FLOATS, "x2": FLOATS, "gamma": FLOATS},
    limits={
        "host": ("rank(gamma) >= 1",),
        "ascend910b": _ADD_SAME,
        "ascend910_93": _ADD_SAME,
        "ascend950": _ADD_SAME,
    },
    lowerings=frozenset({"eager", "torchair", "npugraph_ex"}),
    source="op-plugin: torch_npu.npu_add_rms_norm; CANN: aclnnAddRmsNorm; kernel: ops-nn norm/add_rms_norm",
    summary="x = round(x1 + x2); y = round(round(s · rstd) · gamma), s = x1 + x2 (bfloat16) or x (float16)",
)
