"""Guards for equal sizes that a call requires, but that torch does not guard: each size is marked dynamic on its own.

cache[slots] = rows        rows [T, ..] and slots [U]: T = U, or an error
sdpa(q, k, v, mask)        keys [.., T, D], values [.., U, E] and a mask [.., V]: T = U = V, or an error, or reads
                           beyond the end of a tensor
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_WRITES = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


def agree_on_sizes(graph: fx.Graph) -> None:
    """Guard that the symbolic sizes in writes and attention of a functional aten `graph` agree.

    Rows to write and masks may broadcast: a size is unified only where it is known to be more than 1. No valid call
    fails such a guard.
    """
    for target in _WRITES:
        for node in graph.find_nodes(op="call_function", target=target):
            cache, indices, rows = node.args[:3]
            if isinstance(rows, fx.Node) and _is_symbolic(rows, *filter(None, indices)):
                _agree(rows.meta["val"].shape, _places(cache, indices))
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given = [*node.args[:4], *([node.kwargs["attn_mask"]] if "attn_mask" in node.kwargs else [])]
        if _is_symbolic(*filter(None, given)):
            _agree_attended(*(each.meta["val"].shape for each in given if each is not None))


def _is_symbolic(*nodes: fx.Node) -> bool:
    return any(isinstance(size, torch.SymInt) for node in nodes for size in node.meta["val"].shape)


def _places(cache: fx.Node, indices: Any) -> torch.Size:
    """Return the shape of `cache`[`indices`], by one index tensor, or None for all positions, per leading dim."""
    x = cache.meta["val"]
    with x.fake_mode:
        return torch.ops.aten.index.Tensor(x, [each and each.meta["val"] for each in indices]).shape


def _agree_attended(q: torch.Size, k: torch.Size, v: torch.Size, mask: torch.Size = torch.Size()) -> None:
    _agree(k[:-1], v[:-1])
    _agree(k[:-3], q[:-3])
    _agree(mask, torch.Size((*q[:-1], k[-2])))


def _agree(rows: torch.Size, places: torch.Size) -> None:
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    for size, place in zip(reversed(rows), reversed(places), strict=False):
        if statically_known_true(size > 1):
            guard_or_false(size == place)
