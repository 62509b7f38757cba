"""q kᵀ = (q_nope W_UK) cᵀ + q_rope rᵀ and P v = (P c) W_UV: neither keys nor values of a latent c are computed.

*Matches* the products of attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1),
each for itself: what stands between them, a bias, a soft cap, a softmax of any kind, stays as the model has it; and
`scaled_dot_product_attention`, which holds both. *Replaces with* products over the latent, all heads of a sequence at
once, and `npu_transpose_batchmatmul` for both projections: where no operator takes the attention as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion import Group, Rule, attribute, lowering, pattern, scalar, tensor, variants
from patterns.attention.calls import viewed
from patterns.latent import head_projection

TURNED = ("transposed", "heads first")
"""How `npu_transpose_batchmatmul` reads the heads that it projects."""


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

    def said(self) -> dict[str, Any]:
        """As the readers say it."""
        return dict(vars(self))


@dataclass(frozen=True)
class Scores(Group):
    """Queries of heads over keys that W_UK projects from a latent, with rotated lanes of both, if there are any."""

    nope: Any = tensor("B N S D")
    absorbed: Any = tensor("B N S C")
    rope: Any = tensor("B N S Dr", optional=True)
    k_rope: Any = tensor("*G Dr", optional=True)
    up: Any = tensor("N D C")
    scale: Any = scalar()

    def terms(self, p, of) -> Any:
        """Their product."""
        return p.latent_scores(**vars(self), **of.said())

    def queries(self, projected: str) -> Tensor:
        """Queries over the latent [B, N, S, C]; those that are "multiplied" something else may give."""
        if projected == "multiplied":
            return self.absorbed
        return head_projection.expanded(self.nope.transpose(1, 2), self.up, projected)

    def computed(self, of: Rows, projected: str) -> Tensor:
        """Scores [B, N, S, T]."""
        absorbed = self.queries(projected)
        batch, heads = absorbed.shape[:2]
        pairs = [(absorbed, of.latent)] if self.rope is None else [(self.rope, self.k_rope), (absorbed, of.latent)]
        sides = [(q.to(of.dtype).flatten(1, 2), of.read(k, batch).transpose(1, 2)) for q, k in pairs]
        if self.rope is None:
            q, k = sides[0]
            return torch.bmm(q if self.scale == 1 else q * self.scale, k).unflatten(1, (heads, -1))
        scores = torch.baddbmm(torch.bmm(*sides[0]), *sides[1], beta=self.scale, alpha=self.scale)
        return scores.unflatten(1, (heads, -1))


@dataclass(frozen=True)
class Context(Group):
    """Weights of keys, whatever they are, over values that W_UV projects from a latent."""

    weights: Any = tensor("B N S T")
    up: Any = tensor("N C E")

    def terms(self, p, of) -> Any:
        """Their product."""
        return p.latent_context(weights=self.weights, up=self.up, **of.said())

    def computed(self, of: Rows, projected: str) -> Tensor:
        """Weights over the latent, and every head times its matrix: [B, N, S, E]."""
        batch, heads = self.weights.shape[:2]
        weights = self.weights.to(of.dtype).flatten(1, 2)
        y = torch.bmm(weights, of.read(of.latent, batch)).unflatten(1, (heads, -1))
        return head_projection.expanded(y.to(self.up.dtype).transpose(1, 2), self.up, projected).to(of.dtype)


@dataclass(frozen=True)
class Whole(Scores):
    """A call of scaled_dot_product_attention, which holds scores and weights, with whatever mask it is given.

    Attributes:
        values, value_rows: another latent, where values are not of that of the keys, and its first rows.
        up_value: W_UV.
        bias: the mask.
    """

    values: Any = tensor("*H C", optional=True)
    up_value: Any = tensor("N C E")
    value_rows: Any = attribute()
    bias: Any = tensor("*M", optional=True)

    def terms(self, p, of) -> Any:
        """The call."""
        return p.latent_sdpa(**vars(self), **of.said())

    def computed(self, of: Rows, projected: str) -> Tensor:
        """The same call over the latent as the one head of keys and values, of which all heads are queries."""
        q = self.queries(projected)
        batch, heads, queries, width = q.shape
        k = of.read(of.latent, batch)
        if self.rope is not None:
            q, k = torch.cat((q, self.rope), -1), torch.cat((k, of.read(self.k_rope, batch)), -1)
        v = k if self.values is None else replace(of, rows=self.value_rows).read(self.values, batch)
        kv = (each.unsqueeze(1) for each in (k, v))
        mask = None if self.bias is None else _of_heads(self.bias, heads, queries)
        y = scaled_dot_product_attention(q.flatten(1, 2).unsqueeze(1), *kv, attn_mask=mask, scale=self.scale)
        y = (y[..., :width] if self.values is None else y).squeeze(1).unflatten(1, (heads, -1))
        return head_projection.expanded(y.transpose(1, 2), self.up_value, projected)


@dataclass(frozen=True)
class AbsorbedProducts(Rule):
    """Products of attention over a latent instead of the keys and values that are projected from it."""

    aliases = ("absorption",)

    def reference(self, nope: Tensor, up: Tensor, latent: Tensor) -> Tensor:
        """Scores without rotated lanes: nope [B, N, S, D], up [N, D, C], latent [B, T, C] → [B, N, S, T]."""
        return nope @ (latent.unsqueeze(1) @ up.transpose(1, 2)).transpose(2, 3)

    @pattern
    @variants(part=(Scores, Context, Whole))
    def written(self, p, part, of: Any = Rows):
        """Scores, the product of weights and values, or both in one call."""
        return part.terms(p, of)

    def within(self) -> frozenset[str]:
        """Attention as a whole."""
        return frozenset({"softmax_attention", "attention", "latent_attention"})

    def remark(self) -> str:
        """Which form was chosen."""
        return "absorbed as plain products: what the model does with its scores stays as it is"

    @lowering
    @variants(projected=TURNED)
    def projecting(self, part, of, projected):
        """Heads are turned back behind tokens by the operator that projects them."""
        return viewed(part.computed(of, projected), of.output_view)

    @lowering
    def multiplying(self, part, of):
        """Queries that something else projects, or a batched product of heads, which takes any sizes."""
        return viewed(part.computed(of, "multiplied"), of.output_view)


def _of_heads(bias: Tensor, heads: Any, queries: Any) -> Tensor:
    """A mask [.., S, T] for the queries of all heads of a sequence, [B or 1, 1, N · S, T]."""
    rows = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
    return rows.expand(-1, heads, queries, -1).flatten(1, 2).unsqueeze(1)
