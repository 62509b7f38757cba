"""Memory: the writes and aliases of an FX graph, by the schemas of its operators."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

import torch.fx as fx

from fusion._torch.nested import leaves
from fusion._torch.operators import OpOverload, given, schema_of, short_name
from fusion._torch.tensors import count
from fusion._torch.tracing import rename

_RESERVING = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_UNDECLARED = {"aten::_unsafe_view", "prims::view_of"}  # views whose schema does not say so


def reserves(target: Any) -> bool:
    """Return True if `target` returns new memory without defined contents, as `empty` does."""
    return short_name(target) in _RESERVING


def is_write(node: fx.Node) -> bool:
    """Return True if `node` calls an operator that mutates an argument, by its schema."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def written_by(node: fx.Node) -> list[fx.Node]:
    """List the arguments that `node` mutates, in the order of the schema."""
    if not is_write(node):
        return []
    target: Any = node.target
    declared = schema_of(target).arguments
    arguments = given(target, node.args, node.kwargs)
    written = [
        arguments.get(each.name) for each in declared if each.alias_info is not None and each.alias_info.is_write
    ]
    return [each for each in leaves(written) if isinstance(each, fx.Node)]


def closing_writes(source: fx.Graph) -> set[fx.Node]:
    """Return the writes at the end of the graph, in which functional graphs put all of them."""
    nodes = (node for node in reversed(source.nodes) if node.op != "output")
    return set(takewhile(is_write, nodes))


def shown(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory the result of `node` has: the base of a view, the target of a write; or None."""
    call, number = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
    if not isinstance(call, fx.Node) or not isinstance(number, int):
        return None
    source = aliased(call.target, call.args, call.kwargs, number)
    return source if isinstance(source, fx.Node) else None


def aliased(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0) -> Any:
    """Return the argument of a call whose memory result `number` has, by the schema; None for memory of its own."""
    if not isinstance(target, OpOverload):
        return None
    for place, name in _may_alias(target, number):
        given = args[place] if place < len(args) else kwargs.get(name)
        if given is not None:
            return given
    return None


@cache
def _may_alias(target: OpOverload, number: int) -> list[tuple[int, str]]:
    """List the position and name of each argument whose memory result `number` of `target` may have."""
    schema = schema_of(target)
    if not schema.returns:
        return []
    every = [*enumerate(schema.arguments)]
    if schema.name in _UNDECLARED:
        return [(place, each.name) for place, each in every[:1]]
    returned = schema.returns[
        number if number < len(schema.returns) else 0
    ].alias_info  # the schema has one entry for a list
    if returned is None:
        return []
    declared = ((place, each.name, each.alias_info) for place, each in every if each.alias_info is not None)
    shared = returned.before_set
    return [(place, name) for place, name, own in declared if not shared or not shared.isdisjoint(own.before_set)]


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of `node`: the base of a view, or `node` itself."""
    source = shown(node)
    while source is not None:
        node, source = source, shown(source)
    return node


def is_written(node: fx.Node) -> bool:
    """Return True if a call of the graph mutates `node` or a view of it."""
    return any(node in written_by(user) for user in node.users) or any(map(is_written, _views(node)))


def is_returned(node: fx.Node) -> bool:
    """Return True if the graph returns `node` or a view of it."""
    return any(user.op == "output" for user in node.users) or any(map(is_returned, _views(node)))


def _views(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem or shown(user) is node]


def is_copy_unseen(copy: fx.Node, source: fx.Node) -> bool:
    """Return True if `source` may replace its `copy`: neither is mutated, and no caller gets memory of anything
    else.
    """
    memory = memory_of(source)
    if is_written(copy) or is_written(memory):
        return False
    if not is_returned(copy):
        return True
    alone = memory.op == "call_function" and not is_returned(memory)
    return alone and count(source.meta["val"]) == count(memory.meta["val"])


def outputs(source: fx.Graph) -> list[fx.Node]:
    """List the results of the graph that are nodes, in order; a node returned twice is there twice."""
    return [each for each in leaves(source.output_node().args) if isinstance(each, fx.Node)]


def name_results(source: fx.Graph, names: Sequence[str]) -> None:
    """Rename the `outputs` that calls compute to `names`, which the signature of an exported program refers to."""
    for node, name in zip(outputs(source), names, strict=True):
        if node.op == "call_function" and node.name != name:
            rename(node, name)


def sharing(source: fx.Graph) -> tuple[str, ...]:
    """Return for each of `outputs` of `source` whose memory it has: the name of an input, or `result`(n) if output n is
    the first with that memory.
    """
    first = {node: node.name for node in source.find_nodes(op="placeholder")}
    return tuple(first.setdefault(memory_of(node), result(number)) for number, node in enumerate(outputs(source)))


def result(number: int) -> str:
    """Return the name that `sharing` has for memory that result `number` is the first to return."""
    return f"result {number}"


def _is_sorted(source: fx.Graph) -> bool:
    """Return True if `source` is in topological order."""
    passed: set[fx.Node] = set()
    for node in source.nodes:
        if not passed.issuperset(node.all_input_nodes):
            return False
        passed.add(node)
    return True


def sort(source: fx.Graph) -> None:
    """Sort the nodes topologically, moving as few as needed; memory writes keep their order among themselves."""
    if _is_sorted(source):
        return
    import networkx as nx  # half a second to import: only where a model is fused

    place = {node: position for position, node in enumerate(source.nodes)}
    reads: nx.DiGraph[fx.Node] = nx.DiGraph()
    reads.add_nodes_from(place)
    reads.add_edges_from((node, user) for node in place for user in node.users)
    reads.add_edges_from(pairwise(node for node in place if is_write(node)))
    for previous, node in pairwise(nx.lexicographical_topological_sort(reads, place.__getitem__)):
        if previous.next is not node:
            previous.append(node)
