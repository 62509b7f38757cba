"""h = Σ_i pre_i x_i, pre = sigmoid(α₀ w + b) + eps, post = 2 · sigmoid(α₁ w + b), matrix = sinkhorn(α₂ w + b).

Here w = x Φᵀ / rms(x): the gates of N residual streams x of a token, as in DeepSeek-V4 and GLM-5-Next (Xie et al., mHC:
Manifold-Constrained Hyper-Connections, 2026). *Matches* the norm before or behind the linear layer, one layer or three,
and Φ in float32 or 16 bits. *Replaces with* `npu_mhc_pre`, or where the package is there, with `mhc_pre_sinkhorn` or
`npu_hc_pre`, which also normalise the matrix. These multiply in HF32, with 10 bits of mantissa: without a loss where Φ
comes from bfloat16 or float16, else only if the rule `stream_gates_hf32` is opted in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, Rule, attribute, calls, lowering, pattern, refused_on, require, scalar, tensor, variants
from patterns.streams.sinkhorn import Sinkhorn

f32 = torch.float32
_HF32 = (
    "phi: it has float32 numbers; {} multiplies in HF32 there, with 10 bits of mantissa, and requires a weight from "
    "bfloat16 or float16 for the same numbers; add stream_gates_hf32 to the option opt_in if gates within 1e-3 and "
    "layer inputs within 2^-7 are enough"
)
_BY_CANN, _BY_RECIPES = _HF32.format("mhc_pre_sinkhorn"), _HF32.format("npu_hc_pre")


@dataclass(frozen=True)
class WideGates(Group):
    """Captures of the three gates of streams `x`, with a weight phi in float32."""

    x: Any = tensor("*B N D")
    phi: Any = tensor("G L")
    alpha: Any = tensor("3")
    bias: Any = tensor("G")
    gamma: Any = tensor("N D", optional=True)
    norm_eps: Any = scalar()
    hc_eps: Any = scalar()
    is_narrow: Any = attribute(False)
    flat_gate: Any = attribute()
    flat_logits: Any = attribute()

    def arranged(self, hidden: Tensor, gate: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        """Return the results of an operator in the dims that the model has them in."""
        *lead, count, width = self.x.shape
        gates, matrices = ([-1] if flat else lead for flat in (self.flat_gate, self.flat_logits))
        return hidden.reshape(*lead, width), gate.reshape(*gates, count), matrix.reshape(*matrices, count, count)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi, alpha and bias in float32."""
        return self.phi.to(f32), self.alpha.to(f32), self.bias.to(f32)


@dataclass(frozen=True)
class NarrowGates(WideGates):
    """Captures of the three gates of streams `x`, with a weight phi from bfloat16 or float16."""

    is_narrow: Any = attribute(True)


@dataclass(frozen=True)
class Matrix(Group):
    """The matrix [*B, N, N], normalised from its logits."""

    iterations: Any = scalar()
    eps: Any = scalar()

    def term(self, p, gates):
        """Match the matrix of the logits of `gates`."""
        return p.sinkhorn_matrix(x=p.mixing_logits(**vars(gates)), iterations=self.iterations, eps=self.eps)


@dataclass(frozen=True)
class Logits(Group):
    """The logits [*B, N, N] of the matrix, which something else normalises."""

    def term(self, p, gates):
        """Match the logits of `gates`."""
        return p.mixing_logits(**vars(gates))


