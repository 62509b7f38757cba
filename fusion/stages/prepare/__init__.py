"""Stage 8, prepare: make what a rewrite computes from Parameters or constants alone an input of the graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion.facts import Facts
from fusion.graph.aliasing import is_returned, is_written
from fusion.graph.launches import is_view
from fusion.graph.parameter_only import derived
from fusion.records import Prepared
from fusion.stages.prepare.layout import BY_OPTION, TAKEN, parts, why_copied
from fusion.stages.prepare.stored import read_as_stored

__all__ = ["prepare", "read_as_stored"]


def prepare(source: fx.Graph, facts: Facts, prepack: str) -> tuple[Prepared, ...]:
    """Cut out of a rewritten graph, in place, what its new nodes compute from Parameters or constants alone.

    Each value that the rest of the graph needs becomes a placeholder behind the others. Views of Parameters stay: they
    cost nothing. With `prepack` "share", Parameters become views of what joins them, so that nothing is held twice.
    """
    placeholders = source.find_nodes(op="placeholder")
    if not facts.prepares or not placeholders:
        return ()
    found = derived(source, facts.parameters, constants=True)
    wanted = _frontier(source, found)
    left = {each for node in wanted for each in _closure(node)}
    placed: dict[tuple[str, tuple[str, ...]], tuple[fx.Node, Prepared]] = {}
    taken: set[str] = set()  # Parameters that become views
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
    """Describe how to compute each node: all of them before the first of them is replaced."""
    modules: dict[str, fx.GraphModule] = {}
    return [(node, _extract(node, prepack, modules)) for node in wanted]


def _frontier(source: fx.Graph, found: Collection[fx.Node]) -> list[fx.Node]:
    """Return the new results of real work on Parameters that the rest of the graph reads, directly or through views."""
    read = {each for node in source.nodes if node not in found for each in node.all_input_nodes if each in found}
    wanted: list[fx.Node] = []
    for node in reversed(source.nodes):
        if node not in read:
            continue
        if "fusion" in node.meta and _is_work(node) and not (is_written(node) or is_returned(node)):
            wanted.insert(0, node)
        else:
            read.update(each for each in node.all_input_nodes if each in found)
    return wanted


def _is_work(node: fx.Node) -> bool:
    """True if `node` is a tensor with memory of its own."""
    if node.target is operator.getitem:
        return not is_view(node.all_input_nodes[0].target)
    return isinstance(node.meta["val"], torch.Tensor) and not is_view(node.target)


def _closure(node: fx.Node) -> list[fx.Node]:
    """Return `node` and all nodes that it is computed from, arguments first."""
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
    """Describe how to compute `node` from Parameters, without the name of the input that will hold the result.

    Equal computations share one of `modules`, which grow: equal layers need one. Parameters that become views are
    named in the order of their memory.
    """
    closure = _closure(node)
    given = [each for each in closure if each.op == "placeholder"]
    found = parts(node)
    copied = why_copied(node, closure, found) if prepack == "share" or not given else BY_OPTION
    parameters = given if copied or found is None else found
    names = {each: f"%{number}" for number, each in enumerate(parameters)}
    made: dict[str, fx.Node] = {}  # by what each call is
    for each in closure:
        if each not in names:
            call = repr((each.target, *map_arg((each.args, each.kwargs), names.__getitem__)))
            first = made.setdefault(call, each)
            names[each] = names.get(first, f"%{len(parameters) + len(made)}")
    key = "\n".join([*made, names[node], *(_layout(each.meta["val"]) for each in (*parameters, node)), copied])
    if key not in modules:
        modules[key] = _module(parameters, list(made.values()), names, names[node])
    return Prepared("", tuple(each.name for each in parameters), modules[key], key, _bytes(node.meta["val"]), copied)


def _module(
    parameters: Sequence[fx.Node], calls: Sequence[fx.Node], names: Mapping[fx.Node, str], result: str
) -> fx.GraphModule:
    """Build a module of the Parameters from `calls` in their order; nodes with one name are one value."""
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


def _bytes(val: torch.Tensor) -> int:
    return math.prod(val.shape) * val.element_size()
