"""q = round(n / s), s = max|n| / 127 of each token, n = layer_norm(a + b): an operator that torch_npu does not have.

CANN has it as aclnnAddLayerNormQuant (quantMode "dynamic"); this package brings its own binding of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fusion import Library, Limit, Operator, Rule, attribute, encodings, lowering, pattern, require, scalar, tensor

INT8, HALVES = encodings.INT8, frozenset({torch.float16, torch.bfloat16})


def _compute(x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x1.to(torch.promote_types(x1.dtype, torch.float32)) + x2
    norm = layer_norm(total, gamma.shape, gamma.to(total.dtype), beta.to(total.dtype), epsilon)
    return *INT8.quantised(norm), total.to(x1.dtype)


def _outputs(x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = x1.new_empty(x1.shape[:-1], dtype=torch.promote_types(x1.dtype, torch.float32))
    return INT8.empty(x1), scale, x1.new_empty(x1.shape)


ADD_LAYER_NORM_QUANT = Operator(
    schema=(
        "own_norms::add_layer_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor beta, float epsilon) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_compute,
    outputs=_outputs,
    dims={"gamma": "D", "x1 x2": "*B D", "beta": "D"},
    dtypes={"x1 x2 gamma beta": HALVES},
    limits={"host": (), "ascend910_93": (Limit("D % 32 == 0", because="a line of memory holds 32 int8"),)},
    rounds="x1 + x2",
    source="CANN: aclnnAddLayerNormQuant",
    summary="x = round(x1 + x2); n = layer_norm(x1 + x2) in float32; scale = rowmax|n| / 127; y = rint(n / scale)",
)


class AddLayerNormQuant(Rule):
    """A residual add, the layer norm of the sum, and the quantisation of its rows, in one operator."""

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the norm of `a` + `b` [*B, D] in int8, its scales [*B, 1], and the sum."""
        total = a + b
        numbers, scale = INT8.quantised(layer_norm(total, gamma.shape, gamma, beta, eps).float())
        return numbers, scale.unsqueeze(-1), total

    @pattern
    def written(
        self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=tensor("D"), beta=tensor("D"), eps=scalar(), of=attribute()
    ):
        """round(n / s), s = max|n| / 127 of each row, n = layer_norm(a + b), and the sum"""
        total = a + b
        norm = p.layer_norm(x=total, gamma=gamma, beta=beta, eps=eps)
        scale = p.token_scale(x=norm, encoding=INT8, dtype=of)
        return p.quantise(x=norm, scale=scale, encoding=INT8, dtype=of, scheme="dynamic"), scale, total

    @lowering
    def own(self, a: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, eps: float, of: torch.dtype):
        """Emit the operator, and cast its scales to the dtype of the model."""
        require(of != torch.float16, "the scales are in float16; add_layer_norm_quant requires float32")
        numbers, scale, total = torch.ops.own_norms.add_layer_norm_quant(a, b, gamma, beta, eps)
        return numbers, scale.unsqueeze(-1).to(of), total


def library() -> Library:
    """For the entry point `fusion.patterns`."""
    return Library((AddLayerNormQuant(),), (), (ADD_LAYER_NORM_QUANT,))
