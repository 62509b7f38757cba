"""Sizes that a write makes equal without torch asking for it: rows are as many as the places that they go to.

cache[slots] = rows        rows [T, ..] and slots [U], both of sizes that are marked dynamic: T = U, or an error
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_WRITES = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


def agree_on_sizes(graph: fx.Graph) -> None:
    """Let the sizes of a functional graph of aten say so, with a guard that no call fails which does not raise anyway.

    Torch broadcasts rows as they are written: only a size that is more than 1 must be that of the places.
    """
    for target in _WRITES:
        for node in graph.find_nodes(op="call_function", target=target):
            cache, indices, rows = node.args[:3]
            if isinstance(rows, fx.Node) and _is_symbolic(rows, *filter(None, indices)):
                _agree(rows.meta["val"].shape, _places(cache, indices))


def _is_symbolic(*nodes: fx.Node) -> bool:
    return any(isinstance(size, torch.SymInt) for node in nodes for size in node.meta["val"].shape)


def _places(cache: fx.Node, indices: Any) -> torch.Size:
    """The shape of what is written to."""
    x = cache.meta["val"]
    with x.fake_mode:
        return torch.ops.aten.index.Tensor(x, [each and each.meta["val"] for each in indices]).shape


def _agree(rows: torch.Size, places: torch.Size) -> None:
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    for size, place in zip(reversed(rows), reversed(places), strict=False):
        if statically_known_true(size > 1):
            guard_or_false(size == place)
