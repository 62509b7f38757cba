"""Stage 5, plan: what each match would run, whether the target allows it, and what it saves.

A lowering is executed once per distinct signature of its inputs, on fake tensors, and recorded; 61 equal layers share
one plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import starmap
from operator import sub
from typing import Any, TypeVar

import torch.fx as fx

from fusion.caching.text_cache import TextCache
from fusion.errors import Failure
from fusion.graph import Graph, Value
from fusion.graph.launches import is_launch
from fusion.language import Refused
from fusion.operators import operator_of
from fusion.options import Options
from fusion.planning.cost import node_cost, node_surplus
from fusion.planning.fake_execution import Fakes
from fusion.planning.target import Target
from fusion.records import CLOSE, Candidate, Made, Match, Plan, Refusal, Repeats
from fusion.report.failures import failure, raised
from fusion.stages.plan import together
from fusion.stages.plan.copies import Copies
from fusion.stages.plan.fit import mismatch
from fusion.stages.plan.needless import Needless
from fusion.stages.plan.precision import Precision
from fusion.stages.plan.recorded import PlanBook, Plans
from fusion.stages.plan.run import Run
from fusion.stages.plan.sharing import Sharing

_T = TypeVar("_T")


class Planner:
    """Plans the matches of one graph for one target."""

    def __init__(
        self,
        graph: Graph,
        fakes: Fakes,
        target: Target,
        plan_lower: str,
        elsewhere: Sequence[Target] = (),
        options: Options = Options(),
        repeats: Repeats = Repeats(),
        texts: TextCache | None = None,
    ) -> None:
        self.graph, self.fakes, self.target, self._repeats = graph, fakes, target, repeats
        self.refusals: list[Refusal] = []
        self._elsewhere = elsewhere
        self._book = PlanBook(graph, fakes, (target, *elsewhere), plan_lower, options, texts)
        self._launches = cache(is_launch)
        self._cost = cache(partial(_cost, self._launches, target))
        self._surplus = cache(partial(node_surplus, machine=target))
        self._kernels = cache(partial(_kernels, fakes, target))
        self._copies = Copies(graph, fakes, target, self._cost)
        self._together: dict[tuple[Any, ...], frozenset[fx.Node]] = {}
        self._needless = Needless(graph, frozenset()).of
        self._precision = Precision(graph)

    def candidates(self, matches: Sequence[Match]) -> list[Candidate]:
        """The best legal way to run each match; refusals are collected in `refusals`.

        A match that gives a value which no node holds is offered together with a match that reads it.
        """
        plans = {match: self._attempt(match, partial(self._book.of, match), {}) for match in matches}
        legal = (match for match, ways in plans.items() if self._is_legal(ways))
        replaceable = frozenset(node for match in legal for node in match.makers)
        self._needless = cache(Needless(self.graph, replaceable).of)
        shared = Sharing(self.graph, plans, self._to_build, self._dying_alone, self._repeats)
        offers = {
            match: self._attempt(match, partial(self._offers, match, plans[match], shared), []) for match in plans
        }
        found: list[Candidate] = []
        for match in matches:
            if match.unheld:
                offers[match] = self._beside(offers[match], match.unheld, offers, shared)
            best = self._best(match, plans[match], offers[match])
            found.extend(() if best is None else (best,))
        return [*found, *together.pairs(found, self._beside_another)]

    def _beside_another(self, one: Candidate, other: Candidate) -> Candidate:
        """A candidate with what nothing needs any more once another is chosen too."""
        read = (value for each in (one, other) for value in each.plan.tensors(each.match).values())
        gone = self._dying([one.match, other.match], frozenset(read)) - one.dying - other.dying
        launches = one.launches + sum(map(self._launches, gone))
        saved, further = one.benefit + self._worth(gone), self._further(launches)
        dying = one.dying | gone
        return replace(one, dying=dying, benefit=saved, launches=launches, further=further, needs=other)

    @property
    def failures(self) -> Sequence[Failure]:
        """What rules raised, which are refused there."""
        return self._book.failures

    def _attempt(self, match: Match, step: Callable[[], _T], otherwise: _T) -> _T:
        """What a step with one match gives; if it raises, that match alone is lost."""
        try:
            return step()
        except Exception as error:
            self._book.failures.append(failure("plan", error, match.rule.name, match.node))
            self.refusals.append(Refusal(match.rule.name, raised("plan", error), match.node))
            return otherwise

    def _offers(self, match: Match, plans: Plans, shared: Sharing) -> list[Candidate]:
        return [
            self._offer(match, lowering, plan, shared) for lowering, plan in plans.items() if isinstance(plan, Plan)
        ]

    def _beside(
        self,
        offers: Sequence[Candidate],
        made: frozenset[Value],
        others: Mapping[Match, Sequence[Candidate]],
        shared: Sharing,
    ) -> list[Candidate]:
        """Each offer with the best other match that reads one of the values `made`, which else it would build.

        Those that the target cannot run stay as they are; without such a match there is none.
        """
        readers = (each for found in others.values() for each in found if made.intersection(each.built))
        waiting = [each for each in readers if self._cause(each) is None]
        best = {each.lowering: each for each in offers if self._cause(each) is not None} if waiting else {}
        able = [each for each in offers if each.lowering not in best]
        pairs = [self._offer(one.match, one.lowering, one.plan, shared, each) for one in able for each in waiting]
        # of those that save the same, the one that stands for most of the user's calls, as for covers; then the first
        for each in sorted(pairs, key=lambda pair: (round(_together(pair), 6), _standing(pair)), reverse=True):
            best.setdefault(each.lowering, each)
        return list(best.values())

    def _best(self, match: Match, plans: Plans, offers: Sequence[Candidate]) -> Candidate | None:
        options: list[Candidate] = []
        refused = [
            (Refusal(match.rule.name, plan, match.node, variant=match.variant), -math.inf, frozenset[str]())
            for plan in plans.values()
            if isinstance(plan, Refused)
        ]
        for offer in offers:
            cause = self._cause(offer)
            if cause is None:
                options.append(offer)
                continue
            by_limit = isinstance(cause, str)
            on = self.target.name if by_limit and self.target.is_npu else ""
            lost = offer.benefit if by_limit else -math.inf
            refusal = Refusal(match.rule.name, cause, match.node, on, match.variant, lost)
            refused.append((refusal, offer.benefit, _operators(offer.plan)))
        most = max(map(_together, options), default=0.0)
        best = next((each for each in options if _together(each) >= most - CLOSE), None)
        missed = [
            (refusal, benefit)
            for refusal, benefit, operators in refused
            if best is None or (benefit > best.benefit and operators != _operators(best.plan))
        ]
        if missed:
            self.refusals.append(max(missed, key=lambda each: each[1])[0])
        if best is not None:
            self._note_elsewhere(match, list(plans.values()))
        return best

    def _is_legal(self, plans: Plans) -> bool:
        """Whether the target can run a match in some way."""
        return any(isinstance(plan, Plan) and self.target.name not in plan.refusals for plan in plans.values())

    def _cause(self, offer: Candidate) -> Refused | str | None:
        """Why the target cannot run it."""
        match, plan = offer.match, offer.plan
        refused = plan.refusals.get(self.target.name) or mismatch(match, plan)
        return refused or self._precision.refusal(match, plan, offer.built)

    def _note_elsewhere(self, match: Match, plans: Sequence[Plan | Refused]) -> None:
        """What another target would refuse although this one does not."""
        for target in self._elsewhere:
            causes = [None if isinstance(plan, Refused) else plan.refusals.get(target.name, "") for plan in plans]
            if "" not in causes:
                self.refusals.extend(
                    Refusal(match.rule.name, cause, match.node, target.name, match.variant)
                    for cause in causes[:1]
                    if cause
                )

    def _offer(
        self,
        match: Match,
        lowering: str,
        plan: Plan,
        shared: Sharing,
        needs: Candidate | None = None,
    ) -> Candidate:
        """What a match saves if it is run in one way; beside another, what both save more than the other alone."""
        members = ((match, plan), *(((needs.match, needs.plan),) if needs else ()))
        read = {value for of, each in members for value in each.tensors(of).values()} - match.unheld
        alone, built_alone = (needs.dying, needs.built) if needs else (frozenset[fx.Node](), ())
        dying, built = self._dying([of for of, _ in members], frozenset(read)) | alone, self._to_build(read)
        beside = self._dying_together(match, lowering, plan, shared) - dying
        building, kernels = map(sub, self._built(built, shared), self._built(built_alone, shared))
        calls = shared.calls_of(match, lowering, plan)
        sharers = [shared.count(call) for call in calls]
        each_call = [
            (cost, call, count)
            for (cost, names), call, count in zip(plan.costs, calls, sharers, strict=True)
            if not self._are_prepared(names, match)
        ]
        running = sum(cost / count for cost, _, count in each_call)
        copying = self._copies.of(match, plan, dying)
        saved = self._worth(dying - alone) + self._worth(beside) / max(sharers, default=1)
        replaced = [node for node in dying - alone if self._launches(node)]
        launches = len(replaced) - int(kernels) - len(each_call) - sum(1 if cost > 0 else -1 for cost in copying)
        saved -= building + running + sum(copying)
        surplus = math.fsum(map(self._surplus, replaced)) if launches < 0 else 0.0
        gone, further = (dying | beside) - alone, self._further(launches)
        made = {call: Made(1, shared.alike(match, call.values)) for _, call, _ in each_call}
        made |= {each: Made(self._launched(each), shared.alike(match, [each])) for each in built}
        times = shared.times(match)
        return Candidate(match, lowering, plan, built, gone, saved, launches, surplus, further, made, needs, times)

    def _launched(self, built: Value) -> int:
        """How many kernels build a value at every call."""
        return 0 if self._book.is_prepared(built) else len(self._kernels(built))

    def _further(self, launches: int) -> float:
        """What the calls cost that are made more, where so many are saved."""
        return max(0, -launches) * self.target.launch

    def _worth(self, nodes: Iterable[fx.Node]) -> float:
        """What it costs to run nodes of the model."""
        return math.fsum(map(self._cost, nodes))  # the same in whatever order

    def _dying_together(self, match: Match, lowering: str, plan: Plan, shared: Sharing) -> frozenset[fx.Node]:
        """What nothing needs any more once all matches that share a call of this one are rewritten like it."""
        calls = tuple(call for call in shared.calls_of(match, lowering, plan) if len(shared.calls[call]) > 1)
        if calls not in self._together:  # the same for all that share them
            self._together[calls] = self._dying_of(dict(sharer for call in calls for sharer in shared.calls[call]))
        return self._together[calls]

    def _dying_of(self, sharers: Mapping[Match, Plan]) -> frozenset[fx.Node]:
        """What several matches make needless together, and none of them alone."""
        read = frozenset(value for each, of in sharers.items() for value in of.tensors(each).values())
        return self._dying(list(sharers), read) - frozenset[fx.Node]().union(
            *starmap(self._dying_alone, sharers.items())
        )

    def _built(self, built: Sequence[Value], shared: Sharing) -> tuple[float, float]:
        """What it costs to build values for one of those that read them, and by how many launches."""
        kernels = {value: self._kernels(value) for value in built if not self._book.is_prepared(value)}
        cost = math.fsum(sum(costs) / shared.readers[value] for value, costs in kernels.items())
        return cost, sum(map(len, kernels.values()))

    def _are_prepared(self, names: frozenset[str], match: Match) -> bool:
        """Whether a step that reads these captures alone is computed once, outside the graph; constants beside them."""
        return self.graph.facts.prepares and all(self._book.is_prepared(match.captures[name]) for name in names)

    def _dying(self, matches: Sequence[Match], read: frozenset[Value]) -> frozenset[fx.Node]:
        """Roots, and the nodes below that only they need; never what the plans themselves read."""
        return self._needless(tuple(node for match in matches for node in match.makers), read)

    def _dying_alone(self, match: Match, plan: Plan) -> frozenset[fx.Node]:
        """What one match makes needless."""
        return self._dying([match], frozenset(plan.tensors(match).values()))

    def _to_build(self, read: Iterable[Value]) -> tuple[Value, ...]:
        """Values that a plan reads, and arguments of theirs, that no node holds: each behind its arguments."""
        found: dict[Value, None] = {}
        waiting = [(value, False) for value in read][::-1]
        while waiting:
            value, is_ready = waiting.pop()
            if is_ready:
                found[value] = None
            elif value not in found and self.graph.node(value) is None:
                waiting.append((value, True))
                waiting.extend((arg, False) for arg in reversed(self.graph.recipe(value).args))
        return tuple(found)


def _cost(is_launch: Callable[[fx.Node], bool], target: Target, node: fx.Node) -> float:
    """What it costs to run a node of the model."""
    return node_cost(node, target) if is_launch(node) else 0.0


def _operators(plan: Plan) -> frozenset[str]:
    found = (operator_of(step.target) for step in plan.steps)
    return frozenset(operator.name for operator in found if operator is not None)


def _kernels(fakes: Fakes, target: Target, value: Value) -> tuple[float, ...]:
    """What each kernel costs that builds a value from its arguments."""
    built = fakes.recipe(value)
    ran = Run(built.steps, built.inputs)
    kernels = filter(ran.is_kernel, ran.steps)
    return tuple(ran.cost(step, target, ran.operands(step).values(), step.result) for step in kernels)


def _standing(candidate: Candidate) -> int:
    """How many calls of the user a candidate stands for, with what it needs."""
    return len(candidate.dying | (frozenset() if candidate.needs is None else candidate.needs.dying))


def _together(offer: Candidate) -> float:
    """What an offer saves with the other that it is made beside."""
    return offer.benefit + (offer.needs.benefit if offer.needs else 0.0)
