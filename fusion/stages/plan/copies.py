"""Copies that a rewrite causes or saves: its results may have other strides than what they replace.

y = fused(x), transposed; y.view(..)      →  a copy before the view    y returned  →  a copy with the strides that were
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
    """Prices of copies for one graph on one target; `cost` prices a node of the model."""

    def __init__(self, graph: Graph, fakes: Fakes, target: Target, cost: Callable[[fx.Node], float]) -> None:
        self._fakes, self._target, self._cost = fakes, target, cost
        self._memory = cache(_memories)
        self._eager = dict(zip(outputs(graph.source), graph.facts.strides, strict=False))

    def costs_of(self, match: Match, plan: Plan, dying: Collection[fx.Node]) -> list[float]:
        """List the microseconds of each copy that is made because results of `plan` have other strides than those of
        `match`.

        The microseconds are negative for a copy of the model that is no longer made. `dying` are the nodes that die
        with the rewrite.
        """
        results = list(zip(match.roots, plan.fakes, strict=True))
        changed = {
            node: fake for makers, fake in results for node in makers if not _same_layout(fake, node.meta["val"])
        }
        costs: list[float] = []
        returned: dict[fx.Node, None] = {}
        waiting = list(changed)
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user.op == "output" and dims_of(changed[node].stride()) != self._eager.get(node):
                    returned.setdefault(_lowest(node, changed))
                elif user.op == "call_function" and not (
                    user in dying or user in changed or user.target is operator.getitem
                ):
                    costs.extend(self._followed(node, user, changed, waiting))
        fresh = [
            node for makers in self._shared(match, plan) for node in makers if node not in changed and is_returned(node)
        ]
        return [*costs, *(self._copy(changed.get(node, node.meta["val"])) for node in (*returned, *fresh))]

    def _followed(
        self, node: fx.Node, user: fx.Node, changed: dict[fx.Node, torch.Tensor], waiting: list[fx.Node]
    ) -> Iterator[float]:
        """Yield the microseconds of each copy that `user` makes, or no longer makes, as `node` has other strides than
        before.

        `changed` maps each node with other strides to a fake that has them. If `user` becomes one, it is added to
        `changed` and to `waiting`, whose users are looked at next.
        """
        if (
            is_contiguous_copy(user.target, user.kwargs)
            and changed[node].is_contiguous()
            and is_copy_unseen(user, node)
        ):
            yield -self._cost(user)
        args, kwargs = map_arg((user.args, user.kwargs), lambda each: changed.get(each, each.meta["val"]))
        val, failed = self._fakes.run(user.target, args, kwargs)
        if failed and is_view(user.target):
            yield self._copy(changed[node])
        elif isinstance(val, torch.Tensor) and not _same_layout(val, user.meta["val"]):
            changed[user] = val
            waiting.append(user)

    def _shared(self, match: Match, plan: Plan) -> list[tuple[fx.Node, ...]]:
        """List the nodes of each result of `match` that `plan` returns in the memory of an input, or of an earlier
        result.
        """
        memory = self._memory(plan)
        return [
            makers
            for number, makers in enumerate(match.roots)
            if isinstance(memory[number], Input) or memory[number] in memory[:number]
        ]

    def _copy(self, tensor: torch.Tensor) -> float:
        return call_cost(_CLONE, [tensor], tensor, self._target)


def _same_layout(x: torch.Tensor, y: Any) -> bool:
    return not isinstance(y, torch.Tensor) or x.dim() != y.dim() or lie_alike(x, y)


def _lowest(node: fx.Node, changed: Collection[fx.Node]) -> fx.Node:
    """Return the innermost node in `changed` of which `node` is a view, or `node`: one copy of it serves all its
    views.
    """
    source = shown(node)
    return node if source is None or source not in changed else _lowest(source, changed)


def _memories(plan: Plan) -> list[Any]:
    return [_memory(plan, reference) for reference in plan.results]


def _memory(plan: Plan, reference: Any) -> Any:
    """Return the input, or the result of the step, whose memory `reference` shares."""
    while isinstance(reference, Output):
        step = plan.steps[reference.step]
        below = aliased(step.target, step.args, step.kwargs, reference.item or 0)
        if not isinstance(below, Input | Output):
            break
        reference = below
    return reference
