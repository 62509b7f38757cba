"""q kᵀ = (q_nope W_UK) cᵀ + q_rope rᵀ and P v = (P c) W_UV: neither keys nor values of a latent c are computed.

*Matches* the products of attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1),
each for itself: what stands between them, a bias, a soft cap, a softmax of any kind, stays as the model has it.
*Replaces with* products over the latent, all heads of a sequence at once, and `npu_transpose_batchmatmul` for both
projections: where no operator takes the attention as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion import Group, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
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
class Projected(Group):
    """Queries of heads over keys that W_UK projects from a latent, with rotated lanes of both, if there are any."""

    nope: Any = tensor("B N S D")
    absorbed: Any = tensor("B N S C")
    rope: Any = tensor("B N S Dr", optional=True)
    k_rope: Any = tensor("*G Dr", optional=True)
    up: Any = tensor("N D C")
    scale: Any = scalar()

    def said(self) -> dict[str, Any]:
        """As the readers say it."""
        return {name: getattr(self, name) for name in Projected.declared()}

    def projected(self, how: str) -> Tensor:
        """Queries over the latent [B, N, S, C]."""
        return head_projection.expanded(self.nope.transpose(1, 2), self.up, how)


@dataclass(frozen=True)
class AbsorbedScores(Rule):
    """Scores of queries over keys that are projected from a latent."""

    def reference(self, nope: Tensor, up: Tensor, latent: Tensor) -> Tensor:
        """The meaning without rotated lanes: nope [B, N, S, D], up [N, D, C], latent [B, T, C] → [B, N, S, T]."""
        return nope @ (latent.unsqueeze(1) @ up.transpose(1, 2)).transpose(2, 3)

    @pattern
    def written(self, p, keys: Any = Projected, of: Any = Rows):
        """With rotated lanes beside the latent, or without."""
        told = {name: getattr(of, name) for name in Rows.declared()}
        return p.latent_scores(**keys.said(), **told)

    def within(self) -> frozenset[str]:
        """Attention as a whole."""
        return WHOLE

    def remark(self) -> str:
        """Which form was chosen."""
        return REMARK

    @lowering
    @variants(projected=PROJECTED)
    def projecting(self, keys, of, projected):
        """Queries projected for this product."""
        return viewed(_scores(keys.projected(projected), keys, of), of.output_view)

    @lowering
    def projected(self, keys, of):
        """Queries as something else projects them, or a product of heads."""
        return viewed(_scores(keys.absorbed, keys, of), of.output_view)


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


@dataclass(frozen=True)
class AbsorbedSdpa(Rule):
    """Attention of PyTorch's own over keys and values that are projected from latents, whatever mask it is given."""

    def reference(self, nope: Tensor, up: Tensor, of: Tensor, up_value: Tensor, scale: float) -> Tensor:
        """The meaning without rotated lanes and mask: nope [B, N, S, D], latents [B, T, C] → [B, N, S, E]."""
        latent = of.unsqueeze(1)
        return scaled_dot_product_attention(nope, latent @ up.transpose(1, 2), latent @ up_value, scale=scale)

    @pattern
    def written(
        self,
        p,
        keys: Any = Projected,
        values=tensor("*H C", optional=True),
        up_value=tensor("N C E"),
        value_rows=attribute(),
        bias=tensor("*M", optional=True),
        of: Any = Rows,
    ):
        """One call, which holds scores and weights."""
        told = {name: getattr(of, name) for name in Rows.declared()}
        return p.latent_sdpa(values=values, up_value=up_value, value_rows=value_rows, bias=bias, **keys.said(), **told)

    def guard(self, keys: Any, bias: Any, of: Any, up_value: Any):
        """A mask of [.., S, T] as the call takes it."""
        require(bias is None or bias.rank >= 2, "the mask has no dim of queries")
        require(keys.up.dtype == of.dtype == up_value.dtype, "queries, keys and values have different dtypes")

    def within(self) -> frozenset[str]:
        """Attention as a whole."""
        return WHOLE

    def remark(self) -> str:
        """Which form was chosen."""
        return REMARK

    @lowering
    @variants(projected=PROJECTED)
    def projecting(self, keys, values, up_value, value_rows, bias, of, projected):
        """The same call over the latents, of which all heads of a sequence are queries."""
        y = _attended(keys.projected(projected), keys, (values, value_rows), bias, of)
        return head_projection.expanded(y.transpose(1, 2), up_value, projected)

    @lowering
    def multiplying(self, keys, values, up_value, value_rows, bias, of):
        """The same of queries that something else projects, and batched products of heads."""
        y = _attended(keys.absorbed, keys, (values, value_rows), bias, of)
        return head_projection.expanded(y.transpose(1, 2), up_value, "multiplied")


def _attended(absorbed: Tensor, keys: Projected, values: tuple[Any, Any], bias: Tensor | None, of: Rows) -> Tensor:
    """Queries [B, N, S, C], and rotated ones, over the latent as the one head of keys and values: [B, N, S, C].

    `values` is another latent and how many rows of it are read, where values are not of the same as the keys.
    """
    batch, heads, queries = absorbed.shape[:3]
    q, k = absorbed, of.read(of.latent, batch)
    if keys.rope is not None:
        q, k = torch.cat((q, keys.rope), -1), torch.cat((k, of.read(keys.k_rope, batch)), -1)
    v = k if values[0] is None else replace(of, rows=values[1]).read(values[0], batch)
    width = absorbed.shape[-1] if values[0] is None else v.shape[-1]
    if bias is not None:
        rows = bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)
        bias = rows.expand(-1, heads, queries, -1).flatten(1, 2).unsqueeze(1)
    q = q.flatten(1, 2).unsqueeze(1)
    y = scaled_dot_product_attention(q, k.unsqueeze(1), v.unsqueeze(1), attn_mask=bias, scale=keys.scale)
    return y[..., :width].squeeze(1).unflatten(1, (heads, -1))


def _scores(absorbed: Tensor, keys: Projected, of: Rows) -> Tensor:
    """Queries [B, N, S, C] and perhaps [B, N, S, Dr] over the latent and its rotated lanes: [B, N, S, T]."""
    batch, heads = absorbed.shape[:2]
    pairs = [(absorbed, of.latent)] if keys.rope is None else [(keys.rope, keys.k_rope), (absorbed, of.latent)]
    sides = [(q.to(of.dtype).flatten(1, 2), of.read(k, batch).transpose(1, 2)) for q, k in pairs]
    if keys.rope is None:
        q, k = sides[0]
        return torch.bmm(q if keys.scale == 1 else q * keys.scale, k).unflatten(1, (heads, -1))
    scores = torch.baddbmm(torch.bmm(*sides[0]), *sides[1], beta=keys.scale, alpha=keys.scale)
    return scores.unflatten(1, (heads, -1))


def _context(weights: Tensor, up: Tensor, of: Rows, projected: str) -> Tensor:
    """Weights [B, N, S, T] over the latent, and every head times its matrix: [B, N, S, E]."""
    batch, heads = weights.shape[:2]
    y = torch.bmm(weights.to(of.dtype).flatten(1, 2), of.read(of.latent, batch)).unflatten(1, (heads, -1))
    return head_projection.expanded(y.to(up.dtype).transpose(1, 2), up, projected).to(of.dtype)
