"""The prologue of multi-head latent attention, from the hidden states to the cache, in one operator.

    c = s norm(x W_DQ)    [q, q_r] = c W_UQ, per head      query = q W_UK        query_rope = rope(q_r)
    [k, k_r] = x W_DKV    latent = t norm(k)               key_rope = rope(k_r)  both written to a cache

*Matches* the projections of both latents, separate or joined, their norms, rotations of lanes in half or interleaved
order, and the writes of a store (DeepSeek-V2, 2024), with layers in floating point or W8A8, for an attention that reads
absorbed queries; for a latent stored in int8 with one scale, the queries are quantised per token and head. *Replaces
with* `npu_mla_prolog_v3`, whose limits list the legal combinations, and which quantises numbers before they would be
rounded. Its results are in half order: for a cache in interleaved order it writes rows to fresh memory, which are then
reordered. Gains and tables in float32 are rounded to the dtype of the model. Where the operator is excluded, its older
versions run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion import Captures, Rule, attribute, bounded, calls, lowering, pattern, require, scalar, tensor, variants
from fusion.analysis.rounding import exact
from patterns.cache.stores import PAGES, Fresh, Int8LatentPages, PackedPages, Rows
from patterns.kit.int8_scales import multipliers
from patterns.latent.prolog.joined_layers import JOINED
from patterns.latent.prolog.layers import FloatLayers, Int8Layers, Int8QueryLayer
from patterns.latent.prolog.terms import LatentQueries, LatentRow, Tables
from patterns.quant.quantisation import quantised_rows, rounded_scale
from patterns.rotary.orders import INTERLEAVED, RowOrder
from patterns.rotary.token_tables import rotated_lanes

PROJECTIONS = (FloatLayers, Int8QueryLayer, Int8Layers, *JOINED)


@dataclass(frozen=True)
class Queries(LatentQueries):
    """Queries whose latent is multiplied by `factor`, and whose rotation tables by `factor_of_tables`."""

    factor: Any = scalar()
    factor_of_tables: Any = scalar()

    def terms(self, p, low, projection, tables, like):
        """Build the terms of rotated queries, of absorbed ones, and a tuple of those of the latent as results.

        `low` is the product of the hidden states and W_DQ; the latent is one term, or int8 rows and their scales.
        `projection` has the layers, and `tables` the rotation to the dtype of `like`.
        """
        lanes, absorbed, latent = projection.queries(p, self.norm(p, low), self)
        rotated = rotated_lanes(p, lanes, tables, self, like, self.heads_first, self.factor_of_tables)
        return rotated, absorbed, latent

    def reordered_layers(self, projection: FloatLayers, row: LatentRow) -> FloatLayers:
        """Return `projection` with the rows of W_UQ and W_DKV that are rotated in interleaved order, as the operators
        read them.

        `row` says which lanes of W_DKV are rotated, and in which order the model has them.
        """
        order = RowOrder(row.widths[1], INTERLEAVED)
        reorder_heads = partial(order.of, source=self.source, heads=self.up.shape[0])
        return projection.as_two_layers(row).reordered(reorder_heads, partial(order.of, source=row.source))


@dataclass(frozen=True)
class Int8QueryPages(Int8LatentPages):
    """Pages of an int8 latent with one scale, for int8 absorbed queries with a scale of each token and head.

    Attributes:
        kv_scale: scale that the latent is written with, times the number `kv_by`.
        keys, keys_by: scale that the latent is read with, a tensor [1] times a number.
        dtype: dtype of the scales of the queries.
    """

    kv_scale: Any = tensor("1", optional=True)
    keys: Any = tensor("1", optional=True)
    keys_by: Any = scalar()
    dtype: Any = attribute()

    def queries(self, p, rotated, absorbed):
        """Build the terms of `absorbed` queries in int8, of `rotated` ones divided by the scales of queries and keys,
        and of the scales.
        """
        query, scale = quantised_rows(p, p.reshaped(absorbed), self.dtype)
        return query, p.folded_query(rope=rotated, tokens=p.reshaped(scale), of_keys=self.keys, by=self.keys_by), scale

    def guard(self, tokens: Any, operator: str) -> None:
        """Refuse what other pages refuse, and a latent that is read with another scale than it is written with."""
        super().guard(tokens, operator)
        keys, stored = (None if each is None else exact(each) for each in (self.keys, self.kv_scale))
        equal = keys is stored and math.isclose(self.keys_by, self.kv_by, rel_tol=1e-6)
        require(
            equal,
            "scale of the latent: it is read with another than it is written with; npu_mla_prolog_v3 requires "
            "one scale for both; use the same tensor",
        )

    def prolog_arguments(self, widths: tuple[Any, Any], device: torch.device) -> dict[str, Any]:
        """Return the arguments by which npu_mla_prolog_v3 quantises the latent and the queries."""
        scale = multipliers(self.kv_scale, self.kv_by, 1, device)
        return dict(kv_cache_quant_mode=1, query_quant_mode=1, quant_scale_ckv=scale)

    def restored_queries(self, queries: Queries, query: Tensor, rope: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Return the operator's results with heads before positions: int8 `query`, rotated `rope`, and the `scale` of
        each head.

        The rotated lanes are put in the order of the model.
        """
        scale, rope = scale.reshape(*query.shape[:-1], 1), queries.reordered(rope)
        return query.transpose(1, 2), rope.transpose(1, 2), rounded_scale(scale.transpose(1, 2), self.dtype)


