"""Stage plan: record for each match what its lowerings run, check the limits of the target, and price what it saves.

A lowering is executed once per distinct signature of its inputs, on fake tensors; 61 equal layers share one plan.
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
from fusion.stages.plan import joint_rewrites
from fusion.stages.plan.copies import Copies
from fusion.stages.plan.dead_nodes import DeadNodes
from fusion.stages.plan.lowering_run import Run
from fusion.stages.plan.plan_records import PlanBook, Plans
from fusion.stages.plan.precision import Precision
from fusion.stages.plan.result_fit import mismatch
from fusion.stages.plan.sharing import Sharing

_T = TypeVar("_T")


class Planner:
    """Planner of the matches of one graph for one target.

    `elsewhere` are further targets whose limits are reported; `plan_lower` is the compiler whose limits count;
    `repeats` counts the equal layers for which a node stands; `texts` caches plans across graphs.
    """

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
        self._jointly_dead: dict[tuple[Any, ...], frozenset[fx.Node]] = {}
        self._dead_below = DeadNodes(graph, frozenset()).below
        self._precision = Precision(graph)

    def candidates(self, matches: Sequence[Match]) -> list[Candidate]:
        """Return the best legal candidate of each of `matches` that has one; then the last of each group that saves
        more jointly.

        Reasons of the others are appended to `refusals`. A match with a result that no node computes, as of absorbed
        queries, is legal only together with a match that reads the result, and is returned as needing that.
        """
        plans = {match: self._attempt(match, partial(self._book.plans_for, match), {}) for match in matches}
        legal = (match for match, ways in plans.items() if self._is_legal(ways))
        replaceable = frozenset(node for match in legal for node in match.makers)
        self._dead_below = cache(DeadNodes(self.graph, replaceable).below)
        shared = Sharing(self.graph, plans, self._to_build, self._dying_alone, self._repeats)
        offers = {
            match: self._attempt(match, partial(self._offers, match, plans[match], shared), []) for match in plans
        }
        candidates: list[Candidate] = []
        for match in matches:
            if match.unheld:
                offers[match] = self._with_reader(offers[match], match.unheld, offers, shared)
            best = self._best(match, plans[match], offers[match])
            candidates.extend(() if best is None else (best,))
        return [*candidates, *joint_rewrites.groups(candidates, self._on_top)]

    def _on_top(self, one: Candidate, others: Sequence[Candidate]) -> Candidate:
        """Return the candidate `one` priced for a graph in which `others` are rewritten as well.

        Its benefit then includes the cost of nodes that die only if all of them are rewritten.
        """
        every = (*others, one)
        read = (value for each in every for value in each.plan.tensors(each.match).values())
        dead = frozenset[fx.Node]().union(*(each.dying for each in every))
        gone = self._dying([each.match for each in every], frozenset(read)) - dead
        launches = one.launches + sum(map(self._launches, gone))
        saved, further = one.benefit + self._worth(gone), self._further(launches)
        return replace(one, dying=one.dying | gone, benefit=saved, launches=launches, further=further)

    @property
    def failures(self) -> Sequence[Failure]:
        """The exceptions of rules, each of which is among the refusals too."""
        return self._book.failures

    def _attempt(self, match: Match, step: Callable[[], _T], otherwise: _T) -> _T:
        """Return `step()`; if it raises, `otherwise`, with the exception recorded as failure and refusal of `match`."""
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

    def _with_reader(
        self,
        offers: Sequence[Candidate],
        made: frozenset[Value],
        others: Mapping[Match, Sequence[Candidate]],
        shared: Sharing,
    ) -> list[Candidate]:
        """Pair each legal offer with the candidate among `others` with which it saves most and that reads one of its
        results.

        Offers that the target refuses are returned unpaired, so that they give a reason. [] if no reader is legal.

        Args:
            offers: the candidates of one match, one for each lowering.
            made: the results of the match that no node computes; a reader that is alone must build them.
            others: the candidates of all matches.
            shared: how many matches read each value and make each call.
        """
        readers = (each for offered in others.values() for each in offered if made.intersection(each.built))
        waiting = [each for each in readers if self._cause(each) is None]
        best = {each.lowering: each for each in offers if self._cause(each) is not None} if waiting else {}
        able = [each for each in offers if each.lowering not in best]
        pairs = [self._offer(one.match, one.lowering, one.plan, shared, each) for one in able for each in waiting]
        # ties go to the pair that replaces most calls, as in a cover, then to the first
        for each in sorted(
            pairs, key=lambda pair: (round(_joint_benefit(pair), 6), _count_replaced(pair)), reverse=True
        ):
            best.setdefault(each.lowering, each)
        return list(best.values())

    def _best(self, match: Match, plans: Plans, offers: Sequence[Candidate]) -> Candidate | None:
        """Return the first of `offers` that is legal and saves most, give or take `CLOSE` microseconds; None if none is
        legal.

        The plan among those refused that would have saved most is recorded as a refusal, unless it saves no more than
        the best offer, or calls the same operators. A plan of operators that the target lacks comes last: no change of
        the model makes it legal.
        """
        options: list[Candidate] = []
        refused = [
            (Refusal(match.rule.name, plan, match.node, variant=match.variant), (True, -math.inf), frozenset[str]())
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
            rank = not self._lacks_operator(offer.plan), offer.benefit
            refused.append((refusal, rank, _operators(offer.plan)))
        most = max(map(_joint_benefit, options), default=0.0)
        best = next((each for each in options if _joint_benefit(each) >= most - CLOSE), None)
        missed = [
            (refusal, rank)
            for refusal, rank, operators in refused
            if best is None or (rank[1] > best.benefit and operators != _operators(best.plan))
        ]
        if missed:
            self.refusals.append(max(missed, key=lambda each: each[1])[0])
        if best is not None:
            self._note_elsewhere(match, list(plans.values()))
        return best

    def _is_legal(self, plans: Plans) -> bool:
        """Return True if the target takes one of `plans`."""
        return any(isinstance(plan, Plan) and self.target.name not in plan.refusals for plan in plans.values())

    def _cause(self, offer: Candidate) -> Refused | str | None:
        """Return the reason why `offer` is not legal; None if it is.

        A limit of the target forbids it, its results have another shape, dtype or unreliable strides, or it is less
        precise.
        """
        match, plan = offer.match, offer.plan
        refused = plan.refusals.get(self.target.name) or mismatch(match, plan)
        return refused or self._precision.refusal(match, plan, offer.built)

    def _lacks_operator(self, plan: Plan) -> bool:
        """Return True if the target does not have one of the operators that `plan` calls."""
        called = (operator_of(step.target) for step in plan.steps)
        return self.target.is_npu and any(each is not None and self.target.name not in each.limits for each in called)

    def _note_elsewhere(self, match: Match, plans: Sequence[Plan | Refused]) -> None:
        """Record, for each target of `elsewhere` that takes none of `plans`, the refusal of the first of them."""
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
        """Price `plan` for `match`; with `needs`, price both jointly and state what they save on top of `needs` alone.

        The benefit is the cost of the dead nodes, less that of the calls, of the values to build and of copies. A call
        that several matches share is divided among them.
        """
        members = ((match, plan), *(((needs.match, needs.plan),) if needs else ()))
        read = {value for owner, each in members for value in each.tensors(owner).values()} - match.unheld
        alone, built_alone = (needs.dying, needs.built) if needs else (frozenset[fx.Node](), ())
        dying, built = self._dying([owner for owner, _ in members], frozenset(read)) | alone, self._to_build(read)
        with_sharers = self._dying_jointly(match, lowering, plan, shared) - dying
        building, kernels = map(sub, self._built(built, shared), self._built(built_alone, shared))
        calls = shared.calls_of(match, lowering, plan)
        sharers = [shared.count(call) for call in calls]
        each_call = [
            (cost, call, count)
            for (cost, names), call, count in zip(plan.costs, calls, sharers, strict=True)
            if not self._are_prepared(names, match)
        ]
        running = sum(cost / count for cost, _, count in each_call)
        copying = self._copies.costs_of(match, plan, dying)
        saved = self._worth(dying - alone) + self._worth(with_sharers) / max(sharers, default=1)
        replaced = [node for node in dying - alone if self._launches(node)]
        launches = len(replaced) - int(kernels) - len(each_call) - sum(1 if cost > 0 else -1 for cost in copying)
        saved -= building + running + sum(copying)
        surplus = math.fsum(map(self._surplus, replaced)) if launches < 0 else 0.0
        gone, further = (dying | with_sharers) - alone, self._further(launches)
        made = {call: Made(1, shared.alike(match, call.values)) for _, call, _ in each_call}
        made |= {each: Made(self._launched(each), shared.alike(match, [each])) for each in built}
        times = shared.times(match)
        return Candidate(match, lowering, plan, built, gone, saved, launches, surplus, further, made, needs, times)

    def _launched(self, built: Value) -> int:
        """Count the kernels that build the value `built` at every call; 0 where it is prepared."""
        return 0 if self._book.is_prepared(built) else len(self._kernels(built))

    def _further(self, launches: int) -> float:
        """Return the microseconds of launches that a rewrite adds, if `launches`, the number that it saves, is
        negative; else 0.
        """
        return max(0, -launches) * self.target.launch

    def _worth(self, nodes: Iterable[fx.Node]) -> float:
        """Sum the microseconds that `nodes` of the model take on the target."""
        return math.fsum(map(self._cost, nodes))  # exact: the order of a set does not matter

    def _dying_jointly(self, match: Match, lowering: str, plan: Plan, shared: Sharing) -> frozenset[fx.Node]:
        """Return the nodes that die only if all matches that make one of the calls of `match` are rewritten; memoised.

        A call of `plan` may be made by several matches, which then share one.
        """
        calls = tuple(call for call in shared.calls_of(match, lowering, plan) if len(shared.calls[call]) > 1)
        if calls not in self._jointly_dead:
            self._jointly_dead[calls] = self._dying_of(dict(sharer for call in calls for sharer in shared.calls[call]))
        return self._jointly_dead[calls]

    def _dying_of(self, sharers: Mapping[Match, Plan]) -> frozenset[fx.Node]:
        """Return the nodes that die if all `sharers` are rewritten, without those that one of them makes dead alone."""
        read = frozenset(value for each, plan in sharers.items() for value in plan.tensors(each).values())
        return self._dying(list(sharers), read) - frozenset[fx.Node]().union(
            *starmap(self._dying_alone, sharers.items())
        )

    def _built(self, built: Sequence[Value], shared: Sharing) -> tuple[float, float]:
        """Return the microseconds of building the values `built`, divided by their readers, and the number of kernels.

        Values that are prepared cost nothing.
        """
        kernels = {value: self._kernels(value) for value in built if not self._book.is_prepared(value)}
        cost = math.fsum(sum(costs) / shared.readers[value] for value, costs in kernels.items())
        return cost, sum(map(len, kernels.values()))

    def _are_prepared(self, names: frozenset[str], match: Match) -> bool:
        """Return True if a step that depends on the captures `names` of `match` alone is computed once, outside of the
        graph.

        That is so if all of them come from Parameters alone, and for a step of constants, which depends on none.
        """
        return self.graph.facts.prepares and all(self._book.is_prepared(match.captures[name]) for name in names)

    def _dying(self, matches: Sequence[Match], read: frozenset[Value]) -> frozenset[fx.Node]:
        """Return the roots of `matches` and the nodes that only they need, except those that give the values `read`."""
        return self._dead_below(tuple(node for match in matches for node in match.makers), read)

    def _dying_alone(self, match: Match, plan: Plan) -> frozenset[fx.Node]:
        """Return the nodes that die if `match` alone is rewritten."""
        return self._dying([match], frozenset(plan.tensors(match).values()))

    def _to_build(self, read: Iterable[Value]) -> tuple[Value, ...]:
        """List those of the values `read`, and of the values that they are computed from, that no node computes.

        Operands come before the values that are computed from them.
        """
        ordered: dict[Value, None] = {}
        waiting = [(value, False) for value in read][::-1]
        while waiting:
            value, is_ready = waiting.pop()
            if is_ready:
                ordered[value] = None
            elif value not in ordered and self.graph.node(value) is None:
                waiting.append((value, True))
                waiting.extend((arg, False) for arg in reversed(self.graph.recipe(value).args))
        return tuple(ordered)


def _cost(is_launch: Callable[[fx.Node], bool], target: Target, node: fx.Node) -> float:
    """Return the microseconds that `node` of the model takes on `target`; 0 if it launches nothing."""
    return node_cost(node, target) if is_launch(node) else 0.0


def _operators(plan: Plan) -> frozenset[str]:
    operators = (operator_of(step.target) for step in plan.steps)
    return frozenset(operator.name for operator in operators if operator is not None)


def _kernels(fakes: Fakes, target: Target, value: Value) -> tuple[float, ...]:
    """Return the microseconds on `target` of each kernel that builds `value` from its operands."""
    built = fakes.recipe(value)
    ran = Run(built.steps, built.inputs)
    kernels = filter(ran.is_kernel, ran.steps)
    return tuple(ran.cost(step, target, ran.operands(step).values(), step.result) for step in kernels)


def _count_replaced(candidate: Candidate) -> int:
    """Count the calls of the model that die with `candidate` and with the candidate that it needs."""
    return len(candidate.dying | (frozenset() if candidate.needs is None else candidate.needs.dying))


def _joint_benefit(offer: Candidate) -> float:
    """Return the microseconds that `offer` saves together with the candidate that it needs, if any."""
    return offer.benefit + (offer.needs.benefit if offer.needs else 0.0)
