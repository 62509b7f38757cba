"""Writes into caches: cache[index] = rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.contract import Operator

_STORED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool})
_INDEX = frozenset({torch.int32, torch.int64})
_SAME = ("dtype(updates) == dtype(input)",)


def _scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return input.index_put(indices.long().unbind(-1), updates)


def _scatter_nd_update_meta(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return torch.empty_like(input)


SCATTER_ND_UPDATE = Operator(
    schema="npu::npu_scatter_nd_update(Tensor input, Tensor indices, Tensor updates) -> Tensor",
    fallback=_scatter_nd_update,
    meta=_scatter_nd_update_meta,
    dims={"input": "*D", "indices": "*I K", "updates": "*U"},
    dtypes={"input": _STORED, "indices": _INDEX, "updates": _STORED},
    limits={
        "host": ("K <= rank(input)",),
        "ascend910b": _SAME,
        "ascend910_93": _SAME,
        "ascend950": _SAME,
    },
    lowerings=frozenset({"eager", "torchair", "npugraph_ex"}),
    source="op-plugin: torch_npu.npu_scatter_nd_update_; CANN: aclnnScatterNd; GE: ScatterNdUpdate, in place",
    summary="out = input with out[indices[i, 0], …, indices[i, K-1]] = updates[i]; equal indices in no fixed order",
)
