"""Plans: what the lowerings of a rule run on inputs of one signature, recorded once on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusion._torch import tree_leaves, tree_map_only
from fusion.cost import aten_flops, call_cost, is_data, is_view
from fusion.errors import Failure
from fusion.failures import failure, raised
from fusion.graph import Graph, Value, but_ones, dims_of, unviewed
from fusion.language import Lowering, Refused
from fusion.operators import LOWERINGS, OPERATORS, operator_of, refusal
from fusion.options import Options
from fusion.recording import Fakes, frozen
from fusion.records import Input, Match, Output, Plan, Step
from fusion.target import Target

Plans = Mapping[str, Plan | Refused]


class _Kept(NamedTuple):
    """Captures that are written in place, and captures that come from Parameters alone."""

    owned: frozenset[str]
    prepared: frozenset[str]

    def of(self, name: str) -> tuple[bool, bool]:
        """What holds for one capture."""
        return name in self.owned, name in self.prepared


class PlanBook:
    """The plans of one graph for some targets, the first of which counts."""

    def __init__(
        self, graph: Graph, fakes: Fakes, targets: Sequence[Target], plan_lower: str, options: Options
    ) -> None:
        self._graph, self._fakes, self._targets = graph, fakes, targets
        self._plan_lower, self._disabled = plan_lower, options.disable
        self._host_reads = options.lengths == "host"
        self.failures: list[Failure] = []
        self._plans: dict[Any, Plans] = {}

    def of(self, match: Match) -> Plans:
        """What each lowering of the rule would run, or why it cannot: recorded once per signature."""
        optional = match.optional
        try:
            captures = {name: self._given(each, name in optional) for name, each in match.captures.items()}
        except Refused as refused:
            return {each.name: refused for each in _ways(match)}
        kept = _Kept(self._written_back(match), self._prepared_in(match))
        signature = tuple((name, frozen(each), *kept.of(name)) for name, each in captures.items())
        key = (match.rule.name, tuple(each.shape for each in match.results), signature)
        if key not in self._plans:
            self._plans[key] = self._record_all(match, captures, kept)
        return self._plans[key]

    def _record_all(self, match: Match, captures: Mapping[str, Any], kept: _Kept) -> Plans:
        """Each lowering; of its variants those up to the first that no target refuses."""
        found: dict[str, Plan | Refused] = {}
        settled: set[str] = set()
        for each in _ways(match):
            if each.method in settled:
                continue
            plan = found[each.name] = self._attempt(match, each, captures, kept)
            if isinstance(plan, Plan) and not plan.refusals:
                settled.add(each.method)
        return found

    def is_prepared(self, value: Value) -> bool:
        """Whether a value is, or is built from, Parameters alone."""
        nodes = self._graph.reads(value)
        fixed = all(isinstance(size, int) for size in value.shape)
        return bool(nodes) and fixed and self._graph.fixed >= set(nodes)

    def _prepared_in(self, match: Match) -> frozenset[str]:
        tensors = {name: each for name, each in match.captures.items() if isinstance(each, Value)}
        return frozenset(name for name, each in tensors.items() if self.is_prepared(each))

    def _written_back(self, match: Match) -> frozenset[str]:
        """The captures that a result of the match is copied back over, so that it can be written in place."""
        olds = {self._graph.overwritten[each] for each in match.results if each in self._graph.overwritten}
        tensors = {name: each for name, each in match.captures.items() if isinstance(each, Value)}
        return frozenset(name for name, each in tensors.items() if unviewed(each) in olds)

    def _given(self, capture: Any, optional: bool) -> Any:
        """What a lowering is given for a capture: a fake for a value, None for an optional one that has no recipe."""
        if not isinstance(capture, Value):
            return capture
        try:
            return self._fakes.of(capture)
        except Refused:
            if optional:
                return None
            raise

    def _attempt(self, match: Match, lowering: Lowering, captures: Mapping[str, Any], kept: _Kept) -> Plan | Refused:
        """What a lowering runs; one that raises is refused."""
        try:
            return self._record(match, lowering, captures, kept)
        except Exception as error:
            self.failures.append(failure("plan", error, match.rule.name, match.node))
            return raised(f"lowering {lowering.name}", error)

    def _record(self, match: Match, lowering: Lowering, captures: Mapping[str, Any], kept: _Kept) -> Plan | Refused:
        inputs = {name: each.detach() for name, each in captures.items() if isinstance(each, torch.Tensor)}

        def run() -> tuple[Any, ...]:
            results = lowering.run(match.rule, {**captures, **inputs})
            several = results[: len(match.results)] if isinstance(results, tuple) else (results,)
            return tuple(self._fitted(each, value) for each, value in zip(several, match.results, strict=True))

        try:
            recorder, results = self._fakes.record(run, inputs)
            named = tuple(recorder.name(each) for each in results)
        except Refused as refused:
            return refused
        steps = tuple(recorder.steps)
        sources = _sources(steps)
        limits = self._limits(steps, inputs, sources, kept.prepared)
        costs = self._costs(steps, inputs, sources, kept.owned)
        return Plan(steps, named, results, limits, costs, _used(steps, named))

    def _fitted(self, result: torch.Tensor, value: Value) -> torch.Tensor:
        """A result with the dims of size 1 that the model's has."""
        have, want = map(but_ones, (dims_of(result.shape), value.shape))
        if have != want or dims_of(result.shape) == value.shape:
            return result
        return result.reshape([self._fakes.size(size) for size in value.shape])

    def _costs(
        self,
        steps: Sequence[Step],
        inputs: Mapping[str, torch.Tensor],
        sources: Sequence[frozenset[str]],
        owned: frozenset[str],
    ) -> tuple[tuple[float, frozenset[str]], ...]:
        """What each kernel costs; writes into what is `owned` are priced without the copy: they will be in place."""
        costs: list[tuple[float, frozenset[str]]] = []
        for step, names in zip(steps, sources, strict=True):
            leaves = tree_leaves((step.args, dict(step.kwargs)))
            read = list(dict.fromkeys(each for each in leaves if isinstance(each, Input | Output)))  # each once
            operands = [_lookup(each, steps, inputs) for each in read]
            if is_view(step.target) or not is_data((step.result, operands)):
                continue
            moved, result = operands, step.result
            written = _overwritten(step)
            origins = [_origin(each, sources) for each in written]
            caches = [each for each, origin in zip(written, origins, strict=True) if origin & owned]
            if caches and all(origin & owned or not origin for origin in origins):  # memory of its own is moved once
                moved = [each for one, each in zip(read, operands, strict=True) if one not in caches]
                result = None
            flops = _flops(step, steps, inputs)
            costs.append((call_cost(step.target, moved, result, self._targets[0], flops), names))
        return tuple(costs)

    def _limits(
        self,
        steps: Sequence[Step],
        inputs: Mapping[str, torch.Tensor],
        sources: Sequence[frozenset[str]],
        prepared: frozenset[str],
    ) -> dict[str, str]:
        """For each target, the first limit that forbids one of these calls; what is prepared runs eagerly."""
        found: dict[str, str] = {}
        for target in self._targets:
            planned = self._plan_lower if target.is_npu and self._plan_lower in LOWERINGS else None
            for step, names in zip(steps, sources, strict=True):
                outside = planned is not None and bool(names) and names <= prepared
                cause = self._limit(step, steps, inputs, target, "eager" if outside else planned)
                if cause is not None:
                    found.setdefault(target.name, cause)
        return found

    def _limit(
        self,
        step: Step,
        steps: Sequence[Step],
        inputs: Mapping[str, torch.Tensor],
        target: Target,
        lowering: str | None,
    ) -> str | None:
        operator = operator_of(step.target)
        if operator is None:
            return None
        args, kwargs = _arguments(step, steps, inputs)
        if operator.in_place and lowering is not None and lowering not in operator.lowerings:
            operator = OPERATORS[operator.in_place]  # which replaces it there
        forms = (operator.short, operator.in_place.partition("::")[2])  # whichever of them will run
        if any(form.partition(".")[0] in self._disabled for form in forms):
            return f"{operator.short} is left out by the option disable"
        return refusal(operator, target.name, args, kwargs, lowering, self._host_reads)


