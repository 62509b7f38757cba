"""inline: graph with operators of a table → graph with their decompositions in place, all other nodes as they were."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from fusion._torch.tensors import map_only
from fusion.bodies import with_bodies
from fusion.routes.expand import Table, expand
from fusion.texts import frozen

aten = torch.ops.aten


def inline(gm: fx.GraphModule, table: Table) -> fx.GraphModule:
    """A copy of `gm` with the nodes of its decomposition in place of every call of an operator in `table`.

    The same in the bodies that its calls run.
    Composite operators stay whole, for a compiler that has its own way with them; only the calls that are replaced are
    traced. Views become reshapes, because a decomposition's result may have other strides than the operator's.
    Raises `FusionError` when an input of a replaced call has no `meta["val"]`.
    """
    inlined = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    inlined.meta.update(gm.meta)
    calls = [node for node in inlined.graph.nodes if node.op == "call_function" and node.target in table]
    known: dict[Hashable, fx.GraphModule] = {}
    for node in calls:
        call = _call(node)
        if call not in known:
            known[call] = expand(_alone(gm, node), table)
        _replace(inlined, node, known[call])
    for view in inlined.graph.find_nodes(op="call_function", target=aten.view.default) if calls else []:
        view.target = aten.reshape.default
    with_bodies(inlined, lambda body: inline(body, table))
    inlined.graph.lint()
    inlined.recompile()
    return inlined


def _call(node: fx.Node) -> Hashable:
    """What a call depends on: which of its arguments are one tensor, and how each looks."""
    looks = {source: (at, frozen(source.meta.get("val"))) for at, source in enumerate(node.all_input_nodes)}
    return frozen((node.target, map_only(fx.Node, looks.__getitem__, (node.args, dict(node.kwargs)))))


def _alone(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """A graph that holds nothing but the call `node`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = {key: source.meta[key] for key in ("val",) if key in source.meta}
    graph.output(graph.node_copy(node, copies.__getitem__))
    return fx.GraphModule(gm, graph)


def _replace(gm: fx.GraphModule, node: fx.Node, parts: fx.GraphModule) -> None:
    """Put the nodes of `parts` in the place of `node`, and its outputs in the place of the results of `node`.

    What nobody reads is left out, and of where they come from the nodes tell what `node` does.
    """
    told = {name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta}
    placed = dict(zip(parts.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with gm.graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "get_attr":
                name = f"{node.name}_{part.target}"
                setattr(gm, name, getattr(parts, part.target))
                placed[part] = gm.graph.create_node("get_attr", name)
            elif part.op == "call_function":
                placed[part] = gm.graph.node_copy(part, placed.__getitem__)
                placed[part].meta.update(told)
    results: Any = fx.map_arg(parts.graph.output_node().args[0], placed.__getitem__)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        _replace_items(node, results)
    gm.graph.erase_node(node)
    for made in [placed[part] for part in reversed(parts.graph.nodes) if part.op == "call_function"]:
        if not (made.users or made.is_impure()):
            gm.graph.erase_node(made)


def _replace_items(node: fx.Node, results: Any) -> None:
    """The same for an operator with several results, each of them read by a `getitem`."""
    for item in list(node.users):
        index: Any = item.args[1]
        item.replace_all_uses_with(results[index])
        node.graph.erase_node(item)