@dataclass(frozen=True)
class StreamGates(Rule):
    """The gates of a hyper-connection, and the input of its layer."""

    aliases = ("hyper_connection", "mhc_pre", "mhc_pre_sinkhorn")

    def reference(
        self, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, norm_eps: float, eps: float, iterations: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the layer input [*B, D], the gate [*B, N] of its result and the matrix [*B, N, N] of streams `x`."""
        count = x.shape[-2]
        flat = F.rms_norm(x.flatten(-2).float(), (x[0].numel(),), eps=norm_eps)
        parts = F.linear(flat, phi).split([count, count, count * count], dim=-1)
        biases = bias.split([count, count, count * count])
        pre, post, res = (a * w + b for w, a, b in zip(parts, alpha, biases, strict=True))
        matrix = Sinkhorn().reference(res.unflatten(-1, (count, count)), iterations, eps)
        return ((pre.sigmoid() + eps).unsqueeze(-1) * x).sum(-2).to(x.dtype), 2 * post.sigmoid(), matrix

    @pattern
    @variants(gates=(WideGates, NarrowGates), result=(Matrix, Logits))
    def gated(self, p, gates, result):
        """Σ_i pre_i x_i in the dtype of x, post, and the matrix or its logits"""
        captures = vars(gates)
        return p.as_dtype(p.collapsed_streams(**captures), gates.x), p.output_gate(**captures), result.term(p, gates)

    @lowering
    @variants(result=(Logits,))
    def npu(self, gates: WideGates):
        """Emit npu_mhc_pre, which gives the logits of the matrix."""
        gamma = None if gates.gamma is None else gates.gamma.to(f32)
        results = torch.ops.npu.npu_mhc_pre(
            _rows(gates.x), *gates.weights(), gamma=gamma, norm_eps=gates.norm_eps, hc_eps=gates.hc_eps
        )
        return gates.arranged(*results[:3])

    @lowering
    @variants(gates=(NarrowGates,), result=(Matrix,))
    @calls("cann_ops_transformer::mhc_pre_sinkhorn")
    def with_matrix(self, gates: WideGates, result: Matrix):
        """Emit mhc_pre_sinkhorn, which gives the matrix as well."""
        return _mhc_pre_sinkhorn(gates, result)

    @lowering
    @variants(gates=(WideGates,), result=(Matrix,))
    @calls("cann_ops_transformer::mhc_pre_sinkhorn")
    @refused_on("ascend910b", _BY_CANN)
    @refused_on("ascend910_93", _BY_CANN)
    def with_matrix_in_hf32(self, gates: WideGates, result: Matrix):
        """Emit mhc_pre_sinkhorn, which rounds phi to HF32 on these chips."""
        return _mhc_pre_sinkhorn(gates, result)

    @lowering
    @variants(gates=(NarrowGates,), result=(Matrix,))
    @calls("custom::npu_hc_pre")
    def recipes(self, gates: WideGates, result: Matrix):
        """Emit npu_hc_pre of the recipes, which gives the matrix as well."""
        return _npu_hc_pre(gates, result)

    @lowering
    @variants(gates=(WideGates,), result=(Matrix,))
    @calls("custom::npu_hc_pre")
    @refused_on("ascend910_93", _BY_RECIPES)
    @refused_on("ascend950", _BY_RECIPES)
    def recipes_in_hf32(self, gates: WideGates, result: Matrix):
        """Emit npu_hc_pre of the recipes, which rounds phi to HF32."""
        return _npu_hc_pre(gates, result)


@dataclass(frozen=True)
class StreamGatesHf32(StreamGates):
    """The gates of a hyper-connection with phi rounded to HF32: gates within 1e-3, and layer inputs within 2^-7."""

    aliases = ()
    opt_in = True

    @lowering
    @variants(gates=(WideGates,), result=(Matrix,))
    @calls("cann_ops_transformer::mhc_pre_sinkhorn")
    def with_matrix_in_hf32(self, gates: WideGates, result: Matrix):
        """Emit mhc_pre_sinkhorn, with phi rounded to HF32."""
        return _mhc_pre_sinkhorn(gates, result)

    @lowering
    @variants(gates=(WideGates,), result=(Matrix,))
    @calls("custom::npu_hc_pre")
    def recipes_in_hf32(self, gates: WideGates, result: Matrix):
        """Emit npu_hc_pre of the recipes, with phi rounded to HF32."""
        return _npu_hc_pre(gates, result)


def _mhc_pre_sinkhorn(gates: WideGates, result: Matrix) -> tuple[Tensor, ...]:
    """Emit mhc_pre_sinkhorn on streams [B, S, N, D]."""
    _refuse(gates, result, "mhc_pre_sinkhorn")
    x, count = gates.x, gates.x.shape[-2]
    rows = x if x.ndim == 4 else x.reshape(1, -1, *x.shape[-2:])
    results = torch.ops.cann_ops_transformer.mhc_pre_sinkhorn(
        rows, *gates.weights(), count, result.iterations, result.eps, gates.norm_eps, False
    )
    return gates.arranged(*results[:3])


def _npu_hc_pre(gates: WideGates, result: Matrix) -> tuple[Tensor, ...]:
    """Emit npu_hc_pre."""
    _refuse(gates, result, "npu_hc_pre")
    rows = _rows(gates.x)
    how = dict(hc_mult=rows.shape[-2], hc_sinkhorn_iters=result.iterations, norm_eps=gates.norm_eps, hc_eps=result.eps)
    return gates.arranged(*torch.ops.custom.npu_hc_pre(rows, *gates.weights(), **how))


def _refuse(gates: WideGates, result: Matrix, operator: str) -> None:
    """Refuse two numbers for eps, and a gain of the norm, where `operator` normalises the matrix as well."""
    require(
        gates.hc_eps == result.eps,
        "eps: {pre} is added to the gates of the collapse, and {matrix} in the matrix; {operator} requires one; add "
        "one number at all places",
        pre=gates.hc_eps,
        matrix=result.eps,
        operator=operator,
    )
    require(
        gates.gamma is None,
        "gamma: the norm of the streams has a gain; {operator} requires a norm without; multiply phi by the gain",
        operator=operator,
    )


def _rows(x: Tensor) -> Tensor:
    """Return streams `x` [*B, N, D] with one or two leading dims."""
    return x if x.ndim in (3, 4) else x.reshape(-1, *x.shape[-2:])
