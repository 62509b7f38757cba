"""Bodies: the graphs that calls such as `cond` and `while_loop` run, held as attributes of the module of their graph.

%true_graph_0 = get_attr[true_graph_0]
%cond = cond(%pred, %true_graph_0, %false_graph_0, (%x,))      two bodies, of which each call runs one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from fusion._torch.operators import higher_order
from fusion._torch.tensors import held_by

ENTERED = frozenset({"cond", "hints_wrapper", "invoke_subgraph", "map_impl", "scan", "strict_mode", "while_loop"})
"""Operators whose bodies are ordinary graphs. What others run means something else: code for each element of a kernel,
or something that is looked up by the body itself."""


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
        """Whether it may be rewritten: its values have shapes, and whatever gives the same results may stand there."""
        if self.code is None or higher_order(self.call.target) not in ENTERED:
            return False
        return all("val" in node.meta for node in self.code.graph.nodes if node.op in ("placeholder", "call_function"))


def bodies(source: fx.Graph) -> Iterator[Body]:
    """Each graph that a call of `source` runs, as often as it is called."""
    for node in source.nodes:
        if node.op != "call_function" or not higher_order(node.target):
            continue
        for held in node.all_input_nodes:
            if held.op == "get_attr" and not isinstance(held.meta.get("val"), torch.Tensor):
                code = held_by(held)
                if code is None or isinstance(code, fx.GraphModule):
                    yield Body(node, str(held.target), code)


def with_bodies(gm: fx.GraphModule, rewritten: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    """Put what `rewritten` gives of each body, however deep, in its place; the modules that came are not changed."""
    made = {each.name: rewritten(each.code) for each in bodies(gm.graph) if each.code is not None}
    for name, code in made.items():
        gm.add_submodule(name, code)
