"""Stage prepare: compute outside of the graph what new nodes compute from Parameters or constants alone, and the copies
of Parameters in another layout that the model makes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.tensors import byte_count
from fusion.facts import Facts
from fusion.graph.aliasing import is_returned, is_written
from fusion.graph.launches import is_view
from fusion.graph.parameter_only import derived
from fusion.records import Prepared
from fusion.stages.prepare.adjacent_parameters import BY_OPTION, TAKEN, parts, why_copied
from fusion.stages.prepare.stored_order import read_as_stored

__all__ = ["prepare", "read_as_stored"]


def prepare(source: fx.Graph, facts: Facts, prepack: str) -> tuple[Prepared, ...]:
    """Replace new nodes that depend on Parameters or constants alone by placeholders; describe how to compute each.

    A placeholder stands for each such value that the rest of `source` reads, behind all other placeholders. Views of
    Parameters stay in the graph, as they cost nothing. With `prepack` "share", Parameters become views of prepared
    tensors that join them, so that no memory is used twice.
    """
    placeholders = source.find_nodes(op="placeholder")
    if not facts.prepares or not placeholders:
        return ()
    fixed = derived(source, facts.parameters, constants=True)
    wanted = _frontier(source, fixed)
    left = {each for node in wanted for each in closure_of(node)}
    placed: dict[tuple[str, tuple[str, ...]], tuple[fx.Node, Prepared]] = {}
    taken: set[str] = set()  # names of Parameters that become views
    for node, recipe in _recipes(wanted, prepack):
        same = (recipe.key, recipe.sources)
        if same not in placed:
            if recipe.joined and not taken.isdisjoint(recipe.sources):
                recipe = replace(recipe, copied=TAKEN, key=f"{recipe.key}{TAKEN}")
            taken.update(recipe.sources if recipe.joined else ())
            with source.inserting_after(placeholders[-1]):
                place = source.placeholder(f"prepared_{len(placed)}")
            placeholders.append(place)
            place.meta["val"] = node.meta["val"]
            placed[same] = place, replace(recipe, name=place.name)
        node.replace_all_uses_with(placed[same][0])
    for node in reversed(source.nodes):
        if node in left and node.op == "call_function" and not node.users:
            source.erase_node(node)
    return tuple(prepared for _, prepared in placed.values())


def _recipes(wanted: Sequence[fx.Node], prepack: str) -> list[tuple[fx.Node, Prepared]]:
    """Describe how to compute each node of `wanted`, before any of them is replaced."""
    modules: dict[str, fx.GraphModule] = {}
    return [(node, _extract(node, prepack, modules)) for node in wanted]


def _frontier(source: fx.Graph, fixed: Collection[fx.Node]) -> list[fx.Node]:
    """Return the new nodes, and the copies, among `fixed` that other nodes read, directly or through views.

    `fixed` are the nodes that depend on Parameters and constants alone.
    """
    read = {each for node in source.nodes if node not in fixed for each in node.all_input_nodes if each in fixed}
    wanted: list[fx.Node] = []
    for node in reversed(source.nodes):
        if node not in read:
            continue
        is_wanted = _is_copy(node) or ("fusion" in node.meta and _is_work(node))
        if is_wanted and not (is_written(node) or is_returned(node)):
            wanted.insert(0, node)
        else:
            read.update(each for each in node.all_input_nodes if each in fixed)
    return wanted


def _is_copy(node: fx.Node) -> bool:
    """Return True if `node` copies into another layout, as `weight.transpose(0, 1).contiguous()` does at every call.

    What else the model computes from Parameters stays: its result may be larger than they are.
    """
    return node.target is torch.ops.aten.clone.default


def _is_work(node: fx.Node) -> bool:
    """Return True if `node` is a tensor in new memory, rather than a view."""
    if node.target is operator.getitem:
        return not is_view(node.all_input_nodes[0].target)
    return isinstance(node.meta["val"], torch.Tensor) and not is_view(node.target)


def closure_of(node: fx.Node) -> list[fx.Node]:
    """Return `node` and all nodes that it is computed from, operands first."""
    done: dict[fx.Node, None] = {}
    waiting = [(node, False)]
    while waiting:
        each, ready = waiting.pop()
        if ready:
            done[each] = None
        elif each not in done:
            waiting.append((each, True))
            waiting.extend((argument, False) for argument in reversed(each.all_input_nodes))
    return list(done)


def _extract(node: fx.Node, prepack: str, modules: dict[str, fx.GraphModule]) -> Prepared:
    """Describe how to compute `node` from Parameters; the name of the input that will have the result is left empty.

    Equal computations share one of `modules`, which is extended: equal layers need one. Parameters that become views
    are named in the order of their memory.
    """
    closure = closure_of(node)
    given = [each for each in closure if each.op == "placeholder"]
    joined_parameters = parts(node)
    copied = why_copied(node, closure, joined_parameters) if prepack == "share" or not given else BY_OPTION
    parameters = given if copied or joined_parameters is None else joined_parameters
    names = {each: f"%{number}" for number, each in enumerate(parameters)}
    made: dict[str, fx.Node] = {}  # by the text of each call
    for each in closure:
        if each not in names:
            call = repr((each.target, *map_arg((each.args, each.kwargs), names.__getitem__)))
            first = made.setdefault(call, each)
            names[each] = names.get(first, f"%{len(parameters) + len(made)}")
    key = "\n".join([*made, names[node], *(_layout(each.meta["val"]) for each in (*parameters, node)), copied])
    if key not in modules:
        modules[key] = _module(parameters, list(made.values()), names, names[node])
    return Prepared(
        "", tuple(each.name for each in parameters), modules[key], key, byte_count(node.meta["val"]), copied
    )


def _module(
    parameters: Sequence[fx.Node], calls: Sequence[fx.Node], names: Mapping[fx.Node, str], result: str
) -> fx.GraphModule:
    """Build a module that computes `result` from Parameters by `calls`, in order; equal nodes have one of `names`."""
    graph = fx.Graph()
    copies = {names[each]: graph.placeholder(f"p{number}") for number, each in enumerate(parameters)}
    for each in calls:
        target: Any = each.target
        args, kwargs = map_arg((each.args, each.kwargs), lambda read: copies[names[read]])
        copies[names[each]] = graph.call_function(target, args, kwargs)
    graph.output(copies[result])
    return fx.GraphModule({}, graph)


def _layout(val: torch.Tensor) -> str:
    return f"{val.dtype} {tuple(val.shape)} {tuple(val.stride())} {val.device}"
