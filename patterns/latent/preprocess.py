"""What stands before latent attention with int8 weights, from the hidden states to the pages, in one call of atb.

    x8 = quantise(norm(x))    [q, q_r] = quantise(norm(x8 W_DQ)) W_UQ, per head      [k, k_r] = x8 W_DKV
    query = q W_UK            query_rope = rope(q_r)    pages[slot] = s norm(k)      rope_pages[slot] = rope(k_r)

*Matches* three W8A8 layers, by token or static, the norms before them, and rows written to the pages of both caches at
the same slots, as BSND or in NZ, beside an attention that reads absorbed queries; the latent and the queries may be
int8 as well. *Replaces with* `npu_mla_preprocess`, whose norms add 1e-6; weights are prepared once: both that x is
multiplied by joined, rotated rows of pairs put in halves, in FRACTAL_NZ. It keeps the latent of the queries for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from fusion import Group, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.latent import latent_calls
from patterns.latent.preprocess_layers import RowOrder, StaticInt8Layers, TokenInt8Layers
from patterns.latent.preprocess_pages import FloatPages, Int8Pages
from patterns.latent.prolog import MlaProlog, of_heads
from patterns.latent.terms import LatentRow, Tables, rotated_lanes
from patterns.quant.quant_matmul import NZ

EPSILON = 1e-6  # compiled into the kernel
Projection = TokenInt8Layers | StaticInt8Layers
Storage = FloatPages | Int8Pages


@dataclass(frozen=True)
class Norm(Group):
    """The norm of the hidden states."""

    gamma: Any = tensor("He")
    eps: Any = scalar()

    def term(self, p, x):
        """Of x."""
        return p.rms_norm(x=x, gamma=self.gamma, eps=self.eps)


@dataclass(frozen=True)
class Queries(Group):
    """The latent of the queries, which lanes of every head are absorbed by W_UK and which rotated, from which order."""

    gamma: Any = tensor("Hcq")
    eps: Any = scalar()
    up: Any = tensor("N D Hckv")
    width: Any = attribute()
    begin: Any = attribute()
    first: Any = attribute()
    heads_first: Any = attribute()
    dtype: Any = attribute()
    source: Any = attribute()

    def terms(self, p, low, projection, tables):
        """Rotated and absorbed queries; `low` projects x to their latent."""
        heads = projection.heads(p, p.rms_norm(x=low, gamma=self.gamma, eps=self.eps))
        lanes = p.layer_lanes(layer=heads, width=self.width, start=self.first, heads_first=self.heads_first)
        how = (tables.cos, tables.sin, self.dtype, self.gamma, self.heads_first)
        rotated = rotated_lanes(p, lanes, *how, source=self.source)
        return rotated, p.layer_query(layer=heads, width=self.width, start=self.begin, up=self.up)

    def restored(self, query: Tensor, rope: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated and absorbed queries of tokens [T, N, ..] as the model has them for x [.., H]."""
        query, rope = (each.unflatten(0, x.shape[:-1]) if x.dim() == 3 else each for each in (query, rope))
        return rope.transpose(1, 2) if self.heads_first else rope, latent_calls.heads_before(query)


@dataclass(frozen=True)
class MlaPreprocess(Rule):
    """The whole prologue of latent attention in int8, up to both caches."""

    def beside(self) -> frozenset[str]:
        """The attention that reads absorbed queries."""
        return frozenset({"latent_attention_atb", "latent_attention"})

    def reference(
        self, x: Tensor, gamma: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gamma_cq: Tensor,
        gamma_ckv: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The meaning without rotation or quantisation: absorbed queries [B, N, S, C], their latent, rows [B, S, C]."""
        return MlaProlog().reference(rms_norm(x, gamma.shape, gamma, EPSILON), dq, uq, up, dkv, gamma_cq, gamma_ckv)

    @pattern
    @variants(projection=(TokenInt8Layers, StaticInt8Layers), storage=(FloatPages, Int8Pages))
    def written(
        self, p, projection, storage, x=tensor("*B He"), norm: Any = Norm, queries: Any = Queries,
        row: Any = LatentRow, tables: Any = Tables,
    ):  # fmt: skip
        """Rows of all pages by their number, or by a block and a place in it."""
        low, both = projection.down(p, norm.term(p, x))
        rotated, absorbed = queries.terms(p, low, projection, tables)
        rows = row.terms(p, both, tables, queries.gamma, source=queries.source)
        return rotated, storage.query(p, absorbed), *storage.written(p, *rows)

    def guard(self, x: Any, norm: Norm, queries: Queries, row: LatentRow, projection: Projection, storage: Storage):
        """As for `MlaProlog`; and what the kernel takes no argument for."""
        lanes = (queries.width, queries.begin, queries.first, row.split, row.end)
        of_heads(queries.up, projection.dkv, *lanes)
        other = next((each for each in (norm.eps, queries.eps, row.eps) if each != EPSILON), EPSILON)
        require(other == EPSILON, "a norm adds {other}, the kernel of npu_mla_preprocess 1e-6", other=other)
        projection.guard()
        storage.guard(x)

    @lowering
    def run(
        self, x: Tensor, norm: Norm, queries: Queries, row: LatentRow, tables: Tables, projection: Projection,
        storage: Storage,
    ):  # fmt: skip
        """One call, that writes to the pages and to fresh memory."""
        tokens, turning, (heads, _, width) = storage.slots.numel(), tables.cos.shape[-1], queries.up.shape
        order = RowOrder(heads, turning, queries.source)
        (down, wide), (down_scale, wide_scale) = map(_nz, projection.weights(order)), projection.scales(order)
        betas = projection.betas(norm.gamma, queries.gamma)
        cos, sin = (latent_calls.of_tokens(each, x).reshape(tokens, turning) for each in (tables.cos, tables.sin))
        kv, kr = storage.caches(x, row.widths, x)
        query, kv, rope, kr = torch.ops.atb.npu_mla_preprocess.functional(
            x.reshape(tokens, -1), norm.gamma, betas[0], down, down_scale, queries.gamma, betas[1], wide, wide_scale,
            row.scaled_gamma(), cos, sin, queries.up.contiguous(), kv, kr, storage.slots.reshape(-1).to(torch.int32),
            q_out0=torch.empty((tokens, heads, width), dtype=kv.dtype, device=x.device), kv_cache_out0=kv,
            q_out1=torch.empty((tokens, heads, turning), dtype=x.dtype, device=x.device), kv_cache_out1=kr,
            cache_mode=storage.layout(x), **projection.arguments(x, order), **storage.factors(x),
        )  # fmt: skip
        return *queries.restored(query, rope, x), *storage.restored(kv, kr)


def _nz(weight: Tensor) -> Tensor:
    """A weight [out, in] as [1, in / 32, out, 32] in FRACTAL_NZ."""
    blocks = latent_calls.WHOLE_LINE
    require(weight.shape[1] % blocks == 0, "the weights do not fill lines of 32 numbers")
    lines = weight.unflatten(1, (-1, blocks)).transpose(0, 1)
    return torch.ops.npu.npu_format_cast(lines.contiguous()[None], NZ)
