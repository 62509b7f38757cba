"""Stage 8, prepare: what a rewrite computes from Parameters or constants alone leaves the graph, to be an input."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion.cost import is_view
from fusion.facts import Facts
from fusion.mutation import is_returned, is_written
from fusion.records import Prepared
from fusion.weights import derived

ALIGNMENT = 64  # bytes: where kernels like a tensor to begin, also one that lies inside a joined tensor


def prepare(source: fx.Graph, facts: Facts, prepack: str) -> tuple[Prepared, ...]:
    """Cut out of a rewritten graph, in place, what its new nodes compute from Parameters or constants alone.

    Each value that the rest of the graph needs becomes a placeholder behind the others. Views of Parameters stay: they
    cost nothing. With `prepack` "replace", a concatenation of Parameters along dim 0 is to take their place.
    """
    placeholders = source.find_nodes(op="placeholder")
    if not facts.prepares or not placeholders:
        return ()
    found = derived(source, facts.parameters, constants=True)
    wanted = _frontier(source, found)
    left = {each for node in wanted for each in _closure(node)}
    placed: dict[tuple[str, tuple[str, ...]], tuple[fx.Node, Prepared]] = {}
    modules: dict[str, fx.GraphModule] = {}
    for node, recipe in [(node, _extract(node, prepack == "replace", modules)) for node in wanted]:
        same = (recipe.key, recipe.sources)
        if same not in placed:
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


def _frontier(source: fx.Graph, found: Collection[fx.Node]) -> list[fx.Node]:
    """The new results of real work on Parameters that are read, directly or through views, by the rest of the graph."""
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
    """Whether a node is a tensor with memory of its own."""
    if node.target is operator.getitem:
        return not is_view(node.all_input_nodes[0].target)
    return isinstance(node.meta["val"], torch.Tensor) and not is_view(node.target)


def _closure(node: fx.Node) -> list[fx.Node]:
    """The node and everything that it is computed from, arguments first."""
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


def _extract(node: fx.Node, may_join: bool, modules: dict[str, fx.GraphModule]) -> Prepared:
    """How to compute `node` from Parameters, without the name of the input that will hold it.

    What computes the same is one of `modules`, which grow: equal layers need one.
    """
    closure = _closure(node)
    parameters = [each for each in closure if each.op == "placeholder"]
    names = {each: f"%{number}" for number, each in enumerate(parameters)}
    made: dict[str, fx.Node] = {}  # by what each call is
    for each in closure:
        if each not in names:
            call = repr((each.target, *map_arg((each.args, each.kwargs), names.__getitem__)))
            first = made.setdefault(call, each)
            names[each] = names.get(first, f"%{len(parameters) + len(made)}")
    joined = may_join and _is_join(node)
    key = "\n".join([*made, names[node], *(_layout(each.meta["val"]) for each in (*parameters, node)), str(joined)])
    if key not in modules:
        modules[key] = _module(parameters, list(made.values()), names, names[node])
    held = 0 if joined else _bytes(node.meta["val"])
    return Prepared("", tuple(each.name for each in parameters), modules[key], key, joined, held)


def _module(
    parameters: Sequence[fx.Node], calls: Sequence[fx.Node], names: Mapping[fx.Node, str], result: str
) -> fx.GraphModule:
    """Calls in their order as a module of the Parameters; nodes with one name are one value."""
    graph = fx.Graph()
    copies = {names[each]: graph.placeholder(f"p{number}") for number, each in enumerate(parameters)}
    for each in calls:
        target: Any = each.target
        args, kwargs = map_arg((each.args, each.kwargs), lambda read: copies[names[read]])
        copies[names[each]] = graph.call_function(target, args, kwargs)
    graph.output(copies[result])
    return fx.GraphModule({}, graph)


def _is_join(node: fx.Node) -> bool:
    """Whether a node concatenates Parameters along dim 0, so that each of them can become a view of the result."""
    if node.target is not torch.ops.aten.cat.default:
        return False
    pieces, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    parts: list[Any] = list(pieces) if isinstance(pieces, (list, tuple)) else []
    parameters = [_whole_parameter(each) for each in parts]
    if dim not in (0, -node.meta["val"].dim()) or None in parameters or len(set(parameters)) < len(parameters):
        return False
    return all(_fits(each.meta["val"], node.meta["val"]) for each in parts)


def _whole_parameter(part: fx.Node) -> fx.Node | None:
    """The Parameter that a contiguous operand is, perhaps by way of views that end where they began."""
    origin = part
    while origin.op == "call_function" and is_view(origin.target) and len(origin.all_input_nodes) == 1:
        origin = origin.all_input_nodes[0]
    same = origin.op == "placeholder" and origin.meta["val"].shape == part.meta["val"].shape
    return origin if same and origin.meta["val"].is_contiguous() else None


def _fits(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.dtype == whole.dtype and part.is_contiguous() and _bytes(part) % ALIGNMENT == 0


def _layout(val: torch.Tensor) -> str:
    return f"{val.dtype} {tuple(val.shape)} {tuple(val.stride())} {val.device}"


def _bytes(val: torch.Tensor) -> int:
    return math.prod(val.shape) * val.element_size()
