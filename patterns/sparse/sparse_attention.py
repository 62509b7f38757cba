"""out = softmax(scale · q kᵀ over the keys that an indexer lists) v, of keys and values that one latent gives.

*Matches* dense attention behind a mask of listed keys, with keys and values expanded from a latent (DeepSeek-V3.2,
2025). *Replaces with* `npu_lightning_indexer` and `npu_sparse_flash_attention` on the latent itself: queries and
results take the expansion over (`q · (W c) = (q W) · c`), which is exact for every list of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.attention.calls import viewed
from patterns.latent.head_projection import expanded
from patterns.latent.terms import operands


@dataclass(frozen=True)
class SparseAttention(Rule):
    """Attention over the keys that are listed for each query."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor, scale: float) -> Tensor:
        """The meaning: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E], places [B, S, K] → [B, N, S, E]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        listed = torch.zeros_like(scores[:, 0], dtype=torch.bool).scatter(-1, places, True)
        return scores.masked_fill(~listed.unsqueeze(1), -torch.inf).softmax(-1).to(q.dtype) @ v

    @pattern
    def by_indexer(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), query=tensor("B S H Di"),
        key=tensor("B T Di"), weights=tensor("B S H"), places=tensor("B S K"), mask_length=tensor("B", optional=True),
        length=tensor("B", optional=True), count=attribute(), some=attribute(), scale=scalar(), order=attribute(),
        known=attribute(), mask_order=attribute(), mask_window=attribute(), mask_known=attribute(), empty=attribute(),
        finish=attribute(), distinct=attribute(),
    ):  # fmt: skip
        """The keys are what an indexer finds behind the same mask."""
        seen = dict(order=order, window=None, known=known, length=length, some=some)
        listed = p.index_selection(query=query, key=key, weights=weights, places=places, count=count, **seen)
        q, k, v = operands(p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value), None)
        return p.softmax_attention(
            q=q, k=k, v=v,
            mask=p.chosen_keys(places=listed, distinct=distinct, **seen), order=mask_order, window=mask_window,
            known=mask_known, length=mask_length, scale=scale, empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def by_places(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), places=tensor("B S K"),
        mask_length=tensor("B", optional=True), length=tensor("B", optional=True), some=attribute(), scale=scalar(),
        order=attribute(), known=attribute(), mask_order=attribute(), mask_window=attribute(), mask_known=attribute(),
        empty=attribute(), finish=attribute(), distinct=attribute(),
    ):  # fmt: skip
        """The keys are listed in whatever way."""
        q, k, v = operands(p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value), None)
        return p.softmax_attention(
            q=q, k=k, v=v,
            mask=p.chosen_keys(
                places=places, distinct=distinct, order=order, window=None, known=known, length=length, some=some
            ),
            order=mask_order, window=mask_window, known=mask_known, length=mask_length, scale=scale, empty=empty,
            finish=finish,
        )  # fmt: skip

    def guard(self, query: Any, some: bool, empty: str):
        """The operator gives 0 for a query that no key is left for."""
        left = empty == "zero" or (some and query is not None)
        require(left, "a query for which no key is left gives the mean of all values, the operator gives 0")

    @lowering
    def indexed(self, absorbed, q_rope, latent, k_rope, up_value, query, key, weights, count, scale, order, known,
                length, finish):  # fmt: skip
        """The indexer, sparse attention, and the values of all heads."""
        listed = _listed(query, key, weights, count, order, known, length)
        y = _attended(absorbed, q_rope, latent, k_rope, listed, scale, order, known, length)
        return viewed(expanded(y, up_value, "transposed"), finish)

    @lowering
    def indexed_with_matmul(self, absorbed, q_rope, latent, k_rope, up_value, query, key, weights, count, scale, order,
                            known, length, finish):  # fmt: skip
        """The same with a batched product behind it."""
        listed = _listed(query, key, weights, count, order, known, length)
        y = _attended(absorbed, q_rope, latent, k_rope, listed, scale, order, known, length)
        return viewed(expanded(y, up_value, "multiplied"), finish)

    @lowering
    def listed(self, absorbed, q_rope, latent, k_rope, up_value, places, scale, order, known, length, finish, distinct):
        """Sparse attention over the model's own list."""
        y = _attended(absorbed, q_rope, latent, k_rope, _as_list(places, distinct), scale, order, known, length)
        return viewed(expanded(y, up_value, "transposed"), finish)

    @lowering
    def listed_with_matmul(
        self, absorbed, q_rope, latent, k_rope, up_value, places, scale, order, known, length, finish, distinct
    ):
        """The same with a batched product behind it."""
        y = _attended(absorbed, q_rope, latent, k_rope, _as_list(places, distinct), scale, order, known, length)
        return viewed(expanded(y, up_value, "multiplied"), finish)


