"""Bodies: the graphs that calls such as `cond` and `while_loop` run, attributes of the module of the calling graph.

%true_graph_0 = get_attr[true_graph_0]
%cond = cond(%pred, %true_graph_0, %false_graph_0, (%x,))      two bodies, of which each call runs one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from fusion._torch.operators import higher_order
from fusion._torch.tensors import attribute_of

ENTERED = frozenset({"cond", "hints_wrapper", "invoke_subgraph", "map_impl", "scan", "strict_mode", "while_loop"})
"""Operators whose bodies are ordinary graphs. Bodies of others describe one element of a kernel, or are a key by
which the operator looks something up."""


@dataclass(frozen=True)
class Body:
    """A graph that a call runs.

    Attributes:
        call: the call.
        name: the attribute that holds the graph, in the module of the graph of the call.
        code: the graph; None where its module is not known.
    """

    call: fx.Node
    name: str
    code: fx.GraphModule | None

    @property
    def is_entered(self) -> bool:
        """Return True if the body may be rewritten: its values have shapes, and its operator accepts any equivalent
        graph.
        """
        if self.code is None or higher_order(self.call.target) not in ENTERED:
            return False
        return all("val" in node.meta for node in self.code.graph.nodes if node.op in ("placeholder", "call_function"))


def bodies(source: fx.Graph) -> Iterator[Body]:
    """Yield a `Body` for each graph that each call of `source` runs."""
    for node in source.nodes:
        if node.op != "call_function" or not higher_order(node.target):
            continue
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and not isinstance(operand.meta.get("val"), torch.Tensor):
                code = attribute_of(operand)
                if code is None or isinstance(code, fx.GraphModule):
                    yield Body(node, str(operand.target), code)


def with_bodies(gm: fx.GraphModule, rewritten: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    """Replace each body that a call of `gm` runs by `rewritten`(body); the old modules are not changed.

    Bodies inside of bodies are left to `rewritten`.
    """
    made = {each.name: rewritten(each.code) for each in bodies(gm.graph) if each.code is not None}
    for name, code in made.items():
        gm.add_submodule(name, code)
