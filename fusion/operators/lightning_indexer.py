"""Selection of keys for sparse attention: those with the largest Σₙ weights[n] · relu(query[n] · key[t]).

Neither a scale nor a softmax is part of it; a positive factor common to all weights changes no selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion._torch import count, hint, known_true
from fusion.operators import sparse_limits
from fusion.operators.calling import Given
from fusion.operators.contract import A2_A3, Limit, Operator
from fusion.operators.dtypes import FLOAT32, HALVES, compute_dtype
from fusion.operators.flops import causal
from fusion.operators.pages import pages_of
from fusion.operators.visibility import rows_of

_FEW = 8
"""Rows per sequence up to which each row brings its own copy of its pages, instead of meeting everybody's."""


@dataclass(frozen=True)
class _Groups:
    """Rows that meet the same keys: query [G, R, N, D], weights [G, R, N], keys [G, T, D].

    A row sees the columns `first` … `first + seen - 1`, [G, R] each, which are tokens 0 … seen - 1 of its sequence.
    """

    query: Tensor
    weights: Tensor
    keys: Tensor
    first: Tensor
    seen: Tensor


def _lightning_indexer(given: Given) -> tuple[Tensor, Tensor]:
    query, count = given["query"], given["sparse_count"]
    groups = _groups(given)
    scores, column = _scores(groups), torch.arange(groups.keys.shape[1], device=query.device)
    place = column - groups.first[..., None]
    hidden = (place < 0) | (place >= groups.seen[..., None])
    kept: Any = torch.sym_min(count, groups.keys.shape[1])
    values, best = scores.masked_fill(hidden, -math.inf).topk(kept, dim=-1)
    some = torch.arange(kept, device=query.device) < groups.seen[..., None]
    tokens = torch.where(some, best - groups.first[..., None], -1).to(torch.int32)
    shape = _shape(query, count)
    indices = pad(tokens, (0, count - kept), value=-1).reshape(shape)
    if not given["return_value"]:
        return indices, query.new_empty([0])
    return indices, pad(values, (0, count - kept), value=-math.inf).reshape(shape).to(query.dtype)


def _groups(given: Given) -> _Groups:
    query, key, weights, table = (given[name] for name in ("query", "key", "weights", "block_table"))
    rows = rows_of(given, "key")
    if given["layout_query"] == "BSND":
        keys = pages_of(key, table) if table is not None else key.select(-2, 0)
        return _Groups(query, weights, keys, rows.first, rows.seen)
    if table is None:
        return _Groups(query[None], weights[None], key.select(-2, 0)[None], rows.first[None], rows.seen[None])
    batch = table.shape[0]
    if known_true(query.shape[0] <= _FEW * batch) and not known_true(batch == 1):
        keys = pages_of(key, table[rows.sequence])  # one group for each row [T], with the keys of its sequence
        return _Groups(query[:, None], weights[:, None], keys, rows.first[:, None], rows.seen[:, None])
    pages = pages_of(key, table)
    first = rows.sequence * pages.shape[1]
    return _Groups(query[None], weights[None], pages.flatten(0, 1)[None], first[None], rows.seen[None])


def _scores(groups: _Groups) -> Tensor:
    """Σₙ weights[n] · relu(query[n] · key[t]), [G, R, T], in float32 at least."""
    wide = compute_dtype(groups.query)
    heads = groups.query.flatten(1, 2).to(wide) @ groups.keys.to(wide).transpose(1, 2)
    each = heads.relu().unflatten(1, tuple(groups.weights.shape[1:]))
    return (groups.weights.to(wide).unsqueeze(-2) @ each).squeeze(-2)


def _shape(query: Tensor, sparse_count: int) -> tuple[int, ...]:
    return (*query.shape[:-2], 1, sparse_count)


def _outputs(query: Tensor, sparse_count: int, return_value: bool) -> tuple[Tensor, Tensor]:
    shape = _shape(query, sparse_count)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape if return_value else [0])


def _flops(given: Given) -> float:
    """Every key of every query; half of them where it is causal and there are as many queries."""
    query, key, table = given["query"], given["key"], given["block_table"]
    room = key.shape[0 if given["layout_key"] == "TND" else 1] * (1 if table is None else table.shape[1])
    rows = query.shape[0 if given["layout_query"] == "TND" else 1]
    keys = causal(rows, room) if given["sparse_mode"] == 3 else float(hint(room))
    return 2.0 * count(query) * keys


_KERNEL = (
    *sparse_limits.kernel("key"),
    "D == 128",
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
    flops=_flops,
    source="op-plugin: torch_npu.npu_lightning_indexer; kernel: ops-transformer lightning_indexer (A2/A3: float32)",
    summary=(
        "the sparse_count keys t with the largest Σₙ weights[n] · relu(query[n] · key[t]), in float32, as positions in "
        "their sequence, best first, then -1; rows see all keys, or (sparse_mode 3) the causal ones; rows past their "
        "sequence see none; with return_value the scores, then -inf"
    ),
)