def _as_list(places: Tensor, distinct: bool) -> Tensor:
    """Places [B, S, K] as the operator takes them, [B, S, 1, K]: each once, then -1.

    It leaves out what lies behind the mask itself.
    """
    places = places.to(torch.int32)
    if not distinct:
        ordered = places.sort(dim=-1).values
        again = ordered.diff(dim=-1, prepend=ordered[..., :1] - 1) == 0
        places = ordered.masked_fill(again, -1).sort(dim=-1, descending=True).values
    return places.unsqueeze(2)


def _listed(
    query: Tensor | None, key: Tensor, weights: Tensor, count: int, order: str, known: Any, length: Tensor | None
) -> Tensor:
    """The places of the `count` best keys of each query [B, S, 1, count], -1 where there are not so many."""
    require(query is not None, "the keys are not listed by an indexer")
    assert query is not None
    mode, keys = _lengths(key, query.shape[1], order, known, length)
    return torch.ops.npu.npu_lightning_indexer(
        query, key.unsqueeze(2), weights, actual_seq_lengths_key=keys, layout_query="BSND", layout_key="BSND",
        sparse_count=count, sparse_mode=mode,
    )[0]  # fmt: skip


def _attended(
    absorbed: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, listed: Tensor, scale: float, order: str,
    known: Any, length: Tensor | None,
) -> Tensor:  # fmt: skip
    """Queries [B, N, S, C + Dr] over the listed rows of the latent [.., C] and [.., Dr], as [B, S, N, C]."""
    batch = absorbed.shape[0]
    latent, k_rope = (each.reshape(batch, -1, each.shape[-1]) for each in (latent, k_rope))
    mode, keys = _lengths(latent, absorbed.shape[2], order, known, length)
    rows = latent.unsqueeze(2)
    return torch.ops.npu.npu_sparse_flash_attention(
        absorbed.transpose(1, 2), rows, rows, listed, scale, actual_seq_lengths_kv=keys,
        query_rope=q_rope.transpose(1, 2), key_rope=k_rope.unsqueeze(2), sparse_block_size=1, layout_query="BSND",
        layout_kv="BSND", sparse_mode=mode, attention_mode=2,
    )[0]  # fmt: skip


def _lengths(keys: Tensor, queries: Any, order: str, known: Any, length: Tensor | None) -> tuple[int, Tensor | None]:
    """Sparse mode, and how many of keys [B, T, ..] are there for each sequence, [B] in int32, None for all.

    In mode 3 the last query sees the last of these keys; in mode 0 every query sees all of them.
    """
    mode = 0 if order == "full" else 3
    if length is not None:
        return mode, length.to(torch.int32)
    size: Any = keys.shape[1]
    short = isinstance(queries, int) and isinstance(size, int) and queries > size
    require(order != "left" or not short, "there are fewer keys than queries, which stand in line from the first on")
    count = queries if order == "left" else size if known is None else known
    if isinstance(count, int) and count == size:
        return mode, None
    return mode, torch.full((keys.shape[0],), count, dtype=torch.int32, device=keys.device)
