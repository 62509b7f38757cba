"""Linter of masks that are computed several times from the same inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch.fx as fx

from fusion._torch.nested import leaves, map_only
from fusion._torch.operators import is_random, short_name
from fusion.graph.aliasing import is_write, is_written
from fusion.graph.launches import is_call, is_data
from fusion.records import Refusal
from fusion.report.lint.finding import Finding, at
from fusion.report.lint.kernels import calls_before, is_of_model, readers_of

_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "triu", "tril"})
"""Operators of which masks are made."""


def rebuilt_masks(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Find masks that several places of the model compute from the same inputs."""
    copies = {node: nodes for nodes in _equal_masks(source) for node in nodes}
    counted: set[fx.Node] = set()
    for nodes in {id(each): each for each in copies.values()}.values():
        first, *others = nodes
        readers = [each for node in nodes for each in readers_of(node)]
        needed = calls_before(first)
        if all(each in copies for each in readers) or not any(map(_is_comparison, needed)):
            continue
        redundant = {each for node in others for each in calls_before(node) if each in copies} - needed - counted
        counted |= redundant
        saves = sum(map(is_call, redundant))
        if not saves:
            continue
        yield at(
            first,
            "rebuilt_masks",
            f"{short_name(first.target)}: the mask is computed {len(nodes)} times from the same inputs",
            "compute it once before the layers, and pass it to each",
            saves,
        )


def _is_comparison(node: fx.Node) -> bool:
    return short_name(node.target) in _COMPARISONS


def _equal_masks(source: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the calls of the model that compute equal tensors from no data but masks, positions and lengths."""
    keys: dict[fx.Node, Hashable] = {}
    equal: dict[Hashable, list[fx.Node]] = defaultdict(list)
    for node in source.nodes:
        if node.op in ("placeholder", "get_attr"):
            if not is_data(node.meta.get("val")) and not is_written(node):
                keys[node] = node
        elif _is_computed(node) and all(each in keys for each in node.all_input_nodes):
            key = node.target, _frozen(node.args, keys), _frozen(node.kwargs, keys)
            equal[key].append(node)
            keys[node] = equal[key][0]
    return (nodes for nodes in equal.values() if len(nodes) > 1)


def _is_computed(node: fx.Node) -> bool:
    is_plain = node.op == "call_function" and not is_write(node) and not is_random(node.target)
    return is_plain and is_of_model(node)


def _frozen(arguments: Any, keys: dict[fx.Node, Hashable]) -> Hashable:
    """Return `arguments` as something hashable, with the first equal node in place of each node."""
    return repr(map_only(fx.Node, keys.__getitem__, arguments)), tuple(
        keys[each] for each in leaves(arguments) if isinstance(each, fx.Node)
    )
