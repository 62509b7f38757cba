"""Composite operators: one without a translator is decomposed by torch, and its parts are translated.

    aten.type_as(x, y)   →   aten._to_copy(x, dtype=y.dtype)

Graphs of `torch.export` contain them; AOT autograd has decomposed them already.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch.fx as fx

from fusion._torch.fakes import fake_mode_of, without_guards
from fusion._torch.functional import functional_graph
from fusion._torch.operators import OpOverload, is_composite
from fusion.graph.aliasing import is_write
from fusion.routes.single_calls import alone, signature

log = logging.getLogger("fusion")


class Composites:
    """Decompositions of the composite calls of one graph; equal calls are traced once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, fx.Graph | None] = {}

    def parts(self, node: fx.Node) -> fx.Graph | None:
        """Return a functional graph that computes what `node` does, with a placeholder for each input of `node`.

        None for an operator that is not composite or writes, or whose decomposition has constants or depends on data or
        on a symbolic size.
        """
        if not isinstance(node.target, OpOverload) or not is_composite(node.target) or is_write(node):
            return None
        call = signature(node)
        if call not in self._known:
            self._known[call] = _traced(node)
        return self._known[call]


def _traced(node: fx.Node) -> fx.Graph | None:
    gm = alone(node)
    try:
        with without_guards(fake_mode_of(gm)):
            parts = functional_graph(gm, {}).graph
    except Exception as error:  # whatever torch raises, the call stays opaque
        log.debug("%s has no parts: %r", node.target, error)
        return None
    return None if any(each.op == "get_attr" for each in parts.nodes) else parts
