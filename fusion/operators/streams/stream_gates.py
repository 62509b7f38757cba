"""Gates of N residual streams, and the input of a layer as the sum of the streams by the first of them.

    w = x Φᵀ / rms(x)   pre = sigmoid(α₀ w + b) + eps   post = 2 sigmoid(α₁ w + b)   res = α₂ w + b   h = Σ pre_i x_i

`x` are the streams of a token, flattened. On A2 and A3 the product is in HF32: Φ has 10 bits of mantissa there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, HALVES, compute_dtype
from fusion.operators.flops import product
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator
from fusion.operators.streams.sinkhorn import sinkhorn


class _Gates(NamedTuple):
    """Gates of the streams [*B, N, D]: `post` and `pre` [*B, N], `res` [*B, N, N], and what they are computed from."""

    pre: Tensor
    post: Tensor
    res: Tensor
    inverse: Tensor
    mixed: Tensor


def _gates(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, hc_eps: float
) -> _Gates:
    """Compute the gates of the streams `x` [*B, N, D]; the norm is applied behind the product, as in the kernel."""
    count, dtype = x.shape[-2], compute_dtype(x)
    flat = x.to(dtype).flatten(-2)
    inverse = (flat.square().mean(-1) + norm_eps).rsqrt()
    weighed = flat if gamma is None else flat * gamma.to(dtype).flatten()
    mixed = torch.nn.functional.linear(weighed, phi.to(dtype))
    parts = (mixed * inverse.unsqueeze(-1)).split([count, count, count * count], dim=-1)
    biases = bias.to(dtype).split([count, count, count * count])
    pre, post, res = (part * factor + each for part, factor, each in zip(parts, alpha.to(dtype), biases, strict=True))
    return _Gates(pre.sigmoid() + hc_eps, 2 * post.sigmoid(), res.unflatten(-1, (count, count)), inverse, mixed)


def _collapsed(x: Tensor, pre: Tensor) -> Tensor:
    """Compute Σ_i pre_i x_i [*B, D] of the streams `x` [*B, N, D], rounded once."""
    return (pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def _mhc_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, hc_eps: float
) -> tuple[Tensor, ...]:
    gates = _gates(x, phi, alpha, bias, gamma, norm_eps, hc_eps)
    results = (_collapsed(x, gates.pre), gates.post, gates.res, gates.inverse, gates.mixed, gates.pre)
    return tuple(each.contiguous() for each in results)


def _mhc_pre_outputs(x: Tensor, phi: Tensor) -> tuple[Tensor, ...]:
    lead, (count, width), dtype = x.shape[:-2], x.shape[-2:], compute_dtype(x)
    shapes = ((count,), (count, count), (), (phi.shape[0],), (count,))
    return x.new_empty((*lead, width)), *(x.new_empty((*lead, *each), dtype=dtype) for each in shapes)


def _work(x: Tensor, gates: Any) -> float:
    """Estimate the multiplications and additions of the product of the streams `x` with the weights of `gates`."""
    return product(x, gates)


_SHAPES = ("L == N * D", "G == N * N + 2 * N")

MHC_PRE = Operator(
    schema=(
        "npu::npu_mhc_pre(Tensor x, Tensor phi, Tensor alpha, Tensor bias, *, Tensor? gamma=None, "
        "float norm_eps=9.9999999999999995e-07, float hc_eps=9.9999999999999995e-07, int out_flag=0, "
        "int inner_precise=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_mhc_pre,
    uncomputed={
        "out_flag": "results 3 to 5 are for training alone",
        "inner_precise": "1 multiplies in HF32, which rounds both operands",
    },
    outputs=_mhc_pre_outputs,
    dims={"x": "*B N D", "phi": "G L", "alpha": "3", "bias": "G", "gamma": "N D"},
    dtypes={"x": HALVES, "phi alpha bias gamma": FLOAT32},
    limits={
        "host": _SHAPES,
        "ascend950": (
            "rank(x) in (3, 4)",
            Limit("N in (4, 6, 8)", because="N is the number of streams"),
            "D % 16 == 0 and D <= 16384",
        ),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    flops=lambda x, phi: _work(x, phi.shape[0]),
    source="op-plugin: torch_npu.npu_mhc_pre and its test (h_post is [.., N], eps is added to the first gate alone); "
    "no GE converter in 2.13.0",
    summary=(
        "w = (x · gamma) phiᵀ · rsqrt(mean(x²) + norm_eps) over N · D in float32; h = round(Σ_i (sigmoid(alpha[0] w + "
        "bias) + hc_eps)_i x_i); 2 · sigmoid(alpha[1] w + bias); alpha[2] w + bias as [N, N]"
    ),
)


def _mhc_pre_sinkhorn(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, numIters: int, hcEps: float, normEps: float
) -> tuple[Tensor, ...]:
    gates = _gates(x, phi, alpha, bias, None, normEps, hcEps)
    matrices = sinkhorn(gates.res, hcEps, numIters).flatten(-2)
    results = (_collapsed(x, gates.pre), gates.post, matrices)
    return *(each.contiguous() for each in results), *(gates.post.new_empty(0) for _ in range(5))


def _mhc_pre_sinkhorn_outputs(x: Tensor) -> tuple[Tensor, ...]:
    lead, (count, width), dtype = x.shape[:-2], x.shape[-2:], compute_dtype(x)
    shapes = ((*lead, count), (*lead, count * count), *((0,),) * 5)
    return x.new_empty((*lead, width)), *(x.new_empty(each, dtype=dtype) for each in shapes)


MHC_PRE_SINKHORN = Operator(
    schema=(
        "cann_ops_transformer::mhc_pre_sinkhorn(Tensor x, Tensor phi, Tensor alpha, Tensor bias, int hcMult, "
        "int numIters, float hcEps, float normEps, bool outFlag) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_mhc_pre_sinkhorn,
    without_effect=frozenset({"hcMult", "outFlag"}),
    outputs=_mhc_pre_sinkhorn_outputs,
    dims={"x": "B S N D", "phi": "G L", "alpha": "3", "bias": "G"},
    dtypes={"x": HALVES, "phi alpha bias": FLOAT32},
    limits={
        "host": (
            *_SHAPES,
            "hcMult == N",
            "numIters >= 1",
            Limit("not outFlag", because="sums and matrices of all steps are results for training alone"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                Limit("N == 4", because="N is the number of streams"),
                Limit("numIters == 20", because="the kernel takes no other number of iterations"),
                "D % 128 == 0 and D <= 100000",
            ),
        ),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    flops=lambda x, phi: _work(x, phi.shape[0]),
    source="ops-transformer mhc/mhc_pre_sinkhorn: page, torch_extension and kernel (hcEps is added behind the sigmoid "
    "of the first gate; the product is in HF32); no GE converter",
    summary=(
        "w = x phiᵀ · rsqrt(mean(x²) + normEps) over N · D; h = round(Σ_i (sigmoid(alpha[0] w + bias) + hcEps)_i x_i); "
        "2 · sigmoid(alpha[1] w + bias); the matrices alpha[2] w + bias, normalised as by npu_mhc_sinkhorn, flat "
        "[N · N]; x phiᵀ in HF32, all else in float32"
    ),
)


def _hc_pre(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_sinkhorn_iters: int, norm_eps: float, hc_eps: float
) -> tuple[Tensor, ...]:
    gates = _gates(x, hc_fn, hc_scale, hc_base, None, norm_eps, hc_eps)
    results = (_collapsed(x, gates.pre), gates.post, sinkhorn(gates.res, hc_eps, hc_sinkhorn_iters))
    return tuple(each.contiguous() for each in results)


def _hc_pre_outputs(x: Tensor) -> tuple[Tensor, ...]:
    return _mhc_pre_outputs(x, x)[:3]


_HC = (
    "rank(x) in (3, 4)",
    Limit("N == 4", because="N is the number of streams"),
    Limit("D in (4096, 7168)", because="the kernel is compiled for these widths"),
)

HC_PRE = Operator(
    schema=(
        "custom::npu_hc_pre(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, *, int hc_mult=4, "
        "int hc_sinkhorn_iters=20, float norm_eps=9.9999999999999995e-07, float hc_eps=9.9999999999999995e-07) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_hc_pre,
    without_effect=frozenset({"hc_mult"}),
    outputs=_hc_pre_outputs,
    dims={"x": "*B N D", "hc_fn": "G L", "hc_scale": "3", "hc_base": "G"},
    dtypes={"x": BFLOAT16, "hc_fn hc_scale hc_base": FLOAT32},
    limits={
        "host": (*_SHAPES, "hc_mult == N", "hc_sinkhorn_iters >= 1"),
        "ascend910_93": _HC,
        "ascend950": _HC,
    },
    flops=lambda x, hc_fn: _work(x, hc_fn.shape[0]),
    source="cann-recipes-infer ops/ascendc: schema, page, kernel (the product is in HF32) and GE converter of hc_pre",
    summary="h, the second gate and the matrices [N, N] of mhc_pre_sinkhorn; the product in HF32",
)
