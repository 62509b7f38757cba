"""Operands of a lightning indexer in int8: queries, keys and head weights, and the writes of keys and their scales.

    q = int8(rope(c W_IQ) H_q)    k = int8(rope(LayerNorm(x W_IK)) H_k)    w = x W_IW / √(N · D), in float16
    index_cache[slot] = k         scale_cache[slot] = scale of k, in float16

*Matches* a step of DeepSeek-V3.2 (2025) in W8A8C8 over pages, whose latent c is in int8 with a scale of each token;
the readers of queries and caches are left as they are. *Replaces with* `npu_lightning_indexer_prolog_pto`, which is no
part of torch_npu and has sizes, the epsilon of the norm and the factor of the weights compiled in: a model with other
ones is refused. The rule is opt-in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Captures, Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants
from patterns.cache.stores import Pages
from patterns.latent.prolog.terms import Tables
from patterns.quant.quantisation import quantised_rows
from patterns.quant.quantised_linear import prepared
from patterns.sparse.indexer.index_lanes import EPSILON_OF_KEYS, Lanes, RotatedLanes

_OPERATOR = "npu_lightning_indexer_prolog_pto"


@dataclass(frozen=True)
class TurnedLanes(RotatedLanes):
    """Rotated lanes times a matrix `rotation` [D, D] and a number `factor`, in int8 with a float16 scale of each token
    and head.
    """

    rotation: Any = tensor("Di Di")
    rotation_is_parameter_only: Any = attribute()
    factor: Any = scalar()
    scale_dtype: Any = attribute()

    def turned(self, p, x, lanes, tables, like, heads_first):
        """Return the term of `x` with its first lanes rotated, multiplied by the matrix `self.rotation`, and by
        `self.factor`.

        The other arguments are those of `RotatedLanes.term`.
        """
        rows = self.term(p, x, lanes, tables, like, heads_first)
        how = dict(weight=self.rotation, is_parameter_only=self.rotation_is_parameter_only)
        return p.maybe_scaled(p.linear(x=p.reshaped(rows), **how), self.factor)

    def quantised(self, p, turned):
        """Return the terms of the rows `turned` in int8, and of their scales in float16."""
        int8, scale = quantised_rows(p, turned, self.scale_dtype)
        return int8, p.as_dtype(p.reshaped(scale), torch.float16)

    def guard(self, what: str, operator: str) -> None:
        """Refuse lane orders as `RotatedLanes.guard` does, and a `factor` other than 1."""
        super().guard(what, operator)
        reason = (
            "{what} of the indexer: they are multiplied by {factor} behind their rotation by the Hadamard "
            "matrix; npu_lightning_indexer_prolog_pto requires none; fold it into the matrix"
        )
        require(self.factor == 1, reason, what=what, factor=self.factor)

    def matrix(self) -> Tensor:
        """Return `self.rotation` transposed, [D, D]: the operator multiplies rows by it from the right."""
        return self.rotation.t().contiguous()


@dataclass(frozen=True)
class Int8Queries(TurnedLanes):
    """Queries [.., N, D]: a linear layer in W8A8 of the int8 latent of the queries."""

    latent: Any = tensor("*B Hcq")
    tokens: Any = tensor("*B 1")
    weight: Any = tensor("Hiq Hcq")
    scale: Any = tensor("Hiq")
    layer_dtype: Any = attribute()
    is_parameter_only: Any = attribute()

    def rows(self, p, lanes, tables):
        """Return the term of the queries before they are quantised: projected, rotated and multiplied by the matrix.

        `lanes` and `tables` are those of the rotation, see `RotatedLanes.term`.
        """
        how = dict(weight=self.weight, scale=self.scale, is_parameter_only=self.is_parameter_only)
        layer = p.int8_matmul(x=self.latent, tokens=self.tokens, dtype=self.layer_dtype, **how)
        return self.turned(p, p.reshaped(layer), lanes, tables, self.layer_dtype, False)


@dataclass(frozen=True)
class Int8Keys(TurnedLanes):
    """Keys [.., D]: a layer norm of a linear layer of x."""

    weight: Any = tensor("Di He")
    gamma: Any = tensor("Di")
    beta: Any = tensor("Di")
    eps: Any = scalar()
    is_parameter_only: Any = attribute()

    def rows(self, p, x, lanes, tables, heads_first):
        """Return the term of the keys of `x` before they are quantised: projected, normed, rotated, multiplied by the
        matrix.

        `heads_first` is None for tokens by sequence, False for packed tokens, see `p.per_token`.
        """
        layer = p.linear(x=x, weight=self.weight, is_parameter_only=self.is_parameter_only)
        key = p.layer_norm(x=p.reshaped(layer), gamma=self.gamma, beta=self.beta, eps=self.eps)
        return self.turned(p, p.reshaped(key), lanes, tables, x, heads_first)


@dataclass(frozen=True)
class HeadWeights(Group):
    """Weights of the heads [.., N]: a linear layer of x times a factor, in float16."""

    weight: Any = tensor("N He")
    factor: Any = scalar()
    is_parameter_only: Any = attribute()

    def term(self, p, x):
        """Return the term of the weights of the heads for `x`: linear(x) · factor in float16."""
        layer = p.linear(x=p.reshaped(x), weight=self.weight, is_parameter_only=self.is_parameter_only)
        wide = p.maybe_cast(p.reshaped(layer), to=torch.float32)
        return p.as_dtype(p.maybe_scaled(wide, self.factor), torch.float16)

    def guard(self, lanes: int) -> None:
        """Refuse a `factor` other than 1 / √(N · `lanes`), where `lanes` is the number of lanes of a query."""
        own = (self.weight.shape[0] * lanes) ** -0.5
        reason = (
            "weights of heads: they are multiplied by {factor}; npu_lightning_indexer_prolog_pto requires "
            "{own}, which it has compiled in"
        )
        require(math.isclose(self.factor, own, rel_tol=1e-6), reason, factor=self.factor, own=own)


@dataclass(frozen=True)
class IndexerMatch(Captures):
    """Captures of an indexer's prologue: hidden states `x` [*B, He], queries, keys, head weights, tables, cache."""

    x: Tensor
    queries: Int8Queries
    keys: Int8Keys
    heads: HeadWeights
    lanes: Lanes
    tables: Tables
    storage: Pages


