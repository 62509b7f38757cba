"""Composite operators: one without a translation of its own means what torch makes of it.

    aten.type_as(x, y)   →   aten._to_copy(x, dtype=y.dtype)

`torch.export` keeps them; AOT autograd has taken them apart before.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch.fx as fx

from fusion._torch.fakes import fake_mode_of, without_guards
from fusion._torch.functional import functional_graph
from fusion._torch.operators import OpOverload, is_composite
from fusion.graph.aliasing import is_write
from fusion.routes.one_call import alone, signature

log = logging.getLogger("fusion")


class Composites:
    """The parts of the composite calls of one graph; equal calls are traced once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, fx.Graph | None] = {}

    def parts(self, node: fx.Node) -> fx.Graph | None:
        """Return a functional graph, with a placeholder for each input of `node`, that computes what `node` does.

        None for an operator that is not composite, writes, or whose parts hold constants, or depend on data or on a
        symbolic size.
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
