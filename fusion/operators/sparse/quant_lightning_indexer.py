"""Selection of int8 keys: the top-k of Σₙ round(weights[n] · s_q[n]) · round(relu(q[n] · k[t]) / 1024) · s_k[t].

Products of weights and scales, and scores of single heads, are rounded to the dtype of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT16, INT8, compute_dtype
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator
from fusion.operators.sparse import sparse_limits
from fusion.operators.sparse.lightning_indexer import chosen, groups_of, indexer_flops, list_shape

_STEP = 1024.0
"""Divisor of products of int8, so that float16 can represent them."""


def _quant_lightning_indexer(given: Given) -> Tensor:
    stored = given["weights"].dtype
    wide = compute_dtype(given["weights"])
    weights = (given["weights"].to(wide) * given["query_dequant_scale"].to(wide)).to(stored).to(wide)
    groups = groups_of(given, weights, given["key"], given["key_dequant_scale"].unsqueeze(-1))
    heads = (groups.products.to(wide) / _STEP).to(stored).to(wide)
    scores = (groups.weights.unsqueeze(-2) @ heads).squeeze(-2) * groups.keys[1].to(wide).transpose(1, 2)
    return chosen(given, groups, scores)[0]


def _outputs(query: Tensor, sparse_count: int) -> Tensor:
    return query.new_empty(list_shape(query, sparse_count), dtype=torch.int32)


_KERNEL = (
    *sparse_limits.pages("key"),
    Limit("D == 128", because="D is the width of a head of the indexer"),
    "N <= 64",
    "sparse_count <= 2048",
)

QUANT_LIGHTNING_INDEXER = Operator(
    schema=(
        "npu::npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
        "Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode, *, "
        "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
        'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, '
        "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int? query_dtype=None, "
        "int? key_dtype=None) -> Tensor"
    ),
    compute=_quant_lightning_indexer,
    uncomputed={"query_dtype key_dtype": "floats of 8 bits are not decomposed"},
    without_effect=frozenset({"pre_tokens", "next_tokens", "query_quant_mode", "key_quant_mode"}),
    outputs=_outputs,
    dims={
        "query": sparse_limits.by_layout("B S N D", "T N D"),
        "weights query_dequant_scale": sparse_limits.by_layout("B S N", "T N"),
        **sparse_limits.dims("key", {"key": "D", "key_dequant_scale": ""}),
    },
    dtypes={
        "query key": INT8,
        "weights query_dequant_scale key_dequant_scale": FLOAT16,
        **sparse_limits.dtypes("key"),
    },
    limits={
        "host": (
            *sparse_limits.host("key"),
            "sparse_count > 0",
            Limit("query_quant_mode == 0 and key_quant_mode == 0", because="there is a scale of each token and head"),
        ),
        **dict.fromkeys(A2_A3, _KERNEL),
    },
    flops=indexer_flops,
    older="custom::npu_lightning_indexer_quant",
    source=(
        "op-plugin: torch_npu.npu_quant_lightning_indexer; on ascend950 queries and keys are float8, of which this "
        "contract says nothing"
    ),
    summary=(
        "npu_lightning_indexer with scores Σₙ round(weights[n] · s_q[n]) · round(relu(q[n] · k[t]) / 1024) · s_k[t], "
        "rounded to the dtype of the weights, sums in float32; a list may differ from that of exact scores where two "
        "are closer than the rounding"
    ),
)