STORES = (Rows, *PAGES, Fresh, PackedPages, Int8QueryPages)


@dataclass(frozen=True)
class PrologMatch(Captures):
    """Captures of the prologue: hidden states `x` [*B, He], linear layers, the caches, queries, row of keys, tables."""

    x: Tensor
    projection: FloatLayers
    storage: Any
    queries: Queries
    row: LatentRow
    tables: Tables

    def layers(self) -> FloatLayers:
        """Return the linear layers with rotated lanes in interleaved order, as the operators read them."""
        return self.queries.reordered_layers(self.projection, self.row)

    def operands(self, layers: FloatLayers) -> tuple[Tensor, ...]:
        """Return the operands x, W_DQ, W_UQ, W_UK, W_DKV, gains of the queries' and the keys' latent, sin and cos.

        Operators of all versions begin with them. Gains and tables are in the dtype of W_UK; the weights are those of
        `layers`.
        """
        queries, row, dtype = self.queries, self.row, self.queries.up.dtype
        dq, uq, dkv = layers.weights()
        cos, sin = (each.contiguous() for each in self.tables.for_tokens(self.x, row, dtype))
        return self.x, dq, uq, queries.up.contiguous(), dkv, queries.gamma.to(dtype), row.gamma.to(dtype), sin, cos

    def caches(self, operator: str) -> tuple[Tensor, ...]:
        """Return both caches as `operator` takes them."""
        return self.storage.caches(self.x, self.row.widths, self.queries.up, operator)

    def quantisation(self) -> dict[str, Any]:
        """Return the arguments by which npu_mla_prolog_v3 quantises the latent and the queries; {} for floats."""
        return self.storage.prolog_arguments(self.row.widths, self.x.device)

    def stored(self, caches: Sequence[Tensor]) -> Any:
        """Return `caches` as the model has them after the write."""
        return self.storage.restored(*self.row.reordered(*caches))