def _ways(match: Match) -> list[Lowering]:
    """The lowerings of the rule that are for what the form chose."""
    return [each for each in match.rule.lowerings() if each.suits(match.choices)]


def _sources(steps: Sequence[Step]) -> list[frozenset[str]]:
    """For each step, the inputs that it depends on."""
    found: list[frozenset[str]] = []
    for step in steps:
        leaves = tree_leaves((step.args, dict(step.kwargs)))
        names = frozenset(each.name for each in leaves if isinstance(each, Input))
        found.append(names.union(*(found[each.step] for each in leaves if isinstance(each, Output))))
    return found


def _arguments(step: Step, steps: Sequence[Step], inputs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """What a step is called with."""
    return tree_map_only((Input, Output), lambda each: _lookup(each, steps, inputs), (step.args, dict(step.kwargs)))


def _flops(step: Step, steps: Sequence[Step], inputs: Mapping[str, torch.Tensor]) -> float:
    operator = operator_of(step.target)
    if operator is not None and operator.flops is None:
        return 0.0
    args, kwargs = _arguments(step, steps, inputs)
    return aten_flops(step.target, args, step.result) if operator is None else operator.work(args, kwargs)


def _overwritten(step: Step) -> list[Any]:
    """The arguments of a step that its in-place form writes into."""
    operator = operator_of(step.target)
    if operator is None or not operator.in_place:
        return []
    values = operator.bind(step.args, step.kwargs)
    return [values[name] for name in OPERATORS[operator.in_place].written]


def _origin(reference: Input | Output, sources: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset((reference.name,)) if isinstance(reference, Input) else sources[reference.step]


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
