"""Outputs of attention over parts of the keys, merged by the log-sum-exps of their scores.

out = Σᵢ exp(lseᵢ - lse') local_outᵢ        lse' = m + log Σᵢ exp(lseᵢ - m), m = max lseᵢ
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.operators.contract import CHIPS, Operator
from fusion.operators.dtypes import FLOAT32, FLOATS, compute_dtype


def _attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sums = torch.stack([each.to(compute_dtype(each)) for each in lse])
    both = sums.logsumexp(0)
    out = sum(
        (part - both).exp().unsqueeze(-1) * each.to(compute_dtype(each))
        for part, each in zip(sums, local_out, strict=True)
    )
    assert isinstance(out, Tensor)
    return out.to(local_out[0].dtype).contiguous(), both.to(lse[0].dtype)


_KERNEL = (
    "length(lse) <= 16",
    "dtype(local_out) in ('float32', 'float16', 'bfloat16')",
    "D >= 8",
    "D <= 512",
    "D % 8 == 0",
)

ATTENTION_UPDATE = Operator(
    schema="npu::npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
    compute=_attention_update,
    outputs=lambda lse, local_out: tuple(each[0].new_empty(each[0].shape) for each in (local_out, lse)),
    dims={"lse": "R", "local_out": "R D"},
    dtypes={"lse": FLOAT32, "local_out": FLOATS},
    limits={
        "host": ("length(lse) >= 1", "length(lse) == length(local_out)", "update_type in (0, 1)"),
        **dict.fromkeys(CHIPS, _KERNEL),
    },
    source="op-plugin: torch_npu.npu_attention_update, test_npu_attention_update.py; CANN: aclnnAttentionUpdate",
    summary=(
        "out = round(Σ exp(lse_i - lse') local_out_i), lse' = log Σ exp(lse_i), over tensors lse_i [R] and local_out_i "
        "[R, D] in float32; lse' is told where update_type is 1, and means nothing on a device where it is 0"
    ),
)
