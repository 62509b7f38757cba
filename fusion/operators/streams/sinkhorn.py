"""Doubly stochastic matrices: softmax of logits, then columns and rows divided by their sums in turns (Sinkhorn)."""

from __future__ import annotations

from torch import Tensor

from fusion.operators.dtype_sets import FLOAT32
from fusion.operators.limits import Limit
from fusion.operators.operator import Operator


def sinkhorn(x: Tensor, eps: float, num_iters: int) -> Tensor:
    """Normalise the matrices `x` [*B, N, N] of logits: columns once, then rows and columns `num_iters` - 1 times.

    `eps` is added to the softmax over rows, and to each sum.
    """
    y = x.softmax(-1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


def _computed(x: Tensor, eps: float, num_iters: int) -> tuple[Tensor, None, None]:
    return sinkhorn(x, eps, num_iters).contiguous(), None, None


MHC_SINKHORN = Operator(
    schema=(
        "npu::npu_mhc_sinkhorn(Tensor x, *, float eps=9.9999999999999995e-07, SymInt num_iters=20, int out_flag=0) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_computed,
    uncomputed={"out_flag": "sums and matrices of all steps are results for training alone"},
    outputs=lambda x: (x.new_empty(x.shape), None, None),
    dims={"x": "*B N N"},
    dtypes={"x": FLOAT32},
    limits={
        "host": ("num_iters >= 1",),
        "ascend950": (
            "rank(x) in (3, 4)",
            Limit("N in (4, 6, 8)", because="N is the number of streams"),
            "num_iters <= 100",
        ),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="op-plugin: torch_npu.npu_mhc_sinkhorn and its test; no GE converter in 2.13.0",
    summary=(
        "y = softmax(x, -1) + eps; y = y / (Σ_i y + eps); num_iters - 1 times: y = y / (Σ_j y + eps), "
        "y = y / (Σ_i y + eps), in float32"
    ),
)
