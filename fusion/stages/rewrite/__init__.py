"""Stage rewrite: insert the calls of the chosen plans into the user's graph, in place.

Nodes that no rewrite replaces stay the same objects.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import leaves, map_only
from fusion.graph import Graph, Value
from fusion.graph.aliasing import is_written, memory_of, reserves, sort
from fusion.graph.launches import is_contiguous_copy
from fusion.graph.origin import inherit
from fusion.planning.fake_execution import Fakes
from fusion.planning.plan_json import frozen
from fusion.planning.symbolic_sizes import SizeNodes
from fusion.records import Candidate, Input, Output, Rewritten, Step
from fusion.stages.rewrite.layout import Layouts, same_strides
from fusion.stages.rewrite.results import Results

_OPENED = torch.ops.aten.unsqueeze.default
_SCATTER = torch.ops.aten.select_scatter.default


def rewrite(graph: Graph, chosen: Sequence[Candidate], fakes: Fakes) -> tuple[list[Rewritten], list[fx.Node]]:
    """Apply the candidates `chosen` to the FX graph of `graph` in place, and erase dead nodes.

    Returns:
        The rewrites with the nodes that each added, and the copies that restore the strides and memory of results.
    """
    editor = _Editor(graph, fakes, chosen)
    done = [editor.apply(candidate) for candidate in sorted(chosen, key=editor.position)]
    return done, editor.finish()


@dataclass(frozen=True)
class _Place:
    """The insertion point of one candidate: its nodes go before `anchor`; `added` lists those inserted so far."""

    candidate: Candidate
    anchor: fx.Node
    added: list[fx.Node] = field(default_factory=list[fx.Node])


class _Editor:
    """Editor of one graph: inserts the calls of candidates, and moves users over to them."""

    _at: _Place

    def __init__(self, graph: Graph, fakes: Fakes, chosen: Sequence[Candidate]) -> None:
        self._graph, self._fakes = graph, fakes
        self._source = graph.source
        self._now: dict[Value, fx.Node] = {}
        self._made: dict[Any, fx.Node] = {}
        self._sizes = SizeNodes(graph.source)
        self._order = dict(graph.order)
        self._unordered = False
        self._layouts = Layouts(graph.source, fakes, self._sizes)
        self._results = Results(graph.source, graph.facts.strides)
        self._dying = {node for candidate in chosen for node in candidate.dying}

    def position(self, candidate: Candidate) -> int:
        """Return the position in the graph at which the nodes of `candidate` are inserted."""
        return self._order[self._anchor(candidate)]

    def _anchor(self, candidate: Candidate) -> fx.Node:
        """Return the first result of `candidate` if all that it reads comes before it, else the last result."""
        roots = sorted(candidate.match.firsts, key=self._order.__getitem__)
        return roots[0] if len(roots) == 1 or self._is_ready(candidate, roots[0]) else roots[-1]

    def _is_ready(self, candidate: Candidate, root: fx.Node) -> bool:
        """Return True if all nodes that `candidate` reads come before its result `root`."""
        values = candidate.plan.tensors(candidate.match).values()
        return all(self._order[node] < self._order[root] for value in values for node in self._graph.reads(value))

    def apply(self, candidate: Candidate) -> Rewritten:
        """Insert the calls of `candidate`, and let the users of its roots read the new results."""
        match = candidate.match
        self._at = _Place(candidate, self._anchor(candidate))
        with self._source.inserting_before(self._at.anchor):
            inputs = {name: self._read(each) for name, each in candidate.plan.tensors(match).items()}
            results = self._replay(candidate.plan.steps, candidate.plan.results, inputs)
        for node, makers in zip(results, match.roots, strict=True):
            inherit(node, makers[0] if makers else match.node)
        for value, makers, new in zip(match.results, match.roots, results, strict=True):
            for old in makers:
                self._layouts.hand_over(old, new, self._dying)
            if not makers:
                self._layouts.planned(new, self._fakes.of(value))
            self._now[value] = new
        self._unordered |= len(match.roots) > 1 or not self._is_ready(candidate, self._at.anchor)
        for node in self._at.added:
            node.meta["fusion"] = {"rule": match.rule.name, "lowering": candidate.lowering, "form": match.form}
        return Rewritten(candidate, tuple(self._at.added))

    def _read(self, value: Value) -> fx.Node:
        """Return the node that computes `value` now; if none does, insert calls that build it.

        Of several nodes with the value the first is taken, so that equal calls are made once. Of constants it is the
        one that a dying node read: two caches of zeros have equal values, but are two tensors.
        """
        if value in self._now:
            return self._now[value]
        places = self._graph.places.get(value, ())
        if places:
            read = (node for node in places if not self._at.candidate.dying.isdisjoint(node.users))
            return places[0] if value.args else next(read, places[0])
        args = [self._read(arg) for arg in self._graph.recipe(value).args]
        built = self._fakes.recipe(value, [arg.meta["val"] for arg in args])
        (self._now[value],) = self._replay(built.steps, [built.result], dict(zip(built.inputs, args, strict=True)))
        self._layouts.planned(self._now[value], self._fakes.of(value))
        return self._now[value]

    def _replay(
        self, steps: Sequence[Step], results: Sequence[Input | Output], inputs: Mapping[str, fx.Node]
    ) -> list[fx.Node]:
        """Insert the calls `steps` of a plan with the nodes `inputs`; return the nodes of `results`."""
        nodes: list[fx.Node] = []

        def node_of(reference: Any) -> Any:
            if isinstance(reference, torch.SymInt):
                return self._sizes.node(reference)
            if isinstance(reference, Input):
                return inputs[reference.name]
            node = nodes[reference.step]
            if reference.item is None:
                return node
            return self._call(
                operator.getitem, (node, reference.item), {}, steps[reference.step].result[reference.item]
            )

        for step in steps:
            args, kwargs = map_only((Input, Output, torch.SymInt), node_of, (step.args, step.kwargs))
            nodes.append(self._call(step.target, args, kwargs, step.result))
        return [node_of(each) for each in results]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
        """Insert one call with the fake result `val`, or return a node that computes the same.

        Calls that allocate uninitialised memory are always inserted.
        """
        key = (target, frozen(args), frozen(kwargs))
        known = _undone(target, args, kwargs) or (None if reserves(target) else self._made.get(key))
        if known is not None:
            self._layouts.planned(known, val)
            return known
        moved = any(each in self._layouts for each in leaves(args, kwargs) if isinstance(each, fx.Node))
        args, now = self._layouts.run(target, args, kwargs) if moved else (args, val)
        node = self._source.call_function(target, args, kwargs)
        node.meta["val"] = self._fakes.like(now)
        if moved:
            self._layouts.planned(node, val)
        inherit(node, self._at.candidate.match.node)
        self._order[node] = self._order[self._at.anchor]
        self._made[key] = node
        self._at.added.append(node)
        return node

    def finish(self) -> list[fx.Node]:
        """Erase nodes that rewrites left without users, sort the graph where needed, and restore its results.

        Returns:
            The copies that restore the strides and memory of results.
        """
        dead = set(self._dying)
        for node in sorted(self._order, key=self._order.__getitem__, reverse=True):
            if node in dead and not node.users:
                dead.update(each for each in node.all_input_nodes if each not in dead and is_pure(each))
                self._source.erase_node(node)
        for node in self._source.find_nodes(op="call_function", target=_SCATTER):
            self._elide_scatter(node)
        if self._unordered:
            sort(self._source)
        return self._results.restore(self._layouts)

    def _elide_scatter(self, scatter: fx.Node) -> None:
        """Replace a `select_scatter` over the only entry of a dim by an `unsqueeze` of what it writes.

        Only for results of the pass, which no caller has: memory of a caller may change later. The strides must be
        equal.
        """
        written: Any = scatter.args[1]
        dim: Any = scatter.args[2]
        memory = memory_of(written)
        if "fusion" not in memory.meta or is_written(memory) or is_written(scatter):
            return
        opened, _ = self._fakes.run(_OPENED, (written.meta["val"], dim), {})
        if scatter.meta["val"].shape[dim:][:1] != (1,) or not same_strides(opened, scatter.meta["val"]):
            return
        with self._source.inserting_before(scatter):
            view = self._source.call_function(_OPENED, (written, dim))
        view.meta["val"] = self._fakes.like(opened)
        inherit(view, scatter)
        self._layouts.replace(scatter, view)
        self._source.erase_node(scatter)


def is_pure(node: fx.Node) -> bool:
    """Return True if `node` is a call without side effects."""
    return node.op == "call_function" and not node.is_impure()


def _undone(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node | None:
    """Return the source of a transpose of a transpose of the same dims, or of a contiguous copy of a contiguous tensor.

    None for any other call.
    """
    transpose = torch.ops.aten.transpose.int
    source = args[0] if args else None
    if is_contiguous_copy(target, kwargs) and isinstance(source, fx.Node):
        return source if source.meta["val"].is_contiguous() else None
    if target is not transpose or not isinstance(source, fx.Node) or source.target is not transpose:
        return None
    val = source.meta["val"]
    axes = [{axis % val.dim() for axis in each} for each in (args[1:], source.args[1:])]
    return source.args[0] if axes[0] == axes[1] and isinstance(source.args[0], fx.Node) else None
