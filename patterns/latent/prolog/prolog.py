"""The prologue of multi-head latent attention, from the hidden states to the cache, in one operator.

    c = s norm(x W_DQ)    [q, q_r] = c W_UQ, per head      query = q W_UK        query_rope = rope(q_r)
    [k, k_r] = x W_DKV    latent = t norm(k)               key_rope = rope(k_r)  both written to a cache

*Matches* the projections of both latents, apart or joined, their norms, the rotation of pairs in either order to either
order and the writes of a store (DeepSeek-V2, 2024), with layers in floats or W8A8, beside an attention that reads
absorbed queries; where the latent is stored in int8 by one scale, those are quantised for each token and head.
*Replaces with* `npu_mla_prolog_v3`, whose contract says which of these go together, and which quantises before numbers
would be rounded; it gives halves, so that a cache that keeps pairs is written from rows of its own, put in pairs. Gains
and tables in float32 are rounded to the dtype of the model. Where it is left out, with its older versions, launched one
by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, bounded, calls, lowering, pattern, require, scalar, tensor, variants
from fusion.analysis.rounding import exact
from patterns.cache.stores import PAGES, Fresh, Int8LatentPages, PackedPages, Rows
from patterns.kit.int8_scales import multipliers
from patterns.kit.orders import INTERLEAVED, RowOrder
from patterns.latent.prolog.terms import LatentQueries, LatentRow, Tables
from patterns.quant.joined_schemes import JOINED
from patterns.quant.quantisation import quantised_rows, rounded_scale
from patterns.quant.schemes import FloatLayers, Int8Layers, Int8QueryLayer
from patterns.rotary.token_tables import rotated_lanes

PROJECTIONS = (FloatLayers, Int8QueryLayer, Int8Layers, *JOINED)


@dataclass(frozen=True)
class Queries(LatentQueries):
    """Queries whose latent may be multiplied by a number."""

    factor: Any = scalar()
    factor_of_tables: Any = scalar()

    def terms(self, p, low, projection, tables, like):
        """Rotated queries, absorbed ones, and what the latent is for the projection; `low` projects x to it."""
        lanes, absorbed, latent = projection.queries(p, self.norm(p, low), self)
        rotated = rotated_lanes(p, lanes, tables, self, like, self.heads_first, self.factor_of_tables)
        return rotated, absorbed, latent

    def reordered_layers(self, projection: FloatLayers, row: LatentRow) -> FloatLayers:
        """Layers that give the lanes which are rotated in pairs, as the operators read them."""
        order = RowOrder(row.widths[1], INTERLEAVED)
        of_heads = partial(order.of, source=self.source, heads=self.up.shape[0])
        return projection.apart(row).reordered(of_heads, partial(order.of, source=row.source))


@dataclass(frozen=True)
class Int8QueryPages(Int8LatentPages):
    """By one scale, beside absorbed queries in int8, a scale of each token and head, that divide rotated ones too."""

    kv_scale: Any = tensor("1", optional=True)
    keys: Any = tensor("1", optional=True)
    keys_by: Any = scalar()
    dtype: Any = attribute()

    def queries(self, p, rotated, absorbed):
        """Queries in int8, rotated ones divided by the scales of both sides, and their own."""
        query, scale = quantised_rows(p, p.reshaped(absorbed), self.dtype)
        return query, p.folded_query(rope=rotated, tokens=p.reshaped(scale), of_keys=self.keys, by=self.keys_by), scale

    def guard(self, tokens: Any) -> None:
        """Refuse a latent that is read with another scale than it is written with, too."""
        super().guard(tokens)
        keys, stored = (None if each is None else exact(each) for each in (self.keys, self.kv_scale))
        one = keys is stored and math.isclose(self.keys_by, self.kv_by, rel_tol=1e-6)
        require(one, "the latent is read with another scale than it is written with")

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """What the operator is told of the numbers, those of absorbed queries too."""
        scale = multipliers(self.kv_scale, self.kv_by, 1, device)
        return dict(kv_cache_quant_mode=1, query_quant_mode=1, quant_scale_ckv=scale)

    def restored_queries(self, queries: Queries, query: Tensor, rope: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Queries, rotated ones and scales, heads first."""
        scale, rope = scale.reshape(*query.shape[:-1], 1), queries.reordered(rope)
        return query.transpose(1, 2), rope.transpose(1, 2), rounded_scale(scale.transpose(1, 2), self.dtype)


STORES = (Rows, *PAGES, Fresh, PackedPages, Int8QueryPages)


