"""x'_i = gate_i · out + Σ_j matrix_ji x_j: residual streams behind a layer (Xie et al., mHC, 2026).

*Matches* the sum in the dtype of the streams or in float32, with gate and matrix rounded before or not, and the matrix
transposed by `mT` or by the dims of a product that is summed; without a matrix gate_i · out + x_i as well. *Replaces
with* `npu_mhc_post`, or where the package is there, with `mhc_post` or `npu_hc_post`: all round once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fusion import Rule, calls, lowering, pattern, require, tensor

f32 = torch.float32


@dataclass(frozen=True)
class StreamUpdate(Rule):
    """Residual streams, mixed by a matrix, plus the gated result of a layer."""

    aliases = ("mhc_post", "hyper_connection_update")

    def reference(self, x: Tensor, matrix: Tensor, out: Tensor, gate: Tensor) -> Tensor:
        """Compute the streams [*B, N, D] of `x` [*B, N, D], `matrix` [*B, N, N], `out` [*B, D] and `gate` [*B, N]."""
        return (gate.unsqueeze(-1) * out.unsqueeze(-2) + matrix.mT @ x.to(matrix.dtype)).to(x.dtype)

    @pattern
    def updated(
        self, p, x=tensor("*B N D"), matrix=tensor("*B N N", optional=True), out=tensor("*B D"), gate=tensor("*B N")
    ):
        """gate_i · out + Σ_j matrix_ji x_j, cast to the dtype of x"""
        return p.as_dtype(p.updated_streams(x=x, matrix=matrix, out=out, gate=gate), x)

    @lowering
    def npu(self, x: Tensor, matrix: Tensor | None, out: Tensor, gate: Tensor):
        """Emit npu_mhc_post."""
        mixing = None if matrix is None else _rows(matrix, x).to(f32)
        y = torch.ops.npu.npu_mhc_post(_rows(x, x), mixing, _rows(out, x), _rows(gate, x).to(f32))
        return y.reshape(x.shape)

    @lowering
    @calls("cann_ops_transformer::mhc_post")
    def package(self, x: Tensor, matrix: Tensor | None, out: Tensor, gate: Tensor):
        """Emit mhc_post."""
        mixing = _rows(_required(matrix, "mhc_post"), x).to(f32).contiguous()  # no page takes a transposed view
        y = torch.ops.cann_ops_transformer.mhc_post(_rows(x, x), mixing, _rows(out, x), _rows(gate, x).to(f32))
        return y.reshape(x.shape)

    @lowering
    @calls("custom::npu_hc_post")
    def recipes(self, x: Tensor, matrix: Tensor | None, out: Tensor, gate: Tensor):
        """Emit npu_hc_post of the recipes."""
        mixing = _rows(_required(matrix, "npu_hc_post"), x).to(f32).contiguous()
        y = torch.ops.custom.npu_hc_post(_rows(out, x), _rows(x, x), _rows(gate, x).to(f32), mixing)
        return y.reshape(x.shape)


def _required(matrix: Tensor | None, operator: str) -> Tensor:
    """Return `matrix`; refuse None, because `operator` mixes the streams always."""
    require(
        matrix is not None,
        "matrix: there is none that mixes the streams; {operator} requires one; npu_mhc_post on ascend950 does not",
        operator=operator,
    )
    return cast(Tensor, matrix)


def _rows(each: Tensor, x: Tensor) -> Tensor:
    """Return `each`, of streams `x` [*B, N, D], with one or two leading dims."""
    lead = x.ndim - 2
    return each if lead in (1, 2) else each.reshape(-1, *each.shape[lead:])
