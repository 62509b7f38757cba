"""Copies that a rewrite causes or saves: its results may lie in memory otherwise than what they replace.

y = fused(x), transposed; y.view(..)      →  a copy to view            y returned  →  a copy as the caller knows it
y = fused(x), contiguous; y.contiguous()  →  one copy less
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion.graph import Graph, dims_of, lie_alike
from fusion.graph.aliasing import aliased, is_copy_unseen, is_returned, outputs, shown
from fusion.graph.launches import is_contiguous_copy, is_view
from fusion.planning.cost import call_cost
from fusion.planning.fake_execution import Fakes
from fusion.planning.target import Target
from fusion.records import Input, Match, Output, Plan

_CLONE = torch.ops.aten.clone.default


class Copies:
    """Prices the copies of one graph for one target; `cost` is what a node of the model costs there."""

    def __init__(self, graph: Graph, fakes: Fakes, target: Target, cost: Callable[[fx.Node], float]) -> None:
        self._fakes, self._target, self._cost = fakes, target, cost
        self._memory = cache(_memories)
        self._eager = dict(zip(outputs(graph.source), graph.facts.strides, strict=False))

    def of(self, match: Match, plan: Plan, dying: Collection[fx.Node]) -> list[float]:
        """For each copy its cost, negative for one that is saved; `dying` are the nodes that go."""
        results = list(zip(match.roots, plan.fakes, strict=True))
        lies = {node: fake for makers, fake in results for node in makers if not _alike(fake, node.meta["val"])}
        costs: list[float] = []
        returned: dict[fx.Node, None] = {}
        waiting = list(lies)
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user.op == "output" and dims_of(lies[node].stride()) != self._eager.get(node):
                    returned.setdefault(_lowest(node, lies))
                elif user.op == "call_function" and not (
                    user in dying or user in lies or user.target is operator.getitem
                ):
                    costs.extend(self._followed(node, user, lies, waiting))
        fresh = [
            node for makers in self._shared(match, plan) for node in makers if node not in lies and is_returned(node)
        ]
        return [*costs, *(self._copy(lies.get(node, node.meta["val"])) for node in (*returned, *fresh))]

    def _followed(
        self, node: fx.Node, user: fx.Node, lies: dict[fx.Node, torch.Tensor], waiting: list[fx.Node]
    ) -> Iterator[float]:
        """The copies at one user of what lies otherwise; where it lies otherwise too, its users are to be seen."""
        if is_contiguous_copy(user.target, user.kwargs) and lies[node].is_contiguous() and is_copy_unseen(user, node):
            yield -self._cost(user)
        args, kwargs = map_arg((user.args, user.kwargs), lambda each: lies.get(each, each.meta["val"]))
        val, failed = self._fakes.run(user.target, args, kwargs)
        if failed and is_view(user.target):
            yield self._copy(lies[node])
        elif isinstance(val, torch.Tensor) and not _alike(val, user.meta["val"]):
            lies[user] = val
            waiting.append(user)

    def _shared(self, match: Match, plan: Plan) -> list[tuple[fx.Node, ...]]:
        """The nodes of the results that a plan gives in memory that it does not make, or that an earlier result has."""
        memory = self._memory(plan)
        return [
            makers
            for number, makers in enumerate(match.roots)
            if isinstance(memory[number], Input) or memory[number] in memory[:number]
        ]

    def _copy(self, tensor: torch.Tensor) -> float:
        return call_cost(_CLONE, [tensor], tensor, self._target)


def _alike(x: torch.Tensor, y: Any) -> bool:
    return not isinstance(y, torch.Tensor) or x.dim() != y.dim() or lie_alike(x, y)


def _lowest(node: fx.Node, lies: Collection[fx.Node]) -> fx.Node:
    """What `node` is a view of, as far as that lies otherwise too: one copy of it serves all views."""
    source = shown(node)
    return node if source is None or source not in lies else _lowest(source, lies)


def _memories(plan: Plan) -> list[Any]:
    """Whose memory each result of a plan is."""
    return [_memory(plan, reference) for reference in plan.results]


def _memory(plan: Plan, reference: Any) -> Any:
    """Whose memory a result of a step is: an input's, or that of the step which made it."""
    while isinstance(reference, Output):
        step = plan.steps[reference.step]
        below = aliased(step.target, step.args, step.kwargs, reference.item or 0)
        if not isinstance(below, Input | Output):
            break
        reference = below
    return reference
