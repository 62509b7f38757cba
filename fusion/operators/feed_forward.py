"""Feed-forward networks: gated activations, and the routing of tokens to experts by softmax and top-k."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from fusion.operators.contract import A2_A3, CHIPS, Limit, Operator
from fusion.operators.dtypes import FLOATS, compute_dtype


def _swiglu(input: Tensor, dim: int) -> Tensor:
    gate, value = input.to(compute_dtype(input)).chunk(2, dim)
    return (silu(gate) * value).to(input.dtype).contiguous()


def _halved(input: Tensor, dim: int) -> Tensor:
    shape = list(input.shape)
    shape[dim] = shape[dim] // 2
    return input.new_empty(shape)


SWIGLU = Operator(
    schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    compute=_swiglu,
    outputs=_halved,
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={
        "host": ("-rank(input) <= dim and dim < rank(input)", "size(input, dim) % 2 == 0"),
        **dict.fromkeys(CHIPS, ("rank(input) <= 8",)),
    },
    source="op-plugin: torch_npu.npu_swiglu; CANN: aclnnSwiGlu",
    summary="a, b = halves of input along dim; out = round(a · sigmoid(a) · b), in float32",
)


def _gating_top_k_softmax(
    x: Tensor, k: int, renorm: int | None, output_softmax: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(x)
    shares = x if renorm else x.to(wide).softmax(-1)  # a wider dtype would not change what is largest
    best, index = shares.topk(k, dim=-1)
    y = best.to(wide).softmax(-1) if renorm else best
    whole = shares.to(torch.float32) if output_softmax and not renorm else x.new_empty([0], dtype=torch.float32)
    return y.to(x.dtype), index.to(torch.int32), whole.contiguous()


def _outputs(x: Tensor, k: int, renorm: int | None, output_softmax: bool | None) -> tuple[Tensor, Tensor, Tensor]:
    chosen = (*x.shape[:-1], k)
    whole = x.shape if output_softmax and not renorm else [0]
    return x.new_empty(chosen), x.new_empty(chosen, dtype=torch.int32), x.new_empty(whole, dtype=torch.float32)


MOE_GATING_TOP_K_SOFTMAX_V2 = Operator(
    schema=(
        "npu::npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
        "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)"
    ),
    compute=_gating_top_k_softmax,
    outputs=_outputs,
    dims={"x": "*B E"},
    dtypes={"x": FLOATS},
    limits={
        "host": (
            "rank(x) in (2, 3)",
            "0 < k and k <= E",
            "renorm in (0, 1)",
            Limit("not given(finished)", because="what it gives for finished rows is not documented"),
            Limit("rank(x) == 2", when="output_softmax == True", because="its Meta kernel forgets a dim of three"),
        ),
        **dict.fromkeys(A2_A3, ("k <= 1024",)),
    },
    source="op-plugin: torch_npu.npu_moe_gating_top_k_softmax(_v2); CANN: aclnnMoeGatingTopKSoftmaxV2",
    summary="renorm 0: y, index = top-k of softmax(x); renorm 1: y = softmax of the k largest x; in float32",
)
