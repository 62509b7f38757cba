"""q kᵀ = (q_nope W_UK) cᵀ + q_rope rᵀ and P v = (P c) W_UV: neither keys nor values of a latent c are computed.

*Matches* q kᵀ, P v, or a call of `scaled_dot_product_attention`, for keys and values that are projected from a latent
(DeepSeek-V2, 2024, §2.1). Operations between the two products, such as a bias, a soft cap or any softmax, remain as the
model has them. *Replaces with* products over the latent, for all heads of a sequence at once, and
`npu_transpose_batchmatmul` for W_UK and W_UV, where no operator takes all of the attention.
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

LAYOUTS = ("transposed", "heads first")
"""Layouts in which `npu_transpose_batchmatmul` reads heads, see `head_projection.expanded`."""


@dataclass(frozen=True)
class Rows(Group):
    """Latent in a product, and dtype and views of the product; the model reads the leading `rows`, or all if None."""

    latent: Any = tensor("*F C")
    rows: Any = attribute()
    dtype: Any = attribute()
    output_view: Any = attribute()

    def read(self, x: Tensor, batch: Any) -> Tensor:
        """Reshape `x` to [B, T, ..], cut to the first rows that the model reads, in the dtype of the product."""
        rows = x.reshape(batch, -1, x.shape[-1])
        return (rows if self.rows is None else rows[:, : self.rows]).to(self.dtype)

    def captures(self) -> dict[str, Any]:
        """Return the fields as captures of a word, by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class Scores(Group):
    """Scores of queries and keys that W_UK projects from a latent, with rotated lanes, if there are any."""

    nope: Any = tensor("B N S D")
    absorbed: Any = tensor("B N S C")
    rope: Any = tensor("B N S Dr", optional=True)
    k_rope: Any = tensor("*G Dr", optional=True)
    up: Any = tensor("N D C")
    scale: Any = scalar()

    def terms(self, p, latent_rows) -> Any:
        """Build the term `latent_scores`."""
        return p.latent_scores(**vars(self), **latent_rows.captures())

    def queries(self, projected: str) -> Tensor:
        """Return the absorbed queries nope · W_UK [B, N, S, C].

        For "multiplied" they are the captured value, which another rule may compute; for one of `LAYOUTS` they are
        computed by npu_transpose_batchmatmul.
        """
        if projected == "multiplied":
            return self.absorbed
        return head_projection.expanded(self.nope.transpose(1, 2), self.up, projected)

    def computed(self, latent_rows: Rows, projected: str) -> Tensor:
        """Compute the scores [B, N, S, T] as products of N · S queries with the latent and with the rotated key.

        `latent_rows` has the latent, `projected` chooses the operator for W_UK, see `queries`.
        """
        absorbed, latent, dtype = self.queries(projected), latent_rows.latent, latent_rows.dtype
        batch, heads = absorbed.shape[:2]
        pairs = [(absorbed, latent)] if self.rope is None else [(self.rope, self.k_rope), (absorbed, latent)]
        sides = [(q.to(dtype).flatten(1, 2), latent_rows.read(k, batch).transpose(1, 2)) for q, k in pairs]
        if self.rope is None:
            q, k = sides[0]
            return torch.bmm(q if self.scale == 1 else q * self.scale, k).unflatten(1, (heads, -1))
        scores = torch.baddbmm(torch.bmm(*sides[0]), *sides[1], beta=self.scale, alpha=self.scale)
        return scores.unflatten(1, (heads, -1))


@dataclass(frozen=True)
class Context(Group):
    """Product of finite weights, of a softmax or not, with values that W_UV projects from a latent."""

    weights: Any = tensor("B N S T")
    up: Any = tensor("N C E")

    def terms(self, p, latent_rows) -> Any:
        """Build the term `latent_context`."""
        return p.latent_context(weights=self.weights, up=self.up, **latent_rows.captures())

    def computed(self, latent_rows: Rows, projected: str) -> Tensor:
        """Compute (weights · latent) · W_UV [B, N, S, E].

        `latent_rows` has the latent, `projected` chooses the operator for W_UV, see `head_projection.expanded`.
        """
        (batch, heads), dtype = self.weights.shape[:2], latent_rows.dtype
        weights = self.weights.to(dtype).flatten(1, 2)
        y = torch.bmm(weights, latent_rows.read(latent_rows.latent, batch)).unflatten(1, (heads, -1))
        return head_projection.expanded(y.to(self.up.dtype).transpose(1, 2), self.up, projected).to(dtype)


