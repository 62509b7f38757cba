"""places[b, s] = the K keys j with the largest Σ_n w[b, s, n] · relu(q[b, s, n] · k[b, j]), best first.

*Matches* the indexer of DeepSeek-V3.2 (2025) where the model itself uses its list: returned, shared by layers, or to
gather rows by; where each query surely sees K keys, or the model writes -1 over the places of hidden ones. *Replaces
with* `npu_lightning_indexer`; or, of queries and keys in int8 with a scale of each row, with
`npu_quant_lightning_indexer`, which rounds weights and sums to float16: keys whose scores are nearly equal may change
places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, refused_on, variants
from patterns.sparse.indexer.indexer import INDEXERS, Seen


@dataclass(frozen=True)
class IndexerTopk(Rule):
    """Lists of keys of a lightning indexer, which the model itself uses."""

    aliases = ("indexer", "lightning_indexer", "quant_lightning_indexer")

    def reference(self, query: Tensor, key: Tensor, weights: Tensor, count: int) -> Tensor:
        """Compute places [B, S, count] of query [B, S, N, D], key [B, T, D] and weights [B, S, N]."""
        products = torch.einsum("bsnd,btd->bsnt", query, key).relu()
        return torch.einsum("bsnt,bsn->bst", products, weights).topk(count, -1).indices

    @pattern
    @variants(indexer=INDEXERS)
    def listed(self, p, indexer, seen: Any = Seen, dtype=attribute(), entries=attribute(), offset=attribute()):
        """top-K over j of Σ_n w[b, s, n] · relu(q[b, s, n] · k[b, j]) + offset, -1 after the last visible key"""
        return p.indexer_list(dtype=dtype, entries=entries, offset=offset, **indexer.captures(p), **seen.captures())

    def guard(self, indexer: Any):
        """Refuse pages of keys in FRACTAL_NZ, and scales with another block table than the keys."""
        indexer.refuse_blocks()

    @lowering
    @refused_on(
        "ascend950",
        "list of keys: the model has the best first; npu_lightning_indexer lists in no order on ascend950, "
        "where the model must allow any order",
    )
    def run(self, indexer: Any, seen: Any, dtype: Any, entries: Any, offset: Any) -> Tensor:
        """Emit npu_lightning_indexer, or npu_quant_lightning_indexer for int8 keys: lists [B, S, K] in `dtype`.

        `entries` is the length of the model's list: if it is symbolic, lists are cut to the number of keys, which may
        be less than K. `offset`, if any, is added to each entry that is not -1.
        """
        places = indexer.select(seen)
        if seen.segment is not None:
            places = torch.where(places < 0, places, places + seen.segment_starts().reshape(-1, 1, 1))
        if not isinstance(entries, int):
            places = places[..., : indexer.key.shape[1]]
        places = places.squeeze(2).to(dtype)
        return torch.where(places < 0, places, places + offset) if offset else places
