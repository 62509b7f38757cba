"""RMS normalisation: y = x / sqrt(mean(x²) + eps) · gamma, over the trailing dims that gamma has; layer norms."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.dtype_sets import FLOATS, HALVES, compute_dtype
from fusion.operators.limits import A2_A3, CHIPS, Limit
from fusion.operators.operator import Operator

_RANK = "rank(input) <= 8"
_TRAILING = {"gamma": "*D", "input": "*B *D"}
_SAME_OR_FLOAT32 = Limit("dtype(gamma) in (dtype(input), 'float32')")


def normalised(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Compute x / sqrt(mean(x²) + epsilon) · gamma over the last dim, in the wide dtype, not rounded."""
    wide = x.to(compute_dtype(x))
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma


def rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Compute 1 / sqrt(mean(x²) + epsilon) over the trailing dims that `gamma` has, which stay with size 1."""
    mean = x.square().mean(dim=tuple(range(-gamma.ndim, 0)), keepdim=True)
    return (mean + epsilon).rsqrt()


def _outputs(input: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*input.shape[: input.ndim - gamma.ndim], *(1,) * gamma.ndim)
    return torch.empty_like(input), input.new_empty(shape, dtype=compute_dtype(input))


def _rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    x = input.to(compute_dtype(input))
    root = rstd(x, gamma, epsilon)
    return (x * root * gamma).to(input.dtype), root.contiguous()


RMS_NORM = Operator(
    schema="npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)",
    compute=_rms_norm,
    outputs=_outputs,
    dims=_TRAILING,
    dtypes={"input": FLOATS, "gamma": FLOATS},
    limits={
        "host": ("rank(gamma) >= 1",),
        **dict.fromkeys(CHIPS, (_RANK, _SAME_OR_FLOAT32)),
    },
    source="op-plugin: torch_npu.npu_rms_norm; CANN: aclnnRmsNorm; kernel: ops-nn norm/rms_norm (one rounding)",
    summary="rstd = 1/sqrt(mean(x²) + epsilon) in float32; y = round(x · rstd · gamma)",
)


def _gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return _rms_norm(input, gamma.to(compute_dtype(input)) + 1, epsilon)


GEMMA_RMS_NORM = Operator(
    schema=(
        "npu::npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)"
    ),
    compute=_gemma_rms_norm,
    outputs=_outputs,
    dims=_TRAILING,
    dtypes={"input": FLOATS, "gamma": FLOATS},
    limits={
        "host": ("rank(gamma) >= 1",),
        **dict.fromkeys(A2_A3, (_RANK, "dtype(gamma) == dtype(input)")),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="CANN: aclnnGemmaRmsNorm (not on Ascend 950); torch_npu.npu_gemma_rms_norm; no GE converter in 2.13.0",
    summary="rstd = 1/sqrt(mean(x²) + epsilon) in float32; y = round(x · rstd · (1 + gamma))",
)


def added(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Return x1 + x2 in the dtype of `x1`, and the sum that is normalised, in the dtype of computation.

    The latter is rounded before if `x1` is float16, as in the kernel, and not for bfloat16.
    """
    total = x1.to(compute_dtype(x1)) + x2
    x = total.to(x1.dtype)
    # The bfloat16 kernel normalises the sum before it is rounded, the float16 kernel after.
    return x, x.to(total.dtype) if x1.dtype == torch.float16 else total


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    x, total = added(x1, x2)
    root = rstd(total, gamma, epsilon)
    return ((total * root).to(x1.dtype) * gamma).to(x1.dtype), root.contiguous(), x


_ADD_SAME = ("rank(x1) <= 8", "dtype(x2) == dtype(x1)", "dtype(gamma) == dtype(x1)", "epsilon >= 0")

