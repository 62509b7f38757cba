"""Residual streams behind a layer: y_i = post_i · out + Σ_j res_ji x_j, or x_i + post_i · out without a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.dtype_sets import FLOAT32, HALVES, compute_dtype
from fusion.operators.flops import product
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator


def _updated(x: Tensor, matrix: Tensor | None, out: Tensor, post: Tensor) -> Tensor:
    """Compute the streams `x` [*B, N, D] behind a layer with the result `out` [*B, D], rounded once.

    `matrix` [*B, N, N] mixes the streams by its columns; None leaves them as they are. `post` [*B, N] weighs `out`.
    """
    wide = compute_dtype(x)
    added = post.to(wide).unsqueeze(-1) * out.to(wide).unsqueeze(-2)
    streams = x.to(wide)
    mixed = streams if matrix is None else torch.matmul(matrix.to(wide).transpose(-1, -2), streams)
    return (added + mixed).to(x.dtype).contiguous()


def _mhc_post(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    return _updated(x, h_res, h_out, h_post)


_SUMMARY = "y_i = round({post}_i · {out} + Σ_j {matrix}_ji · x_j) in float32"

MHC_POST = Operator(
    schema="npu::npu_mhc_post(Tensor x, Tensor? h_res, Tensor h_out, Tensor h_post) -> Tensor",
    compute=_mhc_post,
    outputs=lambda x: x.new_empty(x.shape),
    dims={"x": "*B N D", "h_res": "*B N N", "h_out": "*B D", "h_post": "*B N"},
    dtypes={"x h_out": HALVES, "h_res h_post": FLOAT32},
    limits={"ascend950": ("rank(x) in (3, 4)", "dtype(h_out) == dtype(x)")},
    lowerings=frozenset({"eager", "npugraph_ex"}),
    flops=lambda x: product(x, x.shape[-2]),
    source="op-plugin: torch_npu.npu_mhc_post and its test (the matrix is transposed, as on one page alone); no GE "
    "converter in 2.13.0",
    summary=_SUMMARY.format(post="h_post", out="h_out", matrix="h_res") + "; without h_res x_i for the sum",
)


def _cann_mhc_post(x: Tensor, hRes: Tensor, hOut: Tensor, hPost: Tensor) -> Tensor:
    return _updated(x, hRes, hOut, hPost)


CANN_MHC_POST = Operator(
    schema="cann_ops_transformer::mhc_post(Tensor x, Tensor hRes, Tensor hOut, Tensor hPost) -> Tensor",
    compute=_cann_mhc_post,
    outputs=lambda x: x.new_empty(x.shape),
    dims={"x": "*B N D", "hRes": "*B N N", "hOut": "*B D", "hPost": "*B N"},
    dtypes={"x hOut": HALVES, "hRes hPost": FLOAT32},
    limits=dict.fromkeys(
        A2_A3,
        (
            "rank(x) in (3, 4)",
            "dtype(hOut) == dtype(x)",
            Limit("N == 4", because="N is the number of streams"),
            "D % 128 == 0 and D <= 100000",
        ),
    ),
    lowerings=frozenset({"eager", "npugraph_ex"}),
    flops=lambda x: product(x, x.shape[-2]),
    source="ops-transformer mhc/mhc_post: page, torch_extension and aclnnMhcPost (A2 and A3); no GE converter",
    summary=_SUMMARY.format(post="hPost", out="hOut", matrix="hRes"),
)


def _hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return _updated(residual, comb, x, post)


_HC = (
    "rank(residual) in (3, 4)",
    "dtype(x) == dtype(residual)",
    "dtype(comb) == dtype(post)",
    Limit("N == 4", because="N is the number of streams"),
    Limit("D in (4096, 7168)", because="the kernel is compiled for these widths"),
)

HC_POST = Operator(
    schema="custom::npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    compute=_hc_post,
    outputs=lambda residual: residual.new_empty(residual.shape),
    dims={"residual": "*B N D", "x": "*B D", "post": "*B N", "comb": "*B N N"},
    dtypes={"x residual post comb": HALVES | FLOAT32},
    limits={"ascend910_93": _HC, "ascend950": _HC},
    flops=lambda residual: product(residual, residual.shape[-2]),
    source="cann-recipes-infer ops/ascendc: schema, page and GE converter of hc_post (the result of the layer first)",
    summary="y_i = round(post_i · x + Σ_j comb_ji · residual_j) in float32",
)