@dataclass(frozen=True)
class LightningIndexerPrologPto(Rule):
    """Queries, keys and head weights of an int8 indexer over pages, with the writes of keys and of their scales."""

    aliases = ("indexer_prolog",)

    opt_in = True

    def reference(self, latent: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, turn: Tensor) -> Tensor:
        """Compute float queries [T, N, D] without rotation, of int8 `latent` [T, Hcq] with scales `tokens` [T, 1]."""
        layer = (latent.double() @ weight.double().t()) * tokens * scale
        return layer.to(turn.dtype).unflatten(-1, (-1, turn.shape[0])) @ turn

    @pattern
    @variants(heads_first=(None, False))
    def written(
        self,
        p,
        heads_first,
        x=tensor("*B He"),
        queries: Any = Int8Queries,
        keys: Any = Int8Keys,
        heads: Any = HeadWeights,
        lanes: Any = Lanes,
        tables: Any = Tables,
        storage: Any = Pages,
    ):
        """q = int8(rope(c W_IQ) H_q), keys[slot] = int8(rope(LayerNorm(x W_IK)) H_k), w = x W_IW · factor

        The scales of q are a result as well, and those of the keys are written to the same slots of a second cache.
        """
        query, query_scale = queries.quantised(p, queries.rows(p, lanes, tables))
        key, key_scale = keys.quantised(p, p.reshaped(keys.rows(p, x, lanes, tables, heads_first)))
        return query, query_scale, *storage.written(p, key, key_scale), heads.term(p, x)

    @lookalike(
        "queries of the indexer: they are rounded to float16 before they are quantised; "
        "npu_lightning_indexer_prolog_pto requires no rounding between; leave the cast out"
    )
    def rounded(self, p, queries: Any = Int8Queries, lanes: Any = Lanes, tables: Any = Tables):
        """int8(float16(rope(c W_IQ) H_q))"""
        return queries.quantised(p, p.cast(queries.rows(p, lanes, tables), to=torch.float16))[0]

    @lookalike(
        "int8 queries of the indexer: the graph has no head weights and no writes of keys to pages beside them, or "
        "scales or weights are not float16; npu_lightning_indexer_prolog_pto requires all three, in float16; compute "
        "queries, keys and head weights in one forward, with .half() scales"
    )
    def alone(self, p, queries: Any = Int8Queries, lanes: Any = Lanes, tables: Any = Tables):
        """int8(rope(c W_IQ) H_q) without keys, head weights or writes"""
        return queries.quantised(p, queries.rows(p, lanes, tables))[0]

    def guard(self, match: IndexerMatch):
        """Refuse an epsilon, factor, dtype or lane order that the operator does not have, and NZ pages."""
        x, queries, keys, storage = match.x, match.queries, match.keys, match.storage
        reason = (
            "eps: that of the norm of the indexer's keys is {eps}; npu_lightning_indexer_prolog_pto requires "
            "{own}, which it has compiled in"
        )
        require(math.isclose(keys.eps, EPSILON_OF_KEYS, rel_tol=1e-6), reason, eps=keys.eps, own=EPSILON_OF_KEYS)
        queries.guard("queries", _OPERATOR)
        keys.guard("keys", _OPERATOR)
        reason = (
            "queries of the indexer: their layer is computed in {dtype}; npu_lightning_indexer_prolog_pto "
            "requires {own}, the dtype of the hidden states; cast its result there"
        )
        require(queries.layer_dtype == x.dtype, reason, dtype=queries.layer_dtype, own=x.dtype)
        require(
            storage.nz_block is None,
            "cache: its pages are lines of NZ; npu_lightning_indexer_prolog_pto requires rows [Block, Size, 1, "
            "D]; allocate the cache so",
        )
        storage.guard(x, _OPERATOR)
        match.heads.guard(match.lanes.end)

    @lowering
    def run(self, match: IndexerMatch):
        """Emit npu_lightning_indexer_prolog_pto: int8 queries [.., N, D], scales, both caches, weights [.., N].

        The caches are those of the keys and of their scales.
        """
        x, queries, keys, storage = match.x, match.queries, match.keys, match.storage
        rows = x.reshape(-1, x.shape[-1])
        cos, sin = match.tables.in_halves(x, keys.result, match.lanes.split, x.dtype)
        key_cache, scale_cache = storage.caches(x, (None, None), x, _OPERATOR)
        query, scale, weights, *caches = torch.ops.custom_pypto.npu_lightning_indexer_prolog_pto.functional(
            rows, queries.latent.reshape(rows.shape[0], -1), queries.tokens.float().reshape(-1, 1),
            prepared(queries.weight), queries.scale.float().reshape(-1, 1), prepared(keys.weight),
            prepared(match.heads.weight), keys.gamma.to(x.dtype), keys.beta.to(x.dtype),
            *(each.reshape(rows.shape[0], -1) for each in (cos, sin)), queries.matrix(), keys.matrix(), key_cache,
            scale_cache, storage.slots.to(torch.int64).reshape(-1), EPSILON_OF_KEYS,
        )  # fmt: skip
        tokens = x.shape[:-1]
        results = (query, scale.to(torch.float16), weights.to(torch.float16))
        query, scale, weights = (each.reshape(*tokens, *each.shape[1:]) for each in results)
        return query, scale, *storage.restored(*caches), weights
