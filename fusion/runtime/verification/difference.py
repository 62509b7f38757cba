"""The calls in which two graphs differ, cut out with their inputs.

plain   a → b → c → d            b and d are equal calls in both graphs; c and C differ: b is the input of the part,
fused   a → b → C → d            and the operand of d the result
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from fusion._torch.memory import copied
from fusion._torch.nested import leaves, map_only
from fusion._torch.tensors import attribute_of
from fusion.graph.aliasing import is_write
from fusion.planning.plan_json import frozen
from fusion.runtime.verification.judge import Judge
from fusion.runtime.verification.runs import Call

Twins = Mapping[fx.Node, fx.Node]
"""Nodes of a fused graph, with the node of the plain graph that computes the same."""


@dataclass(frozen=True)
class Difference:
    """The calls in which two graphs differ.

    Attributes:
        plain, fused: graphs of these calls alone, with the same inputs and the same results.
        call: the inputs.
        names: names of the results in the plain graph.
    """

    plain: fx.GraphModule
    fused: fx.GraphModule
    call: Call
    names: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        """Return True if these calls alone show that the fused graph is wrong."""
        judge = Judge(self.plain, self.call, self.call.run(self.plain), self.names, is_compiled=False)
        return judge.judged(self.fused) is not None


def difference(plain: fx.GraphModule, fused: fx.GraphModule, call: Call) -> Difference | None:
    """Cut out of `plain` and `fused` the calls in which they differ, with their inputs in a `call` of both.

    None where no call differs, as where the difference is inside a body.
    """
    twins = _twins(plain.graph, fused.graph)
    both = set(twins.values())
    results = _results(plain.graph, fused.graph, twins)
    writes = _further_writes(plain.graph, fused.graph), _further_writes(fused.graph, plain.graph)
    roots = [one for one, _ in results] + writes[0], [other for _, other in results] + writes[1]
    inside = _inside(roots[0], both), _inside(roots[1], twins)
    read = {each for node in inside[0] for each in node.all_input_nodes if each in both}
    read |= {twins[each] for node in inside[1] for each in node.all_input_nodes if each in twins}
    read |= {one for one, _ in results if one in both} | {twins[other] for _, other in results if other in twins}
    inputs = [node for node in plain.graph.nodes if node in read and node.op != "get_attr"]
    if not any(inside) or not inputs:
        return None
    parts = (
        _part(plain, inputs, {}, inside[0], [one for one, _ in results]),
        _part(fused, inputs, twins, inside[1], [other for _, other in results]),
    )
    watching = _Watching(plain, {each.name for each in inputs})
    call.run(watching.run)
    own = Call.copying([each.graph for each in parts], [watching.results[each.name] for each in inputs])
    written = (inputs[place].name for place in own.written)
    return Difference(*parts, own, (*(one.name for one, _ in results), *written))


def _twins(plain: fx.Graph, fused: fx.Graph) -> Twins:
    """Map nodes of the fused graph to those of the plain one that make the same call on the same inputs.

    Names identify inputs only: new nodes are numbered.
    """
    calls = {_call(node, {}): node for node in reversed(plain.nodes)}
    twins: dict[fx.Node, fx.Node] = {}
    for node in fused.nodes:
        twin = calls.get(_call(node, twins)) if all(each in twins for each in node.all_input_nodes) else None
        if twin is not None:
            twins[node] = twin
    return twins


def _call(node: fx.Node, twins: Mapping[fx.Node, fx.Node]) -> Hashable:
    """Return a key of the computation of a node, in terms of its operands or of their `twins`."""
    args, kwargs = map_only(fx.Node, lambda each: twins.get(each, each), (node.args, dict(node.kwargs)))
    named = node.name if node.op in ("placeholder", "output") or is_write(node) else ""
    return node.op, node.target, named, id(attribute_of(node)) if node.op == "get_attr" else 0, frozen((args, kwargs))


def _results(plain: fx.Graph, fused: fx.Graph, twins: Twins) -> list[tuple[fx.Node, fx.Node]]:
    """Walk both graphs back from their results and writes through equal calls; return the first pairs of calls that
    differ.

    The walk ends at twins, which have equal results.
    """
    writes = {node.name: node for node in plain.nodes if is_write(node)}
    waiting = [(plain.output_node(), fused.output_node())]
    waiting += [(writes[node.name], node) for node in fused.nodes if is_write(node) and node.name in writes]
    pairs: dict[tuple[fx.Node, fx.Node], bool] = {}
    while waiting:
        one, other = waiting.pop()
        if twins.get(other) is one or (one, other) in pairs:
            continue
        same = _is_same_call(one, other)
        pairs[one, other] = not same
        if same:
            waiting.extend(zip(_read(one), _read(other), strict=True))
    return [pair for pair, differs in pairs.items() if differs]


def _is_same_call(one: fx.Node, other: fx.Node) -> bool:
    """Return True if `one` and `other` call one operator with equal arguments, but for the nodes among these.

    Operands with several results must be calls of the same operator.
    """
    given = [map_only(fx.Node, lambda _: None, (node.args, dict(node.kwargs))) for node in (one, other)]
    if (
        (one.op, one.target) != (other.op, other.target)
        or given[0] != given[1]
        or one.op in ("placeholder", "get_attr")
    ):
        return False
    pairs = zip(_read(one), _read(other), strict=True)
    return all(isinstance(x.meta.get("val"), Tensor) or x.target == y.target for x, y in pairs)


def _read(node: fx.Node) -> list[fx.Node]:
    """List the operands of a call, each as often as it is read."""
    return [each for each in leaves(node.args, node.kwargs) if isinstance(each, fx.Node)]


def _further_writes(graph: fx.Graph, other: fx.Graph) -> list[fx.Node]:
    """List the writes of `graph` that `other` does not have."""
    names = {node.name for node in other.nodes}
    return [node for node in graph.nodes if is_write(node) and node.name not in names]


def _inside(roots: Iterable[fx.Node], known: Collection[fx.Node]) -> set[fx.Node]:
    """Collect the nodes that `roots` are computed from, down to nodes that are `known`; constants are included."""
    reached: set[fx.Node] = set()
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node not in reached and (node not in known or node.op == "get_attr"):
            reached.add(node)
            waiting.extend(node.all_input_nodes)
    return reached


def _part(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    twins: Twins,
    inside: Collection[fx.Node],
    results: Sequence[fx.Node],
) -> fx.GraphModule:
    """Copy the nodes `inside` of `gm` into a new graph, with placeholders for `inputs`, and the outputs `results`.

    `inputs` and `results` are nodes of the plain graph: a node of `gm` is matched to them by its twin, if it has one.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        return copies[twins.get(node, node)]

    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in inside:
            copies[twins.get(node, node)] = graph.node_copy(node, copy)
    graph.output(tuple(map(copy, results)))
    return fx.GraphModule(gm, graph)


class _Watching(fx.Interpreter):
    """Interpreter that copies the results of the named nodes."""

    def __init__(self, gm: fx.GraphModule, names: Collection[str]) -> None:
        super().__init__(gm)
        self._names = names
        self.results: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self._names:
            self.results[n.name] = copied(result) if isinstance(result, Tensor) else result
        return result
