"""Replacement of calls in a graph by the nodes of their decompositions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx

from fusion.graph.origin import PROVENANCE
from fusion.graph.subgraphs import with_bodies
from fusion.routes.expand import Table, expand
from fusion.routes.single_calls import alone, signature

aten = torch.ops.aten


def inline(gm: fx.GraphModule, table: Table) -> fx.GraphModule:
    """Return a copy of `gm`, bodies included, with each call of an operator in `table` replaced by its decomposition.

    Composite operators stay composite, for a compiler that decomposes them itself; only the replaced calls are traced.
    Views become reshapes, because a decomposition's result may have other strides than the operator's.

    Raises:
        FusionError: an input of a replaced call has no `meta["val"]`.
    """
    inlined = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    inlined.meta.update(gm.meta)
    calls = [node for node in inlined.graph.nodes if node.op == "call_function" and node.target in table]
    replace_calls(inlined, calls, partial(expand, table=table))
    for view in inlined.graph.find_nodes(op="call_function", target=aten.view.default) if calls else []:
        view.target = aten.reshape.default
    with_bodies(inlined, lambda body: inline(body, table))
    inlined.graph.lint()
    inlined.recompile()
    return inlined


def replace_calls(
    gm: fx.GraphModule, calls: Iterable[fx.Node], expansion: Callable[[fx.GraphModule], fx.GraphModule]
) -> None:
    """Replace in place each of `calls`, nodes of `gm`, by the `expansion` of a graph with that call alone.

    Calls with equal arguments, shapes and strides are expanded once. The new nodes have the provenance of the call.
    """
    known: dict[Hashable, fx.GraphModule] = {}
    for node in calls:
        call = signature(node)
        if call not in known:
            known[call] = expansion(alone(node))
        _replace(gm, node, known[call])


def _replace(gm: fx.GraphModule, node: fx.Node, parts: fx.GraphModule) -> None:
    """Replace `node` by the nodes of `parts`, and each of its results by the matching output of `parts`.

    Dead nodes of `parts` are left out; the others get the provenance of `node`.
    """
    inherited = {name: node.meta[name] for name in (*PROVENANCE, "fusion") if name in node.meta}
    placed = dict(zip(parts.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with gm.graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "get_attr":
                name = f"{node.name}_{part.target}"
                setattr(gm, name, getattr(parts, part.target))
                placed[part] = gm.graph.create_node("get_attr", name)
                placed[part].meta.update(part.meta)
            elif part.op == "call_function":
                placed[part] = gm.graph.node_copy(part, placed.__getitem__)
                placed[part].meta.update(inherited)
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
    """Replace each `getitem` of `node` by the result with that index."""
    for item in list(node.users):
        index: Any = item.args[1]
        item.replace_all_uses_with(results[index])
        node.graph.erase_node(item)
