"""The same places by others: Inductor's `register_replacement` and `torch.fx.subgraph_rewriter`.

What our pass rewrites in a graph is cut out of it, and each kind of place becomes one pattern of theirs, with its
literals. So their patterns are as specific as any, and what they put there is one call per result, less than ours.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._inductor.pattern_matcher import PatternMatcherPass, register_replacement
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.subgraph_rewriter import replace_pattern_with_filters

from fusion._torch.tracing import preserve_composites


@dataclass(frozen=True)
class Place:
    """One kind of place: its nodes as a graph of their own, and what stands there instead."""

    pattern: fx.GraphModule
    replacement: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]


def kinds(source: fx.Graph, gone: Sequence[Collection[str]]) -> list[Place]:
    """Return the kinds of places among sets of nodes, named as in `source`, that rewrites make needless."""
    found: dict[str, Place] = {}
    for names in gone:
        place = _cut_out(source, frozenset(names))
        if place is not None:
            found.setdefault(place.pattern.code, place)
    return list(found.values())


def _cut_out(source: fx.Graph, names: frozenset[str]) -> Place | None:
    nodes = [node for node in source.nodes if node.name in names]
    given = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each.name not in names)
    results = [node for node in nodes if any(user.name not in names for user in node.users)]
    tensors = all(isinstance(each.meta.get("val"), torch.Tensor) for each in (*given, *results))
    if not results or not given or not tensors:
        return None
    pattern, replacement = fx.Graph(), fx.Graph()
    copies = {each: pattern.placeholder(f"x{number}") for number, each in enumerate(given)}
    inputs = [replacement.placeholder(f"x{number}") for number in range(len(given))]
    for number, node in enumerate(nodes):
        copies[node] = pattern.node_copy(node, copies.__getitem__)
        copies[node].name = f"n{number}"
    made = [_new(replacement, inputs[0], each.meta["val"]) for each in results]
    pattern.output(copies[results[0]] if len(results) == 1 else [copies[each] for each in results])
    replacement.output(made[0] if len(made) == 1 else made)
    values = tuple(each.meta["val"] for each in given)
    return Place(fx.GraphModule({}, pattern), fx.GraphModule({}, replacement), values)


def _new(graph: fx.Graph, like: fx.Node, val: torch.Tensor) -> fx.Node:
    """One call with a result that looks like `val`."""
    return graph.call_function(
        torch.ops.aten.new_empty_strided.default,
        (like, list(val.shape), list(val.stride())),
        {"dtype": val.dtype, "device": val.device},
    )


def by_register_replacement(gm: fx.GraphModule, places: Sequence[Place]) -> tuple[float, int]:
    """Seconds that Inductor's matcher takes on a copy of `gm`, and how many places it replaces."""
    patterns = PatternMatcherPass(pass_name="incumbent")
    with preserve_composites(), torch.no_grad():
        for each in places:
            inputs = [torch.zeros(1).to(x.dtype).as_strided(x.shape, [0] * x.dim()).contiguous() for x in each.inputs]
            search, replace = _as_function(each.pattern), _as_function(each.replacement)
            register_replacement(search, replace, inputs, _traced, patterns, skip_duplicates=True)
        return _timed(gm, lambda owned: patterns.apply(owned))


def by_subgraph_rewriter(gm: fx.GraphModule, places: Sequence[Place]) -> tuple[float, int]:
    """Time the rewriter of `torch.fx`, pattern after pattern."""

    def run(owned: fx.GraphModule) -> int:
        return sum(len(replace_pattern_with_filters(owned, each.pattern, each.replacement)) for each in places)

    return _timed(gm, run)


def _traced(run: Callable[..., Any], inputs: Sequence[Any], **_: Any) -> fx.GraphModule:
    """Trace the aten graph of a function, with the operators that our graphs keep."""
    gm = make_fx(run, tracing_mode="real")(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _as_function(gm: fx.GraphModule) -> Callable[..., Any]:
    """Make a plain function with the named parameters that `register_replacement` reads."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    scope: dict[str, Any] = {"run": gm}
    exec(f"def pattern({', '.join(names)}):\n    return run({', '.join(names)})", scope)
    return scope["pattern"]


def _timed(gm: fx.GraphModule, run: Callable[[fx.GraphModule], int]) -> tuple[float, int]:
    owned = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    start = time.process_time()
    count = run(owned)
    return time.process_time() - start, count
