"""A layer of sparse attention over pages, from the hidden states to the result over the latent, in one operator.

    c = norm(x W_DQ)    rows of both caches as in `MlaProlog`       query = c W_UQ W_UK       [k, k_r] by a block table
    iq = rope(c W_IQ)   index_cache[slot] = rope(LayerNorm(x W_IK))  list = top 2048 of Σ_m (x W_IW)[m] relu(iq[m] · ik)
    y = softmax((query kᵀ + query_rope k_rᵀ) / √(C + Dr) over the list) k

*Matches* a step of DeepSeek-V3.2 (2025) in plain code: prolog, indexer, the writes into three caches of pages, and
attention over what the indexer lists, of tokens by sequence or packed. *Replaces with* `npu_sparse_attention_pto`,
which is no part of torch_npu and has sizes, epsilons and the scale of the scores compiled in: a model with other ones
is refused. The rule is opt-in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.attention.calls import viewed
from patterns.attention.masks.visibility import Visibility
from patterns.attention.results import Output
from patterns.cache import pages
from patterns.cache.stores import Pages
from patterns.latent.attention.encodings import Plain
from patterns.latent.head_projection import expanded
from patterns.latent.prolog.layers import FloatLayers
from patterns.latent.prolog.prolog import PrologMatch, Queries
from patterns.latent.prolog.terms import LatentRow, Tables
from patterns.quant.quantised_linear import prepared
from patterns.sparse.attention.list_sources import Listing
from patterns.sparse.attention.pages import LatentPages, refuse_nz
from patterns.sparse.attention.sparse_attention import VALUES
from patterns.sparse.indexer.index_lanes import EPSILON_OF_KEYS, Lanes, RotatedLanes
from patterns.sparse.indexer.indexer import PagedIndexer

LISTED, EPSILON = 2048, 1e-5
"""Length of a list, and epsilon of the RMS norms, that the operator has compiled in."""


_OPERATOR = "npu_sparse_attention_pto"


@dataclass(frozen=True)
class IndexKeys(RotatedLanes):
    """Keys of an indexer, a layer norm of a linear layer of x, and the pages `cache` that they are written to."""

    weight: Any = tensor("Di He")
    gamma: Any = tensor("Di")
    beta: Any = tensor("Di")
    eps: Any = scalar()
    cache: Any = tensor("*I")
    nz_block: Any = attribute()
    is_parameter_only: Any = attribute()

    def written(self, p, x, lanes, tables, like, slots):
        """Return the term of the pages `self.cache` after the indexer's keys of the tokens `x` are written to `slots`.

        `lanes`, `tables` and `like` are those of the rotation, see `RotatedLanes.term`.
        """
        layer = p.linear(x=x, weight=self.weight, is_parameter_only=self.is_parameter_only)
        key = p.layer_norm(x=p.reshaped(layer), gamma=self.gamma, beta=self.beta, eps=self.eps)
        rows = self.term(p, p.reshaped(key), lanes, tables, like, None)
        return p.write_pages(cache=self.cache, rows=p.reshaped(rows), slots=slots, nz_block=self.nz_block)


@dataclass(frozen=True)
class IndexQueries(RotatedLanes):
    """Queries of an indexer, a linear layer of their latent, and the weights of its heads, a linear layer of x."""

    weight: Any = tensor("Hiq Hcq")
    head_weight: Any = tensor("M He")
    is_parameter_only: Any = attribute()
    head_weight_is_parameter_only: Any = attribute()

    def terms(self, p, x, latent, lanes, tables, like):
        """Return the terms of the rotated queries of `latent`, and of the weights of the heads of `x`, in float32.

        `lanes`, `tables` and `like` are those of the rotation, see `RotatedLanes.term`.
        """
        layer = p.linear(x=p.reshaped(latent), weight=self.weight, is_parameter_only=self.is_parameter_only)
        heads = p.linear(x=x, weight=self.head_weight, is_parameter_only=self.head_weight_is_parameter_only)
        query = self.term(p, p.reshaped(layer), lanes, tables, like, False)
        return p.maybe_packed(query), p.maybe_cast(p.maybe_packed(p.reshaped(heads)), to=torch.float32)


@dataclass(frozen=True)
class OneTable(Group):
    """The block table by which the model gathers rows from all three caches.

    Attributes:
        block_table: pages of each sequence, in all caches.
        size: rows of a page.
        layout: layout of the pages of the latent.
        index_layout: layout of the pages of the indexer's keys.
        first_rows: number of first rows of each sequence that are read of the latent, None for all.
    """

    block_table: Any = tensor("B P")
    size: Any = attribute()
    layout: Any = attribute()
    index_layout: Any = attribute()
    first_rows: Any = attribute()

    def terms(self, p, kv, kr) -> LatentPages:
        """Return the caches `kv` and `kr`, after the writes, as pages that `self.block_table` lists."""
        how = (self.block_table, self.size, self.layout)
        return LatentPages(p.whatever("*F"), p.whatever("*G"), kv, kr, *how, *how)

    def indexer(self, p, query, weights, count, written) -> PagedIndexer:
        """Return an indexer that reads its keys from the pages `written`, listed by `self.block_table`.

        `query`, `weights` and `count` are those of `Indexer`.
        """
        how = dict(block_table=self.block_table, size=self.size, layout=self.index_layout)
        return PagedIndexer(query, p.whatever("B T Di"), weights, count, None, None, written, **how)


@dataclass(frozen=True)
class Heads(Group):
    """Queries [B, N, S, D] with W_UK, and W_UV, where the graph has the products with these; see `Floats` of latent
    attention.
    """

    nope: Any = tensor("B N S D", optional=True, needed=False)
    up_key: Any = tensor("N D C", optional=True, needed=False)
    up_value: Any = tensor("N C E", optional=True)


@dataclass(frozen=True)
class Prolog(Group):
    """The prolog before attention as in `MlaProlog`: layers, queries, row of a token, rotation tables, and pages to
    write.
    """

    projection: Any = FloatLayers
    queries: Any = Queries
    row: Any = LatentRow
    tables: Any = Tables
    storage: Any = Pages


@dataclass(frozen=True)
class Index(Group):
    """The indexer: its queries, its keys, the lanes of both that are rotated, and `count`, the number of keys that it
    lists.
    """

    queries: Any = IndexQueries
    keys: Any = IndexKeys
    lanes: Any = Lanes
    count: Any = attribute()


@dataclass(frozen=True)
class Attended(Group):
    """Attention over the listed keys: block table, queries, list, mask, result, and scale of the scores."""

    table: Any = OneTable
    heads: Any = Heads
    listing: Any = Listing
    seen: Any = Visibility
    result: Any = Output
    scale: Any = scalar()


@dataclass(frozen=True)
class SparseAttentionPto(Rule):
    """A step of sparse attention over pages, with its prolog, its indexer and the writes into three caches."""

    aliases = ("whole_layer",)

    opt_in = True

    def reference(self, x: Tensor, dq: Tensor, gamma: Tensor, iq: Tensor, iw: Tensor, keys: Tensor) -> Tensor:
        """Compute the list [B, S, 2048] without rotation, of x [B, S, H] and keys [B, T, Di]."""
        c = torch.nn.functional.rms_norm(x @ dq.T, gamma.shape, gamma, EPSILON)
        products = torch.einsum("bsmd,btd->bsmt", (c @ iq.T).unflatten(-1, (-1, keys.shape[-1])), keys).relu()
        return torch.einsum("bsmt,bsm->bst", products, x @ iw.T).topk(LISTED, -1).indices

    @pattern
    def written(self, p, x=tensor("*B He"), prolog: Any = Prolog, index: Any = Index, attended: Any = Attended):
        """softmax((query kᵀ + query_rope k_rᵀ) · scale over the list) k; and the caches of k, k_r and ik, written

        k is the latent, k_r its rotated lanes, and ik the indexer's keys, each written for the tokens `x`.
        """
        projection, tables, table, heads = prolog.projection, prolog.tables, attended.table, attended.heads
        low, both = projection.down(p, x)
        rotated, absorbed, (latent,) = prolog.queries.terms(p, low, projection, tables, x)
        kv, kr = prolog.storage.written(p, *prolog.row.terms(p, both, tables, x))
        written = index.keys.written(p, x, index.lanes, tables, x, prolog.storage.slots)
        query, weights = index.queries.terms(p, x, latent, index.lanes, tables, x)
        turned = p.heads_first(p.maybe_packed(rotated), prolog.queries.heads_first)
        encoding = Plain(heads.nope, turned, absorbed, heads.up_key, heads.up_value, table.first_rows)
        listed = replace(attended.listing, places=p.whatever("B S K")).indexed(
            p, table.indexer(p, query, weights, index.count, written)
        )
        captures = dict(attended.seen.captures(), scale=attended.scale, mask=listed)
        return encoding.terms(p, table.terms(p, kv, kr), attended.result, captures), kv, kr, written

    def guard(self, x: Any, prolog: Prolog, index: Index, attended: Attended):
        """Refuse what the operator has compiled in otherwise, masks without a length of each sequence, and queries
        without keys.

        Compiled in are scale, epsilons, factors of 1, lane orders, layouts of pages, and `LISTED`, the length of a
        list.
        """
        projection, queries, row, storage = prolog.projection, prolog.queries, prolog.row, prolog.storage
        refuse_nz(_OPERATOR, attended.table.layout, attended.table.index_layout)
        latent, rope = row.widths
        own = (latent + rope) ** -0.5
        reason = (
            "scale: scores are multiplied by {scale}; npu_sparse_attention_pto requires {own}, which it has compiled in"
        )
        require(math.isclose(attended.scale, own, rel_tol=1e-6), reason, scale=attended.scale, own=own)
        norms = (
            ("the queries' norm", queries.eps, EPSILON),
            ("the latent's norm", row.eps, EPSILON),
            ("the norm of the indexer's keys", index.keys.eps, EPSILON_OF_KEYS),
        )
        for what, eps, compiled in norms:
            reason = (
                "eps: that of {what} is {eps}; npu_sparse_attention_pto requires {compiled}, which it has compiled in"
            )
            require(math.isclose(eps, compiled, rel_tol=1e-6), reason, eps=eps, what=what, compiled=compiled)
        reason = (
            "index_topk: {count} keys are listed; npu_sparse_attention_pto requires {listed}, which it has compiled in"
        )
        require(index.count == LISTED, reason, count=index.count, listed=LISTED)
        ones = projection.factor(queries.factor) == row.factor == 1
        require(
            ones,
            "latent: it is multiplied by a number behind its norm; npu_sparse_attention_pto requires none; "
            "fold it into the weight of the norm",
        )
        listing = attended.listing
        own_lens = (
            "mask: the last visible key of a sequence is not proven to be within the gathered pages; "
            "npu_sparse_attention_pto counts keys from the last one and requires that; clamp lengths to "
            "the pages"
        )
        require(listing.row_lens is None, own_lens)
        has_length = listing.kv_lens is not None or listing.kv_len is not None
        require(
            has_length,
            "lengths: none of the sequences has one in a tensor; npu_sparse_attention_pto requires the number "
            "of keys of each sequence [B]; mask keys by such lengths",
        )
        left = (
            "mask: a query may see no key, which npu_sparse_attention_pto leaves unwritten; it requires a "
            "visible key for each query; clamp lengths at 1"
        )
        require(listing.every_row_nonempty, left)
        queries.guard(row)
        projection.guard_row(row)
        projection.guard(queries)
        storage.guard_order(row.result, _OPERATOR)
        storage.guard(x, _OPERATOR)
        for what, lanes in (("queries", index.queries), ("keys", index.keys)):
            lanes.guard(what, _OPERATOR)

    @lowering
    @variants(values=VALUES)
    def run(self, x: Tensor, prolog: Prolog, index: Index, attended: Attended, values: str):
        """Emit npu_sparse_attention_pto, and a product of its result with W_UV of each head.

        Returns y in the layout of the model, and the caches of the latent, of its rotated lanes and of the indexer's
        keys.
        """
        storage, table, keys = prolog.storage, attended.table, index.keys
        x = x.reshape(table.block_table.shape[0], -1, x.shape[-1])  # of tokens that the model may have packed
        match = PrologMatch(x, prolog.projection, storage, prolog.queries, prolog.row, prolog.tables)
        x, dq, uq, up, dkv, gain_q, gain, sin, cos = match.operands(match.layers())
        mode, lengths = attended.listing.lengths(x, table.block_table.shape[1] * table.size, None)
        require(
            mode == 3 or x.shape[1] == 1,
            "mask: each query sees keys behind it; npu_sparse_attention_pto requires a causal order; mask keys "
            "behind the query",
        )
        kv_cache, kr_cache = match.caches(_OPERATOR)
        weights = (prepared(each) for each in (index.queries.weight, keys.weight, index.queries.head_weight))
        y, kv, kr, written = torch.ops.custom_pypto.npu_sparse_attention_pto.functional(
            x, dq, uq, up, dkv, gain_q, gain, sin, cos, storage.index(x).int(), kv_cache, kr_cache,
            table.block_table.int(), lengths, *weights, keys.gamma.to(x.dtype), keys.beta.to(x.dtype),
            pages.in_rows(keys.cache, None, _OPERATOR),
        )  # fmt: skip
        y = viewed(expanded(y, attended.heads.up_value, values), attended.result.view)
        return y, *match.stored((kv, kr)), written.reshape(keys.cache.shape)
