"""Results: how what a model returns lies in memory when the model runs without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap, zip_longest
from typing import Any

import torch
import torch.fx as fx

from fusion._torch import results_before
from fusion.graph import dims_of
from fusion.mutation import outputs


def returned(gm: fx.GraphModule) -> list[Any]:
    """What a graph of Dynamo returns: fake tensors as the model gives them when it runs without a compiler."""
    return [node.meta.get("example_value") for node in outputs(gm.graph)]


def strides_of(results: Sequence[Any], source: fx.Graph) -> tuple[tuple[Any, ...] | None, ...]:
    """For each result of the captured graph, the strides that it has in `results`; it may return more around them."""
    told = [*[None] * results_before(), *results]
    return tuple(starmap(_strides, zip_longest(outputs(source), told[: len(outputs(source))])))


def _strides(node: fx.Node, eager: Any) -> tuple[Any, ...] | None:
    captured = node.meta.get("val")
    if not isinstance(captured, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return None
    same = dims_of(captured.shape) == dims_of(eager.shape) and captured.dtype == eager.dtype
    return dims_of(eager.stride()) if same else None
