"""What is computed in a wide dtype and read only where its numbers have been rounded to a narrower one.

out[i] = x; ...; round(out)   =   out[i] = widen(round(x)); ...; round(out)

What lies between moves elements, joins pieces or chooses among them: rounding commutes with it.
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
"""Those to which numbers are rounded, None among them where something reads them as they are."""

_CAST = {"_to_copy", "to", "convert_element_type"}
_MOVING = {
    "clone", "contiguous", "copy", "cat", "stack", "where", "masked_fill", "index_put", "select_scatter",
    "slice_scatter", "index", "index_select", "gather",
}  # fmt: skip
"""Calls whose results consist of elements of their arguments."""
_SHAPED = {f"new_{name}" for name in ("zeros", "ones", "full", "empty")} | {
    f"{name}_like" for name in ("zeros", "ones", "full", "empty")
}
"""Calls that ask for a shape and a dtype alone."""


@dataclass(frozen=True)
class RoundedLater:
    """What becomes of the values of one graph."""

    graph: Graph
    _known: dict[fx.Node, Dtypes] = field(default_factory=dict[fx.Node, Dtypes], repr=False)

    def dtype(self, x: Value) -> torch.dtype | None:
        """The narrower dtype to which all that reads `x` rounds it first; None where something does not."""
        found = frozenset[torch.dtype | None]().union(*(self._read(node) for node in self.graph.places.get(x, ())))
        return next(iter(found)) if len(found) == 1 else None

    def _read(self, node: fx.Node) -> Dtypes:
        """How the users of a node read it, through what only moves its elements."""
        if node not in self._known:
            self._known[node] = frozenset[torch.dtype | None]().union(*(self._by(user, node) for user in node.users))
        return self._known[node]

    def _by(self, user: fx.Node, node: fx.Node) -> Dtypes:
        name, have, given = short_name(user.target), _dtype(user), _dtype(node)
        over = name == "copy" and user.args[1] is not node  # whatever was there before
        if over or name in _SHAPED or isinstance(user.meta.get("val"), torch.SymInt):
            return frozenset()
        if name in _CAST and have is not given:
            return frozenset({have if have is not None and widens(have, given) else None})
        adds_up = name == "index_put" and any(each is True for each in (*user.args[3:], *user.kwargs.values()))
        moves = name in _MOVING | _CAST or is_view(user.target)
        return self._read(user) if moves and have is given and not adds_up else frozenset({None})


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a result; of several, that which all have."""
    val = node.meta.get("val")
    dtypes = {
        each.dtype for each in (val if isinstance(val, list | tuple) else (val,)) if isinstance(each, torch.Tensor)
    }
    return dtypes.pop() if len(dtypes) == 1 else None