ADD_RMS_NORM = Operator(
    schema=(
        "npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_add_rms_norm,
    outputs=lambda x1, gamma: (*_outputs(x1, gamma), torch.empty_like(x1)),
    dims={"gamma": "*D", "x1": "*B *D", "x2": "*B *D"},
    dtypes={"x1": FLOATS, "x2": FLOATS, "gamma": FLOATS},
    limits={
        "host": ("rank(gamma) >= 1",),
        **dict.fromkeys(CHIPS, _ADD_SAME),
    },
    source="op-plugin: torch_npu.npu_add_rms_norm; CANN: aclnnAddRmsNorm; kernel: ops-nn norm/add_rms_norm",
    rounds="x1 + x2",
    summary="x = round(x1 + x2); y = round(round(s · rstd) · gamma), s = x1 + x2 (bfloat16) or x (float16)",
)


def _add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    x, total = added(x1, x2)
    root = rstd(total, gamma, epsilon)
    # The float16 kernel rounds behind every step, the bfloat16 kernel keeps float32 from the product to the sum.
    wide = x1.dtype if x1.dtype == torch.float16 else total.dtype
    y = (total * root).to(x1.dtype).to(wide) * gamma.to(wide)
    y = y if beta is None else y + beta.to(wide)
    return y.to(x1.dtype), root.contiguous(), x


ADD_RMS_NORM_BIAS = Operator(
    schema=(
        "_C_ascend::npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, "
        "float epsilon=9.9999999999999995e-07) -> (Tensor y, Tensor rstd, Tensor x)"
    ),
    compute=_add_rms_norm_bias,
    outputs=lambda x1, gamma: (*_outputs(x1, gamma), torch.empty_like(x1)),
    dims={"gamma": "*D", "x1": "*B *D", "x2": "*B *D", "beta": "*D"},
    dtypes={"x1 x2 gamma beta": FLOATS},
    limits={
        "host": ("rank(gamma) >= 1",),
        **dict.fromkeys(A2_A3, (*_ADD_SAME, Limit("dtype(beta) == dtype(x1)", when="given(beta)"))),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="vllm-ascend: csrc/moe/add_rms_norm_bias, its kernel and op_host (A2 and A3)",
    rounds="x1 + x2",
    summary=(
        "x = round(x1 + x2); y = round(round(s · rstd) · gamma + beta), s = x1 + x2 (bfloat16) or x (float16, whose "
        "product with gamma is rounded too)"
    ),
)


def _add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    x, total = added(x1, x2)
    root = rstd(total, gamma, epsilon)
    y = (total * root * gamma).to(x1.dtype)
    return y.to(total.dtype, copy=True), y, root.contiguous(), x


def _add_rms_norm_cast_outputs(x1: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    y, root = _outputs(x1, gamma)
    return torch.empty_like(x1, dtype=compute_dtype(x1)), y, root, torch.empty_like(x1)


ADD_RMS_NORM_CAST = Operator(
    schema=(
        "npu::npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_add_rms_norm_cast,
    outputs=_add_rms_norm_cast_outputs,
    dims={"gamma": "*D", "x1": "*B *D", "x2": "*B *D"},
    dtypes={"x1": HALVES, "x2": HALVES, "gamma": HALVES},
    limits={
        "host": ("rank(gamma) >= 1",),
        **dict.fromkeys(CHIPS, _ADD_SAME),
    },
    source=(
        "CANN: aclnnAddRmsNormCast (y1 = float(y2), of 16 bits); torch_npu.npu_add_rms_norm_cast; kernel: ops-nn "
        "norm/add_rms_norm_cast (one rounding, then a cast; a public test leaves y1 unrounded)"
    ),
    rounds="x1 + x2",
    summary="x = round(x1 + x2); y2 = round(s · rstd · gamma); y1 = y2 in float32, s as of npu_add_rms_norm",
)


def _add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, additional_output: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x1.to(compute_dtype(x1)) + x2
    mean = total.mean(-1, keepdim=True)
    centred = total - mean
    root = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    y = centred * root * gamma + beta
    x = total.to(x1.dtype)  # the kernel does not write it without additional_output
    return y.to(x1.dtype), mean.contiguous(), root.contiguous(), x if additional_output else torch.zeros_like(x)


def _add_layer_norm_outputs(x1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, root = (x1.new_empty((*x1.shape[:-1], 1), dtype=compute_dtype(x1)) for _ in range(2))
    return torch.empty_like(x1), mean, root, torch.empty_like(x1)


ADD_LAYER_NORM = Operator(
    schema=(
        "npu::npu_add_layer_norm(Tensor x1, Tensor x2, Tensor gamma, Tensor beta, "
        "float epsilon=1.0000000000000001e-05, bool additional_output=False) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_add_layer_norm,
    outputs=_add_layer_norm_outputs,
    dims={"gamma": "D", "x1 x2": "*B D", "beta": "D"},
    dtypes={"x1 x2 gamma beta": FLOATS},
    limits={
        **dict.fromkeys(
            A2_A3,
            (
                Limit("additional_output", because="without, nothing is said of the last result"),
                "rank(x1) <= 8",
                "dtype(x2) == dtype(x1)",
                "dtype(gamma) in (dtype(x1), 'float32')",
                "dtype(beta) == dtype(gamma)",
            ),
        ),
    },
    source="CANN: aclnnAddLayerNorm; op-plugin: AddLayerNormKernelNpuOpApi; kernel and GE operator: ops-nn "
    "norm/add_layer_norm",
    summary="x = round(x1 + x2), or zeros without additional_output; "
    "y = round((s - mean(s)) / sqrt(var(s) + epsilon) · gamma + beta), s = x1 + x2",
)
