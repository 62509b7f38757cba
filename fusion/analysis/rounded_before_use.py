"""Values in a wide dtype whose elements are rounded to one narrower dtype before anything computes with them.

out[i] = x; ...; round(out)   =   out[i] = widen(round(x)); ...; round(out)

The calls in between only move or select elements, so that rounding commutes with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx as fx

from fusion._torch.operators import short_name
from fusion.graph import Graph, Value
from fusion.graph.algebra import widens
from fusion.graph.launches import is_view

Dtypes = frozenset[torch.dtype | None]
"""The dtypes to which users round a result; None is among them if a user computes with it unrounded."""

_CAST = {"_to_copy", "to", "convert_element_type"}
_MOVING = {
    "clone", "contiguous", "copy", "cat", "stack", "where", "masked_fill", "index_put", "select_scatter",
    "slice_scatter", "index", "index_select", "gather",
}  # fmt: skip
"""Calls whose results consist of elements of their arguments, unchanged."""
_SHAPED = {f"new_{name}" for name in ("zeros", "ones", "full", "empty")} | {
    f"{name}_like" for name in ("zeros", "ones", "full", "empty")
}
"""Calls that use the shape and the dtype of their argument alone."""


@dataclass(frozen=True)
class RoundedLater:
    """A memoised analysis of the dtypes to which the values of one graph are rounded."""

    graph: Graph
    _known: dict[fx.Node, Dtypes] = field(default_factory=dict[fx.Node, Dtypes], repr=False)

    def dtype(self, x: Value) -> torch.dtype | None:
        """Return the narrower dtype to which every user rounds `x` before computing with it; None if there is none."""
        dtypes = frozenset[torch.dtype | None]().union(*(self._read(node) for node in self.graph.places.get(x, ())))
        return next(iter(dtypes)) if len(dtypes) == 1 else None

    def _read(self, node: fx.Node) -> Dtypes:
        """Return the dtypes to which the users of `node` round its result, seen through calls that only move
        elements.
        """
        if node not in self._known:
            self._known[node] = frozenset[torch.dtype | None]().union(*(self._by(user, node) for user in node.users))
        return self._known[node]

    def _by(self, user: fx.Node, node: fx.Node) -> Dtypes:
        name, have, given = short_name(user.target), _dtype(user), _dtype(node)
        over = name == "copy" and user.args[1] is not node  # `node` is overwritten
        if over or name in _SHAPED or isinstance(user.meta.get("val"), torch.SymInt):
            return frozenset()
        if name in _CAST and have is not given:
            return frozenset({have if have is not None and widens(have, given) else None})
        adds_up = name == "index_put" and any(each is True for each in (*user.args[3:], *user.kwargs.values()))
        moves = name in _MOVING | _CAST or is_view(user.target)
        return self._read(user) if moves and have is given and not adds_up else frozenset({None})


def _dtype(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of the result of `node`, or the common one of several results; else None."""
    val = node.meta.get("val")
    dtypes = {
        each.dtype for each in (val if isinstance(val, list | tuple) else (val,)) if isinstance(each, torch.Tensor)
    }
    return dtypes.pop() if len(dtypes) == 1 else None