@dataclass(frozen=True)
class MlaProlog(Rule):
    """Prologue of latent attention: projections, norms, rotations and the writes into both caches."""

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

    def readers_of_results(self) -> frozenset[str]:
        """Name the attention that reads absorbed queries."""
        return frozenset({"sparse_attention", "latent_attention"})

    def reference(
        self, x: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gamma_cq: Tensor, gamma_ckv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute, without rotation, absorbed queries [B, N, S, C], their latent [B, S, Hcq] and rows [B, S, C]."""
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
        """query = norm(x W_DQ) W_UQ W_UK, query_rope, and cache[slot] = norm(k), rope(k_r) for [k, k_r] = x W_DKV."""
        low, both = projection.down(p, x)
        like = projection.like(x, queries.gamma)
        rotated, absorbed, latent = queries.terms(p, low, projection, tables, like)
        queried = storage.queries(p, rotated, absorbed)
        return *queried, *latent, *storage.written(p, *row.terms(p, both, tables, like))

    def guard(self, match: PrologMatch):
        """Refuse heads and rows with other lanes than those to absorb, to rotate and to store, and latents times 0 or
        less.

        And what `projection` (two factors) and `storage` (slots, NZ blocks, order of rotated lanes) refuse.
        """
        projection, storage, queries, row = match.projection, match.storage, match.queries, match.row
        queries.guard(row)
        projection.guard_row(row)
        projection.guard(queries)
        lowest = min(projection.factor(queries.factor), row.factor)
        require(
            lowest > 0,
            "latent: it is multiplied by {factor} behind its norm; npu_mla_prolog_v3 requires a positive factor",
            factor=lowest,
        )
        storage.guard_order(row.result, "npu_mla_prolog_v3")
        storage.guard(match.x, "npu_mla_prolog_v3")

    @lowering
    def run(self, match: PrologMatch):
        """Emit npu_mla_prolog_v3, and reorder its results to the layout of the model."""
        layers, queries, row, storage = match.layers(), match.queries, match.row, match.storage
        operands = *match.operands(layers), *match.caches("npu_mla_prolog_v3")
        with bounded():  # the model itself has the result of each layer in this dtype
            query, rope, scales, latent, scale, *caches = torch.ops.npu.npu_mla_prolog_v3_functional(
                *operands, rmsnorm_epsilon_cq=queries.eps, rmsnorm_epsilon_ckv=row.eps, query_norm_flag=True,
                qc_qr_scale=layers.factor(queries.factor), kc_scale=row.factor, cache_mode=storage.layout(match.x),
                cache_index=storage.index(match.x), **layers.arguments(), **match.quantisation(),
            )  # fmt: skip
        queried = storage.restored_queries(queries, query, rope, scales)
        return *queried, *layers.restored(latent, scale), *match.stored(caches)

    @lowering
    @variants(version=("npu_mla_prolog_v2", "npu_mla_prolog"))
    @calls("npu::{version}.functional")
    def older(self, match: PrologMatch, version: str):
        """Emit the prolog operator `version`, older than v3, and linear and npu_rms_norm for the latent of the queries.

        Older versions do not return that latent. They are taken without quantisation and factors, and write to pages
        alone.
        """
        x, queries, row, storage = match.x, match.queries, match.row, match.storage
        index = storage.index(x)
        require(index is not None, "cache: it is contiguous; npu_mla_prolog and npu_mla_prolog_v2 require pages")
        require(
            not (match.projection.arguments() or match.quantisation()),
            "weights, cache: they are quantised; npu_mla_prolog and npu_mla_prolog_v2 are called on floats and "
            "require these",
        )
        ones = queries.factor == row.factor == 1
        require(ones, "latent: it is multiplied by a number; npu_mla_prolog and npu_mla_prolog_v2 require none")
        layers = match.layers()
        operands = *match.operands(layers), index, *match.caches(version)
        with bounded():  # the model itself has the result of each layer in this dtype
            query, rope, *caches = getattr(torch.ops.npu, version).functional(
                *operands, rmsnorm_epsilon_cq=queries.eps, rmsnorm_epsilon_ckv=row.eps, cache_mode=storage.layout(x)
            )
            low = torch.nn.functional.linear(x, layers.dq)
        latent = torch.ops.npu.npu_rms_norm(low, queries.gamma, queries.eps)[0]
        return *queries.restored(query, rope), latent, *match.stored(caches)
