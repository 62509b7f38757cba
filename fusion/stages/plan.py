"""Stage 4, plan: what each match would run, whether the target allows it, and what it saves.

A lowering is executed once per distinct signature of its inputs, on fake tensors, and recorded; 61 equal layers share
one plan.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch import tree_leaves
from fusion.cost import call_cost, is_data, is_launch, is_view, node_cost
from fusion.graph import Graph, Value, dims_of, unviewed
from fusion.language import Refused, call
from fusion.operators import LOWERINGS, OPERATORS, operator_of, refusal
from fusion.options import Options
from fusion.recording import Fakes, substitute
from fusion.records import Candidate, Input, Match, Output, Plan, Refusal, Step
from fusion.target import Target
from fusion.weights import derived


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
    ) -> None:
        self.graph, self.fakes, self.target = graph, fakes, target
        self.refusals: list[Refusal] = []
        self._plan_lower, self._elsewhere = plan_lower, elsewhere
        self._host_reads, self._disabled = options.lengths == "host", options.disable
        self._plans: dict[Any, Mapping[str, Plan | Refused]] = {}
        self._derived = derived(graph.source, graph.facts.parameters)

    def candidates(self, matches: Sequence[Match]) -> list[Candidate]:
        """The best legal way to run each match; refusals are collected in `refusals`."""
        planned = [
            (match, name, plan)
            for match in matches
            for name, plan in self._plans_of(match).items()
            if isinstance(plan, Plan)
        ]
        building = {(match.node, value) for match, _, plan in planned for value in self._to_build(match, plan)}
        calling = {
            (match.node, _shared(match, name, number, names))
            for match, name, plan in planned
            for number, (_, names) in enumerate(plan.costs)
        }
        readers = Counter(what for _, what in (*building, *calling))
        found = (self._best(match, readers) for match in matches)
        return [each for each in found if each is not None]

    def _best(self, match: Match, readers: Mapping[Any, int]) -> Candidate | None:
        options: list[Candidate] = []
        refused: list[tuple[Refusal, float, frozenset[str]]] = []
        plans = self._plans_of(match)
        for lowering, plan in plans.items():
            if isinstance(plan, Refused):
                refused.append((Refusal(match.rule.name, plan, match.node), -math.inf, frozenset()))
                continue
            option = self._offer(match, lowering, plan, readers)
            cause = plan.refusals.get(self.target.name) or _mismatch(match, plan)
            if cause is None:
                options.append(option)
            else:
                on = self.target.name if isinstance(cause, str) and self.target.is_npu else ""
                refused.append((Refusal(match.rule.name, cause, match.node, on), option.benefit, _operators(plan)))
        best = max(options, key=lambda option: option.benefit, default=None)
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

    def _note_elsewhere(self, match: Match, plans: Sequence[Plan | Refused]) -> None:
        """What another target would refuse although this one does not."""
        for target in self._elsewhere:
            causes = [None if isinstance(plan, Refused) else plan.refusals.get(target.name, "") for plan in plans]
            if "" not in causes:
                self.refusals.extend(
                    Refusal(match.rule.name, cause, match.node, target.name) for cause in causes[:1] if cause
                )

    def _offer(self, match: Match, lowering: str, plan: Plan, readers: Mapping[Any, int]) -> Candidate:
        """What a match saves if it is run in one way."""
        dying, built = self._dying(match, plan), self._to_build(match, plan)
        kernels = {value: self.fakes.launches(value) for value in built if not self._is_prepared(value)}
        building = sum(self.target.launch * count / readers[value] for value, count in kernels.items())
        each_call = [
            (cost, _shared(match, lowering, number, names))
            for number, (cost, names) in enumerate(plan.costs)
            if not self._are_prepared(names, match)
        ]
        running = sum(cost / readers[call] for cost, call in each_call)
        copying = self._copies(match, plan, dying)
        saved = sum(node_cost(node, self.target) for node in dying) - building - running - sum(copying)
        launches = sum(is_launch(node) for node in dying) - sum(kernels.values()) - len(each_call) - len(copying)
        return Candidate(match, lowering, plan, built, dying, saved, launches)

    def _copies(self, match: Match, plan: Plan, dying: frozenset[fx.Node]) -> list[float]:
        """What it costs that the user's own views of the results no longer fit them: each must be given a copy."""
        costs: list[float] = []
        lies = {node: fake for makers, fake in zip(match.roots, plan.fakes, strict=True) for node in makers}
        waiting = [node for node, fake in lies.items() if dims_of(fake.stride()) != dims_of(node.meta["val"].stride())]
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user in dying or user.target is operator.getitem or not is_view(user.target):
                    continue
                args, kwargs = map_arg((user.args, user.kwargs), lambda each: lies.get(each, each.meta["val"]))
                lies[user], failed = self.fakes.run(user.target, args, kwargs)
                if failed:
                    costs.append(call_cost(torch.ops.aten.clone.default, [lies[node]], lies[node], self.target))
                elif isinstance(lies[user], torch.Tensor):
                    waiting.append(user)
        return costs

    def _are_prepared(self, names: frozenset[str], match: Match) -> bool:
        """Whether a step that reads these captures alone is computed once, outside the graph."""
        return bool(names) and all(self._is_prepared(match.captures[name]) for name in names)

    def _is_prepared(self, value: Value) -> bool:
        """Whether a value is, or is built from, Parameters alone."""
        nodes = self.graph.reads(value)
        fixed = all(isinstance(size, int) for size in value.shape)
        return bool(nodes) and fixed and self._derived.issuperset(nodes)

    def _dying(self, match: Match, plan: Plan) -> frozenset[fx.Node]:
        """Roots, and the nodes below that only they need; never what the plan itself reads."""
        kept = {node for value in plan.tensors(match).values() for node in self.graph.reads(value)}
        roots = [node for makers in match.roots for node in makers]
        dying: set[fx.Node] = set(roots)
        waiting = [source for root in roots for source in root.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in dying or node in kept or node.op != "call_function":
                continue
            if all(user in dying for user in node.users):
                dying.add(node)
                waiting.extend(node.all_input_nodes)
        return frozenset(dying)

    def _to_build(self, match: Match, plan: Plan) -> tuple[Value, ...]:
        """Values that the plan reads, and arguments of theirs, that no node holds."""
        found: dict[Value, None] = {}

        def visit(value: Value) -> None:
            if self.graph.node(value) is None and value not in found:
                for arg in value.args:
                    visit(arg)
                found[value] = None

        for value in plan.tensors(match).values():
            visit(value)
        return tuple(found)

    def _plans_of(self, match: Match) -> Mapping[str, Plan | Refused]:
        """What each lowering of the rule would run, or why it cannot: recorded once per signature."""
        lowerings = match.rule.lowerings()
        optional = match.optional
        try:
            captures = {name: self._given(each, name in optional) for name, each in match.captures.items()}
        except Refused as refused:
            return dict.fromkeys(lowerings, refused)
        owned = self._written_back(match)
        signature = tuple((name, _signature(each), name in owned) for name, each in captures.items())
        key = (match.rule.name, len(match.results), signature)
        if key not in self._plans:
            self._plans[key] = {each: self._record_plan(match, each, captures, owned) for each in lowerings}
        return self._plans[key]

    def _written_back(self, match: Match) -> frozenset[str]:
        """The captures that a result of the match is copied back over, so that it can be written in place."""
        olds = {self.graph.overwritten[each] for each in match.results if each in self.graph.overwritten}
        tensors = {name: each for name, each in match.captures.items() if isinstance(each, Value)}
        return frozenset(name for name, each in tensors.items() if unviewed(each) in olds)

    def _given(self, capture: Any, optional: bool) -> Any:
        """What a lowering is given for a capture: a fake for a value, None for an optional one that has no recipe."""
        if not isinstance(capture, Value):
            return capture
        try:
            return self.fakes.of(capture)
        except Refused:
            if optional:
                return None
            raise

    def _record_plan(
        self, match: Match, lowering: str, captures: Mapping[str, Any], owned: frozenset[str]
    ) -> Plan | Refused:
        inputs = {name: each.detach() for name, each in captures.items() if isinstance(each, torch.Tensor)}
        try:
            recorder, results = self.fakes.record(
                lambda: call(getattr(match.rule, lowering), {**captures, **inputs}), inputs
            )
            results = results[: len(match.results)] if isinstance(results, tuple) else (results,)
            named = tuple(recorder.name(each) for each in results)
        except Refused as refused:
            return refused
        steps = tuple(recorder.steps)
        costs = self._costs(steps, inputs, owned)
        return Plan(steps, named, results, self._limits(steps, inputs), costs, _used(steps, named))

    def _costs(
        self, steps: Sequence[Step], inputs: Mapping[str, torch.Tensor], owned: frozenset[str]
    ) -> tuple[tuple[float, frozenset[str]], ...]:
        """What each kernel costs; writes into what is `owned` are priced without the copy: they will be in place."""
        sources: list[frozenset[str]] = []
        costs: list[tuple[float, frozenset[str]]] = []
        for step in steps:
            leaves = tree_leaves((step.args, dict(step.kwargs)))
            names = frozenset(each.name for each in leaves if isinstance(each, Input))
            sources.append(names.union(*(sources[each.step] for each in leaves if isinstance(each, Output))))
            operands = [_lookup(each, steps, inputs) for each in leaves]
            if not is_view(step.target) and is_data((step.result, operands)):
                moved, result = operands, step.result
                written = _overwritten(step)
                if written and all(_origin(each, sources) & owned for each in written):
                    moved = [each for leaf, each in zip(leaves, operands, strict=True) if leaf not in written]
                    result = None
                costs.append((call_cost(step.target, moved, result, self.target), sources[-1]))
        return tuple(costs)

    def _limits(self, steps: Sequence[Step], inputs: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """For each target, the first limit that forbids one of these calls."""
        found: dict[str, str] = {}
        for target in (self.target, *self._elsewhere):
            for step in steps:
                cause = self._limit(step, steps, inputs, target)
                if cause is not None:
                    found.setdefault(target.name, cause)
        return found

    def _limit(
        self, step: Step, steps: Sequence[Step], inputs: Mapping[str, torch.Tensor], target: Target
    ) -> str | None:
        operator = operator_of(step.target)
        if operator is None:
            return None
        args, kwargs = substitute(
            (step.args, dict(step.kwargs)), (Input, Output), lambda each: _lookup(each, steps, inputs)
        )
        lowering = self._plan_lower if target.is_npu and self._plan_lower in LOWERINGS else None
        if operator.in_place and lowering is not None and lowering not in operator.lowerings:
            operator = OPERATORS[operator.in_place]  # which replaces it there
        if operator.short.partition(".")[0] in self._disabled:
            return f"{operator.short} is left out by the option disable"
        return refusal(operator, target.name, args, kwargs, lowering, self._host_reads)


def _overwritten(step: Step) -> list[Any]:
    """The arguments of a step that its in-place form writes into."""
    operator = operator_of(step.target)
    if operator is None or not operator.in_place:
        return []
    values = operator.bind(step.args, step.kwargs)
    return [values[name] for name in OPERATORS[operator.in_place].written]


def _origin(reference: Input | Output, sources: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset((reference.name,)) if isinstance(reference, Input) else sources[reference.step]


def _operators(plan: Plan) -> frozenset[str]:
    found = (operator_of(step.target) for step in plan.steps)
    return frozenset(operator.name for operator in found if operator is not None)


def _used(steps: Sequence[Step], results: Sequence[Input | Output]) -> frozenset[str]:
    leaves = [each for step in steps for each in tree_leaves((step.args, dict(step.kwargs)))]
    return frozenset(each.name for each in (*leaves, *results) if isinstance(each, Input))


def _lookup(reference: Any, steps: Sequence[Step], inputs: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(reference, Input):
        return inputs[reference.name]
    if isinstance(reference, Output):
        result = steps[reference.step].result
        return result if reference.item is None else result[reference.item]
    return reference


def _signature(capture: Any) -> Any:
    if not isinstance(capture, torch.Tensor):
        return capture
    return dims_of(capture.shape), dims_of(capture.stride()), capture.dtype, capture.device


def _shared(match: Match, lowering: str, number: int, names: frozenset[str]) -> Any:
    """A step of a plan and what it depends on: matches for which that is the same share one call."""
    return match.rule.name, lowering, number, frozenset((name, match.captures[name]) for name in names)


def _mismatch(match: Match, plan: Plan) -> Refused | None:
    """A plan must give exactly the shape and dtype of what it replaces."""
    for result, fake in zip(match.results, plan.fakes, strict=True):
        if (dims_of(fake.shape), fake.dtype) != (result.shape, result.dtype):
            return Refused(
                "it would give {have} where the model has {want}",
                {"have": f"{fake.dtype}{list(fake.shape)}", "want": f"{result.dtype}{list(result.shape)}"},
            )
    return None