@dataclass(frozen=True)
class Sdpa(Scores):
    """A call of scaled_dot_product_attention, which computes scores, softmax and context at once, with any mask.

    Attributes:
        values: latent of the values, where they have another latent or other rows than the keys.
        value_rows: number of leading rows of `values` that the model reads; None for all.
        up_value: W_UV [N, C, E].
        bias: attn_mask, boolean or additive.
    """

    values: Any = tensor("*H C", optional=True)
    up_value: Any = tensor("N C E")
    value_rows: Any = attribute()
    bias: Any = tensor("*M", optional=True)

    def terms(self, p, latent_rows) -> Any:
        """Build the term `latent_sdpa`."""
        return p.latent_sdpa(**vars(self), **latent_rows.captures())

    def computed(self, latent_rows: Rows, projected: str) -> Tensor:
        """Compute the call with the latent as the single head of keys and values, and N · S queries: [B, N, S, E].

        `latent_rows` has the latent, `projected` chooses the operator for W_UK and W_UV.
        """
        q = self.queries(projected)
        batch, heads, queries, width = q.shape
        k = latent_rows.read(latent_rows.latent, batch)
        if self.rope is not None:
            q, k = torch.cat((q, self.rope), -1), torch.cat((k, latent_rows.read(self.k_rope, batch)), -1)
        v = k if self.values is None else replace(latent_rows, rows=self.value_rows).read(self.values, batch)
        kv = (each.unsqueeze(1) for each in (k, v))
        mask = None if self.bias is None else _repeated_for_heads(self.bias, heads, queries)
        y = scaled_dot_product_attention(q.flatten(1, 2).unsqueeze(1), *kv, attn_mask=mask, scale=self.scale)
        y = (y[..., :width] if self.values is None else y).squeeze(1).unflatten(1, (heads, -1))
        return head_projection.expanded(y.transpose(1, 2), self.up_value, projected)


@dataclass(frozen=True)
class AbsorbedProducts(Rule):
    """Products of attention with a latent, in place of those with the keys and values that are projected from it."""

    aliases = ("absorption",)

    def reference(self, nope: Tensor, up: Tensor, latent: Tensor) -> Tensor:
        """Compute the scores of keys without rotated lanes, [B, N, S, T].

        nope [B, N, S, D], up [N, D, C], latent [B, T, C]
        """
        return nope @ (latent.unsqueeze(1) @ up.transpose(1, 2)).transpose(2, 3)

    @pattern
    @variants(part=(Scores, Context, Sdpa))
    def written(self, p, part, latent_rows: Any = Rows):
        """scale · q kᵀ, P v, or scaled_dot_product_attention(q, k, v), with k and v projected from a latent."""
        return part.terms(p, latent_rows)

    def within(self) -> frozenset[str]:
        """Name the rules that fuse all of the attention."""
        return frozenset({"softmax_attention", "attention", "latent_attention"})

    def remark(self) -> str:
        """Return the note for reports that W_UK or W_UV is absorbed in single products, and the attention is not
        fused.
        """
        return "absorbed as plain products: what the model does with its scores stays as it is"

    @lowering
    @variants(projected=LAYOUTS)
    def projecting(self, part, latent_rows, projected):
        """Emit products over the latent, and npu_transpose_batchmatmul for W_UK and W_UV."""
        return viewed(part.computed(latent_rows, projected), latent_rows.output_view)

    @lowering
    def multiplying(self, part, latent_rows):
        """Emit products over the latent, of absorbed queries that another rule may compute, and torch.bmm for W_UV."""
        return viewed(part.computed(latent_rows, "multiplied"), latent_rows.output_view)


def _repeated_for_heads(bias: Tensor, heads: Any, queries: Any) -> Tensor:
    """Expand the mask `bias` [.., S, T] to [B or 1, 1, N · S, T]: the rows of one of `heads` heads after the other.

    `queries` is S.
    """
    rows = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
    return rows.expand(-1, heads, queries, -1).flatten(1, 2).unsqueeze(1)
