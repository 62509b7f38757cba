"""Runs in a child process behind the stubs: caches written by a model compiled for npugraph_ex, and its final graph."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the operators)
from torch import Tensor, fx

from fusion.routes import vendor

SHAPES = {"cache": (2, 2, 16, 8), "rows": (2, 2, 3, 8), "keys": (5, 4, 2, 8), "key": (3, 2, 8)}


def step(
    cache: Tensor, keys: Tensor, values: Tensor, rows: Tensor, key: Tensor, value: Tensor, start: Tensor, slots: Tensor
) -> tuple[Tensor, ...]:
    """One cache written from a position on, and pages of keys and values by slots."""
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)
    keys.view(-1, 2, 8)[slots] = key
    values.view(-1, 2, 8)[slots] = value
    return cache.sum(-1), keys.sum(-1), values.sum(-1)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("cache", "keys", "keys", "rows", "key", "key")
    tensors = [torch.randn(*SHAPES[name], generator=generator).half() for name in names]
    return [*tensors, torch.tensor(5), torch.tensor([7, -1, 0])]


def main() -> None:
    """Print, as one line of JSON, the operators that npugraph_ex runs, and whether caches are eager's, in place."""
    final: list[fx.GraphModule] = []
    inner = vendor.npugraph_ex

    def forced(gm: fx.GraphModule, values: Any, **_: Any) -> Any:
        final.append(gm)
        return inner(gm, values, options={"force_eager": True})

    vendor.npugraph_ex = forced
    options = {"target": "ascend910_93", "lower": "npugraph_ex", "plan_lower": "npugraph_ex"}
    compiled = torch.compile(step, backend="cann_fusion", options=options, dynamic=False)
    plain, ours = inputs(), inputs()
    places = [each.data_ptr() for each in ours[:3]]
    with torch.no_grad():
        expected, got = step(*plain), compiled(*ours)
    report = {
        "operators": [str(node.target) for gm in final for node in gm.graph.nodes if node.op == "call_function"],
        "results": all(map(torch.equal, got, expected)),
        "caches": all(map(torch.equal, ours[:3], plain[:3])),
        "in_place": [each.data_ptr() for each in ours[:3]] == places,
    }
    print(json.dumps(report))
