"""Runs in a child process behind the stubs: attention with lengths as a list and as a tensor, through torchair."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the operators)
from torch import Tensor, nn

from fusion.operators import ensure
from fusion.routes import vendor
from tests.support import ge
from tests.support.capture import compiled

LISTED = [3, 5]


class Decode(nn.Module):
    """query [B, 1, N, D], paged cache [P, block, N · D], table [B, M], lengths [B] -> [B, 1, N, D]."""

    def __init__(self, in_tensors: bool, version: int) -> None:
        super().__init__()
        self.in_tensors, self.version = in_tensors, version

    def forward(self, query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        heads = query.shape[2]
        common: dict[str, Any] = {"input_layout": "BSND", "block_table": table, "block_size": cache.shape[1]}
        given = lengths if self.in_tensors else LISTED
        if self.version == 2:
            names = {"num_query_heads": heads, "num_key_value_heads": 1, "softmax_scale": 0.25}
            packet, more = torch.ops.npu.npu_fused_infer_attention_score_v2, {"actual_seq_kvlen": given}
        else:
            names = {"num_heads": heads, "num_key_value_heads": 1, "scale": 0.25}
            packet, more = torch.ops.npu.npu_fused_infer_attention_score, {"actual_seq_lengths_kv": given}
        overload = packet.tensor_lengths if self.in_tensors else packet.default
        return overload(query, cache, cache, **common, **names, **more)[0] + 1


def main() -> None:
    """Print, as one line of JSON, the GE operators of each graph and how far it is from an eager run."""
    ensure()
    ge.install()
    torch.manual_seed(0)
    inputs = (
        torch.randn(2, 1, 4, 16),
        torch.randn(7, 4, 16),
        torch.randperm(7)[:4].reshape(2, 2).to(torch.int32),
        torch.tensor(LISTED),
    )
    report: dict[str, Any] = {}
    for version in (1, 2):
        for in_tensors in (False, True):
            model = Decode(in_tensors, version)
            run, _ = compiled(model, vendor.torchair)
            with torch.no_grad():
                far = (run(*inputs) - model(*inputs)).abs().max().item()
            report[f"v{version} {'tensor' if in_tensors else 'list'}"] = [far, dict(ge.operators())]
    print(json.dumps(report))
