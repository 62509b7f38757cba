"""What stands before a lightning indexer in int8: queries, keys and head weights, and the writes of keys and scales.

    q = int8(rope(c W_IQ) H_q)    k = int8(rope(LayerNorm(x W_IK)) H_k)    w = x W_IW / √(N · D), in float16
    index_cache[slot] = k         scale_cache[slot] = scale of k, in float16

*Matches* a step of DeepSeek-V3.2 (2025) in W8A8C8 over pages, whose latent c is in int8 with a scale of each token;
what reads queries and caches stays. *Replaces with* `npu_lightning_indexer_prolog_pto`, which is no part of torch_npu
and has sizes, the norm's epsilon and the factor of the weights compiled in: a model that has others is told so. The
rule is opt-in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants
from patterns.cache.stores import Pages
from patterns.latent.prolog.terms import Tables
from patterns.quant.quantisation import quantised_rows
from patterns.quant.quantised_linear import prepared
from patterns.sparse.indexer.index_lanes import EPSILON_OF_KEYS, Lanes, RotatedLanes


@dataclass(frozen=True)
class TurnedLanes(RotatedLanes):
    """The same times a matrix, in int8 with a scale of each token and head, kept in float16."""

    rotation: Any = tensor("Di Di")
    rotation_is_parameter_only: Any = attribute()
    factor: Any = scalar()
    scale_dtype: Any = attribute()

    def turned(self, p, x, lanes, tables, like, heads_first):
        """What is quantised."""
        rows = self.term(p, x, lanes, tables, like, heads_first)
        how = dict(weight=self.rotation, is_parameter_only=self.rotation_is_parameter_only)
        return p.maybe_scaled(p.linear(x=p.reshaped(rows), **how), self.factor)

    def quantised(self, p, turned):
        """The numbers, and their scales."""
        whole, scale = quantised_rows(p, turned, self.scale_dtype)
        return whole, p.as_dtype(p.reshaped(scale), torch.float16)

    def guard(self, what: str) -> None:
        """Refuse other orders, and what is multiplied by a number besides."""
        super().guard(what)
        said = "{what} of the indexer are turned and multiplied by {factor}, in the operator by no number besides"
        require(self.factor == 1, said, what=what, factor=self.factor)

    def matrix(self) -> Tensor:
        """That which rows are multiplied by, [D, D]."""
        return self.rotation.t().contiguous()


@dataclass(frozen=True)
class Int8Queries(TurnedLanes):
    """Queries [.., N, D], a layer in W8A8 of the latent of the queries."""

    latent: Any = tensor("*B Hcq")
    tokens: Any = tensor("*B 1")
    weight: Any = tensor("Hiq Hcq")
    scale: Any = tensor("Hiq")
    layer_dtype: Any = attribute()
    is_parameter_only: Any = attribute()

    def rows(self, p, lanes, tables):
        """What is quantised."""
        how = dict(weight=self.weight, scale=self.scale, is_parameter_only=self.is_parameter_only)
        layer = p.int8_matmul(x=self.latent, tokens=self.tokens, dtype=self.layer_dtype, **how)
        return self.turned(p, p.reshaped(layer), lanes, tables, self.layer_dtype, False)


@dataclass(frozen=True)
class Int8Keys(TurnedLanes):
    """Keys [.., D], a norm of a layer of x."""

    weight: Any = tensor("Di He")
    gamma: Any = tensor("Di")
    beta: Any = tensor("Di")
    eps: Any = scalar()
    is_parameter_only: Any = attribute()

    def rows(self, p, x, lanes, tables, heads_first):
        """What is quantised; packed tokens may have a dim for their only head, as `p.per_token` asks."""
        layer = p.linear(x=x, weight=self.weight, is_parameter_only=self.is_parameter_only)
        key = p.layer_norm(x=p.reshaped(layer), gamma=self.gamma, beta=self.beta, eps=self.eps)
        return self.turned(p, p.reshaped(key), lanes, tables, x, heads_first)


@dataclass(frozen=True)
class HeadWeights(Group):
    """Weights of the heads [.., N], a layer of x times a number, in float16."""

    weight: Any = tensor("N He")
    factor: Any = scalar()
    is_parameter_only: Any = attribute()

    def term(self, p, x):
        """They."""
        layer = p.linear(x=p.reshaped(x), weight=self.weight, is_parameter_only=self.is_parameter_only)
        wide = p.maybe_cast(p.reshaped(layer), to=torch.float32)
        return p.as_dtype(p.maybe_scaled(wide, self.factor), torch.float16)

    def guard(self, lanes: int) -> None:
        """Refuse another number."""
        own = (self.weight.shape[0] * lanes) ** -0.5
        said = "weights of heads are multiplied by {factor}, by the operator by {own}, which it has compiled in"
        require(math.isclose(self.factor, own, rel_tol=1e-6), said, factor=self.factor, own=own)


@dataclass(frozen=True)
class LightningIndexerPrologPto(Rule):
    """Queries, keys and head weights of an int8 indexer over pages, with the writes of keys and of their scales."""

    aliases = ("indexer_prolog",)

    opt_in = True

    def reference(self, latent: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, turn: Tensor) -> Tensor:
        """The meaning of a query without rotation: latent [T, Hcq] in int8, tokens [T, 1] → turned [T, N, D]."""
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
        """All of it."""
        query, query_scale = queries.quantised(p, queries.rows(p, lanes, tables))
        key, key_scale = keys.quantised(p, p.reshaped(keys.rows(p, x, lanes, tables, heads_first)))
        return query, query_scale, *storage.written(p, key, key_scale), heads.term(p, x)

    @lookalike("queries of the indexer are rounded to float16 before they are quantised, by the operator they are not")
    def rounded(self, p, queries: Any = Int8Queries, lanes: Any = Lanes, tables: Any = Tables):
        """Another dtype between."""
        return queries.quantised(p, p.cast(queries.rows(p, lanes, tables), to=torch.float16))[0]

    @lookalike(
        "int8 queries of an indexer whose scales are not kept in float16, or that stand beside no head weights in "
        "float16, or beside no keys that are written to slots of pages with their scales in float16: the operator "
        "gives all of it"
    )
    def alone(self, p, queries: Any = Int8Queries, lanes: Any = Lanes, tables: Any = Tables):
        """A part of it."""
        return queries.quantised(p, queries.rows(p, lanes, tables))[0]

    def guard(self, x: Any, queries: Int8Queries, keys: Int8Keys, heads: HeadWeights, lanes: Lanes, storage: Pages):
        """What the operator has compiled in, and how it reads and writes."""
        said = "eps={eps} of the norm of the indexer's keys is not the {own} that the operator has compiled in"
        require(math.isclose(keys.eps, EPSILON_OF_KEYS, rel_tol=1e-6), said, eps=keys.eps, own=EPSILON_OF_KEYS)
        queries.guard("queries")
        keys.guard("keys")
        said = "queries of the indexer are computed in {dtype}, by the operator in {own}"
        require(queries.layer_dtype == x.dtype, said, dtype=queries.layer_dtype, own=x.dtype)
        require(storage.nz_block is None, "the operator keeps pages as rows of tokens, not in blocks of NZ")
        storage.guard(x)
        heads.guard(lanes.end)

    @lowering
    def run(self, x, queries, keys, heads, lanes, tables, storage):
        """One call."""
        rows = x.reshape(-1, x.shape[-1])
        cos, sin = tables.in_halves(x, keys.result, lanes.split, x.dtype)
        key_cache, scale_cache = storage.caches(x, (None, None), x)
        whole, scale, weights, *caches = torch.ops.custom_pypto.npu_lightning_indexer_prolog_pto.functional(
            rows, queries.latent.reshape(rows.shape[0], -1), queries.tokens.float().reshape(-1, 1),
            prepared(queries.weight), queries.scale.float().reshape(-1, 1), prepared(keys.weight),
            prepared(heads.weight), keys.gamma.to(x.dtype), keys.beta.to(x.dtype),
            *(each.reshape(rows.shape[0], -1) for each in (cos, sin)), queries.matrix(), keys.matrix(), key_cache,
            scale_cache, storage.slots.to(torch.int64).reshape(-1), EPSILON_OF_KEYS,
        )  # fmt: skip
        tokens = x.shape[:-1]
        given = (whole, scale.to(torch.float16), weights.to(torch.float16))
        whole, scale, weights = (each.reshape(*tokens, *each.shape[1:]) for each in given)
        return whole, scale, *storage.restored(*caches), weights
