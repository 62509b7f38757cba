"""Selection of keys for sparse attention: the top-k of Σₙ weights[n] · relu(query[n] · key[t]).

There is no scale and no softmax; a positive factor common to all weights does not change the selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion._torch.tensors import count, hint, known_true
from fusion.operators.attention.visibility import rows_of
from fusion.operators.cache.pages import pages_of
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, HALVES, compute_dtype
from fusion.operators.flops import causal
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator
from fusion.operators.sparse import sparse_limits

_FEW = 8
"""Average number of packed rows per sequence up to which each row gathers its own pages; with more, all rows are
multiplied by the pages of all sequences, and masked."""


@dataclass(frozen=True)
class Groups:
    """Rows in groups that share keys: query [G, R, N, D], weights [G, R, N], keys [G, T, D] and tensors like them.

    A row sees the columns `first` to `first + seen - 1` of T, [G, R] each, which are tokens 0 to seen - 1 of its
    sequence; `first` None means 0.
    """

    query: Tensor
    weights: Tensor
    keys: tuple[Tensor, ...]
    first: Tensor | None
    seen: Tensor

    @property
    def products(self) -> Tensor:
        """Products relu(query · key) [G, R, N, T], in float32 or wider, in which int8 of 128 lanes are exact."""
        wide = torch.float32 if self.query.dtype == torch.int8 else compute_dtype(self.query)
        heads = self.query.flatten(1, 2).to(wide) @ self.keys[0].to(wide).transpose(1, 2)
        return heads.relu().unflatten(1, tuple(self.weights.shape[1:]))


def _lightning_indexer(given: Given) -> tuple[Tensor, Tensor]:
    query, count = given["query"], given["sparse_count"]
    groups = groups_of(given, given["weights"], given["key"])
    indices, values = chosen(given, groups, _scores(groups))
    if not given["return_value"]:
        return indices, query.new_empty([0])
    return indices, pad(values, (0, count - values.shape[-1]), value=-math.inf).reshape(indices.shape).to(query.dtype)


def chosen(given: Given, groups: Groups, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Select for each row the visible tokens with the largest `scores` [G, R, T], in descending order.

    Returns:
        Their positions in the sequence, then -1, in the shape of the operator's list; and their scores [G, R, K], then
        -inf.
    """
    count, column = given["sparse_count"], torch.arange(scores.shape[-1], device=scores.device)
    seen, first = groups.seen[..., None], None if groups.first is None else groups.first[..., None]
    masked = column >= seen if first is None else (column < first) | (column - first >= seen)
    most: Any = torch.sym_min(count, scores.shape[-1])
    values, best = scores.masked_fill(masked, -math.inf).topk(most, dim=-1)
    used = torch.arange(most, device=scores.device) < seen
    tokens = torch.where(used, best if first is None else best - first, -1).to(torch.int32)
    return pad(tokens, (0, count - most), value=-1).reshape(list_shape(given["query"], count)), values


def groups_of(given: Given, weights: Tensor, *keys: Tensor) -> Groups:
    """Group the rows of the query of a call by the keys that they share.

    Args:
        given: the arguments of the call.
        weights: weights of the heads [.., N].
        keys: the keys, and further tensors with an entry for each key such as scales: [.., 1, D] in the layout of the
            keys.
    """
    query, table, rows = given["query"], given["block_table"], rows_of(given, "key")
    if given["layout_query"] == "BSND":
        batched = tuple(pages_of(each, table) if table is not None else each.select(-2, 0) for each in keys)
        return Groups(query, weights, batched, rows.first, rows.seen)
    if table is None:
        packed = tuple(each.select(-2, 0)[None] for each in keys)
        assert rows.first is not None
        return Groups(query[None], weights[None], packed, rows.first[None], rows.seen[None])
    batch = table.shape[0]
    if known_true(query.shape[0] <= _FEW * batch) and not known_true(batch == 1):
        own = tuple(pages_of(each, table[rows.sequence]) for each in keys)
        return Groups(query[:, None], weights[:, None], own, None, rows.seen[:, None])
    pages = [pages_of(each, table) for each in keys]
    first = rows.sequence * pages[0].shape[1]
    return Groups(query[None], weights[None], tuple(e.flatten(0, 1)[None] for e in pages), first[None], rows.seen[None])


def _scores(groups: Groups) -> Tensor:
    """Compute the scores Σₙ weights[n] · relu(query[n] · key[t]) [G, R, T], in float32 or wider."""
    each = groups.products
    return (groups.weights.to(each.dtype).unsqueeze(-2) @ each).squeeze(-2)


def list_shape(query: Tensor, sparse_count: int) -> tuple[int, ...]:
    """Return the shape of the lists, [B, S, 1, sparse_count] or [T, 1, sparse_count], of `query` [B, S, N, D] or
    [T, N, D]."""
    return (*query.shape[:-2], 1, sparse_count)


def _outputs(query: Tensor, sparse_count: int, return_value: bool) -> tuple[Tensor, Tensor]:
    shape = list_shape(query, sparse_count)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape if return_value else [0])


def indexer_flops(given: Given) -> float:
    """Estimate the operations of each query over the room for keys, or over what a causal mask (`sparse_mode` 3) leaves
    of it."""
    query, key, table = given["query"], given["key"], given["block_table"]
    room = key.shape[0 if given["layout_key"] == "TND" else 1] * (1 if table is None else table.shape[1])
    rows = query.shape[0 if given["layout_query"] == "TND" else 1]
    keys = causal(rows, room) if given["sparse_mode"] == 3 else float(hint(room))
    return 2.0 * count(query) * keys


_KERNEL = (
    *sparse_limits.kernel("key"),
    Limit("D == 128", because="D is the width of a head of the indexer"),
    Limit("sparse_count <= 2048 or sparse_count in (3072, 4096, 5120, 6144, 7168, 8192)"),
)
_A2 = (
    *_KERNEL,
    "N <= 64",
    "dtype(weights) in (dtype(query), 'float32')",
    *sparse_limits.in_graphs("return_value == False", "graphs return values on ascend950 only"),
)

LIGHTNING_INDEXER = Operator(
    schema=(
        "npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
        "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
        'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) "
        "-> (Tensor, Tensor)"
    ),
    compute=_lightning_indexer,
    without_effect=frozenset({"pre_tokens", "next_tokens"}),
    outputs=_outputs,
    dims={
        "query": sparse_limits.by_layout("B S N D", "T N D"),
        "weights": sparse_limits.by_layout("B S N", "T N"),
        **sparse_limits.dims("key", {"key": "D"}),
    },
    dtypes={"query": HALVES, "key": HALVES, "weights": HALVES | FLOAT32, **sparse_limits.dtypes("key")},
    limits={
        "host": (*sparse_limits.host("key"), "sparse_count > 0"),
        **dict.fromkeys(A2_A3, _A2),
        "ascend950": (*_KERNEL, "N in (8, 16, 24, 32, 64)", "dtype(weights) == dtype(query)"),
    },
    flops=indexer_flops,
    older="custom::npu_lightning_indexer",
    source="op-plugin: torch_npu.npu_lightning_indexer; kernel: ops-transformer lightning_indexer (A2/A3: float32)",
    summary=(
        "the sparse_count keys t with the largest Σₙ weights[n] · relu(query[n] · key[t]), in float32, as positions in "
        "their sequence, best first, then -1; rows see all keys, or (sparse_mode 3) the causal ones; rows past their "
        "sequence see none; with return_value the scores, then -inf"
    ),
)