@dataclass(frozen=True)
class MlaProlog(Rule):
    """The prologue of latent attention with the writes into both caches."""

    aliases = (
        "prolog",
        "mla_prolog_v2",
        "mla_prolog_v3",
        "mla_prolog_whole",
        "mla_prolog_paged",
        "mla_prolog_channels",
        "mla_prolog_tiles",
        "mla_prolog_quantised",
    )

    def beside(self) -> frozenset[str]:
        """The attention that reads absorbed queries."""
        return frozenset({"sparse_attention", "latent_attention"})

    def reference(
        self, x: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gamma_cq: Tensor, gamma_ckv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The meaning without rotation: absorbed queries [B, N, S, C], their latent, rows [B, S, C]."""
        heads, width, rank = up.shape
        c = torch.nn.functional.rms_norm(x @ dq.T, gamma_cq.shape, gamma_cq)
        q = (c @ uq.T).unflatten(-1, (heads, -1))[..., :width].transpose(1, 2)
        return q @ up, c, torch.nn.functional.rms_norm((x @ dkv.T)[..., :rank], gamma_ckv.shape, gamma_ckv)

    @pattern
    @variants(projection=PROJECTIONS, storage=STORES)
    def written(
        self,
        p,
        projection,
        storage,
        x=tensor("*B He"),
        queries: Any = Queries,
        row: Any = LatentRow,
        tables: Any = Tables,
    ):
        """Queries as they are, or, beside an int8 latent, as an attention reads them in int8."""
        low, both = projection.down(p, x)
        like = projection.like(x, queries.gamma)
        rotated, absorbed, latent = queries.terms(p, low, projection, tables, like)
        found = storage.queries(p, rotated, absorbed)
        return *found, *latent, *storage.written(p, *row.terms(p, both, tables, like))

    def guard(self, x: Any, projection: FloatLayers, storage: Any, queries: Queries, row: LatentRow):
        """How the tokens, the weights and the caches are laid out."""
        queries.guard(row)
        projection.guard_row(row)
        projection.guard(queries)
        lowest = min(projection.factor(queries.factor), row.factor)
        require(lowest > 0, "a latent is multiplied by {factor}, which is not positive", factor=lowest)
        storage.guard_order(row.result)
        storage.guard(x)

    @lowering
    def run(self, x, projection, storage, queries, row, tables):
        """One call of the third version."""
        projection = queries.reordered_layers(projection, row)
        given = *read(x, projection, queries, row, tables), *storage.caches(x, row.widths, queries.up)
        with bounded():  # the model holds what each layer gives in this dtype as well
            query, rope, scales, latent, scale, *caches = torch.ops.npu.npu_mla_prolog_v3_functional(
                *given, rmsnorm_epsilon_cq=queries.eps, rmsnorm_epsilon_ckv=row.eps, query_norm_flag=True,
                qc_qr_scale=projection.factor(queries.factor), kc_scale=row.factor, cache_mode=storage.layout(x),
                cache_index=storage.index(x), **projection.arguments(),
                **storage.prolog_arguments(row.widths, x.device),
            )  # fmt: skip
        found = storage.restored_queries(queries, query, rope, scales)
        return *found, *projection.restored(latent, scale), *storage.restored(*row.reordered(*caches))

    @lowering
    @variants(version=("npu_mla_prolog_v2", "npu_mla_prolog"))
    @calls("npu::{version}.functional")
    def older(self, x, projection, storage, queries, row, tables, version):
        """The same where the third version is left out: the others keep the latent of the queries for themselves."""
        index = storage.index(x)
        require(index is not None, "the older versions of the operator write to pages alone")
        told = projection.arguments() or storage.prolog_arguments(row.widths, x.device)
        require(not told, "the older versions of the operator are taken without quantisation")
        ones = queries.factor == row.factor == 1
        require(ones, "the older versions of the operator multiply no latent by a number")
        projection = queries.reordered_layers(projection, row)
        given = *read(x, projection, queries, row, tables), index, *storage.caches(x, row.widths, queries.up)
        with bounded():  # the model holds what each layer gives in this dtype as well
            query, rope, *caches = getattr(torch.ops.npu, version).functional(
                *given, rmsnorm_epsilon_cq=queries.eps, rmsnorm_epsilon_ckv=row.eps, cache_mode=storage.layout(x)
            )
            low = torch.nn.functional.linear(x, projection.dq)
        latent = torch.ops.npu.npu_rms_norm(low, queries.gamma, queries.eps)[0]
        return *queries.restored(query, rope), latent, *storage.restored(*row.reordered(*caches))


def read(x: Tensor, projection: FloatLayers, queries: Queries, row: LatentRow, tables: Tables) -> tuple[Tensor, ...]:
    """What every version reads first, gains and tables rounded to the dtype of W_UK."""
    (dq, uq, dkv), dtype = projection.weights(), queries.up.dtype
    cos, sin = (each.contiguous() for each in tables.of_tokens(x, row, dtype))
    return x, dq, uq, queries.up.contiguous(), dkv, queries.gamma.to(dtype), row.gamma.to(dtype), sin, cos
