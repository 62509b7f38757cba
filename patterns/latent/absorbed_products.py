"""q kᵀ = (q_nope W_UK) cᵀ + q_rope rᵀ and P v = (P c) W_UV: neither keys nor values of a latent c are computed.

*Matches* the products of attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1),
each for itself: what stands between them, a bias, a soft cap, a softmax of any kind, stays as the model has it.
*Replaces with* products over the latent, all heads of a sequence at once, and `npu_transpose_batchmatmul` for both
projections: where no operator takes the attention as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, Target, attribute, lowering, pattern, scalar, tensor, variants
from patterns.attention.calls import viewed
from patterns.latent import head_projection

PROJECTED = ("transposed", "heads first")
"""How `npu_transpose_batchmatmul` reads the heads that it projects."""
WHOLE = frozenset({"softmax_attention", "latent_attention"})
REMARK = "absorbed as plain products: what the model does with its scores stays as it is"


@dataclass(frozen=True)
class Rows(Group):
    """A latent, of which the model may speak of the first rows alone, the dtype of a product, and its arrangement."""

    latent: Any = tensor("*F C")
    rows: Any = attribute()
    dtype: Any = attribute()
    output_view: Any = attribute()

    def read(self, x: Tensor, batch: Any) -> Tensor:
        """Rows of every sequence [B, T, ..], in the dtype of the product."""
        lines = x.reshape(batch, -1, x.shape[-1])
        return (lines if self.rows is None else lines[:, : self.rows]).to(self.dtype)


@dataclass(frozen=True)
class AbsorbedScores(Rule):
    """Scores of queries over keys that are projected from a latent."""

    def reference(self, nope: Tensor, up: Tensor, latent: Tensor) -> Tensor:
        """The meaning without rotated lanes: nope [B, N, S, D], up [N, D, C], latent [B, T, C] → [B, N, S, T]."""
        return nope @ (latent.unsqueeze(1) @ up.transpose(1, 2)).transpose(2, 3)

    @pattern
    def written(
        self,
        p,
        nope=tensor("B N S D"),
        absorbed=tensor("B N S C"),
        rope=tensor("B N S Dr", optional=True),
        k_rope=tensor("*G Dr", optional=True),
        up=tensor("N D C"),
        scale=scalar(),
        of: Any = Rows,
    ):
        """With rotated lanes beside the latent, or without."""
        told = {name: getattr(of, name) for name in Rows.declared()}
        return p.latent_scores(nope=nope, absorbed=absorbed, rope=rope, k_rope=k_rope, up=up, scale=scale, **told)

    def within(self) -> frozenset[str]:
        """Attention as a whole."""
        return WHOLE

    def remark(self) -> str:
        """Which form was chosen."""
        return REMARK

    @lowering
    @variants(projected=PROJECTED)
    def projecting(self, nope, rope, k_rope, up, scale, of, projected):
        """Queries projected for this product."""
        absorbed = head_projection.expanded(nope.transpose(1, 2), up, projected)
        return viewed(_scores(absorbed, rope, k_rope, scale, of), of.output_view)

    @lowering
    def projected(self, absorbed, rope, k_rope, scale, of):
        """Queries as something else projects them, or a product of heads."""
        return viewed(_scores(absorbed, rope, k_rope, scale, of), of.output_view)


@dataclass(frozen=True)
class AbsorbedContext(Rule):
    """Weights of keys times values that are projected from a latent."""

    def reference(self, weights: Tensor, latent: Tensor, up: Tensor) -> Tensor:
        """The meaning: weights [B, N, S, T], latent [B, T, C], up [N, C, E] → [B, N, S, E]."""
        return weights @ (latent.unsqueeze(1) @ up)

    @pattern
    def written(self, p, weights=tensor("B N S T"), up=tensor("N C E"), of: Any = Rows):
        """Whatever the weights are."""
        return p.latent_context(weights=weights, up=up, **{name: getattr(of, name) for name in Rows.declared()})

    def within(self) -> frozenset[str]:
        """Attention as a whole."""
        return WHOLE

    def remark(self) -> str:
        """Which form was chosen."""
        return REMARK

    @lowering
    @variants(projected=PROJECTED)
    def expanding(self, weights, up, of, projected):
        """Weights over the latent, and heads turned back behind tokens."""
        return viewed(_context(weights, up, of, projected), of.output_view)

    @lowering
    def multiplying(self, weights, up, of):
        """Weights over the latent, and a batched product of heads, which takes any sizes."""
        return viewed(_context(weights, up, of, "multiplied"), of.output_view)


def _scores(absorbed: Tensor, rope: Any, k_rope: Any, scale: float, of: Rows) -> Tensor:
    """Queries [B, N, S, C] and perhaps [B, N, S, Dr] over the latent and its rotated lanes: [B, N, S, T]."""
    batch, heads = absorbed.shape[:2]
    parts = [(absorbed, of.latent)] if rope is None else [(rope, k_rope), (absorbed, of.latent)]
    sides = [(q.to(of.dtype).flatten(1, 2), of.read(k, batch).transpose(1, 2)) for q, k in parts]
    if rope is None:
        q, k = sides[0]
        return torch.bmm(q if scale == 1 else q * scale, k).unflatten(1, (heads, -1))
    scores = torch.baddbmm(torch.bmm(*sides[0]), *sides[1], beta=scale, alpha=scale)
    return scores.unflatten(1, (heads, -1))


def _context(weights: Tensor, up: Tensor, of: Rows, projected: str) -> Tensor:
    """Weights [B, N, S, T] over the latent, and every head times its matrix: [B, N, S, E]."""
    batch, heads = weights.shape[:2]
    y = torch.bmm(weights.to(of.dtype).flatten(1, 2), of.read(of.latent, batch)).unflatten(1, (heads, -1))
    return head_projection.expanded(y.to(up.dtype).transpose(1, 2), up, projected).to(of.dtype)
