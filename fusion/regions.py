"""Regions: what `torch.compiler.nested_compile_region` keeps apart is put back where it is called, to be fused with it.

y = invoke_subgraph(body, name, x)   →   the nodes of body, with x for its input
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from fusion._torch import higher_order


def inline_regions(gm: fx.GraphModule) -> None:
    """Put the nodes of every region, also of those inside regions, in the place of its calls: in a graph of Dynamo.

    Nodes keep their stack traces and modules: those of the call that Dynamo has traced.
    """
    calls = [node for node in gm.graph.nodes if higher_order(node.target) == "invoke_subgraph"]
    for call in calls:
        _inline(gm, call)
    if calls:
        gm.graph.lint()
        gm.recompile()


def _inline(gm: fx.GraphModule, call: fx.Node) -> None:
    held, _, *operands = call.args
    assert isinstance(held, fx.Node)
    body = gm.get_submodule(str(held.target))
    assert isinstance(body, fx.GraphModule)
    inline_regions(body)
    results = _copied(gm, call, body, operands)
    for item in list(call.users):
        index: Any = item.args[1]
        item.replace_all_uses_with(results[index])
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)
    if not held.users:
        gm.graph.erase_node(held)


def _copied(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, operands: Sequence[Any]) -> Sequence[Any]:
    """Copies of the nodes of a region before its call, and its results."""
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                copies[node] = _shared(gm, f"{call.args[1]}_{node.target}", getattr(body, str(node.target)))
            elif node.op not in ("placeholder", "output"):
                copies[node] = gm.graph.node_copy(node, copies.__getitem__)
    results: Any = fx.map_arg(body.graph.output_node().args[0], copies.__getitem__)
    return results


def _shared(gm: fx.GraphModule, name: str, value: Any) -> fx.Node:
    """What a region holds, held by the graph that calls it."""
    if not hasattr(gm, name):
        setattr(gm, name, value)
    return gm.graph.get_attr(name)
