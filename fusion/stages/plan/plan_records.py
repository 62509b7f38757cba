"""Plans: records of what the lowerings of a rule run, one per signature of the inputs, made on fake tensors.

Plans are stored as JSON for later graphs, under a digest of all that they depend on: the rule, the metadata of its
inputs, the targets and some options. Symbolic sizes belong to one graph: plans with any are never stored.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from itertools import starmap
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fusion._torch.tensors import count
from fusion.caching.text_cache import TextCache
from fusion.errors import Failure
from fusion.graph import Graph, Value, but_ones, dims_of, lie_alike, unviewed
from fusion.language import Lowering, Refused, Rule
from fusion.language.cache_keys import key_of
from fusion.operators import LOWERINGS, OPERATORS, Operator, operator_of, refusal
from fusion.options import Options
from fusion.planning.fake_execution import Fakes
from fusion.planning.plan_json import UnwrittenError, frozen, read, written
from fusion.planning.target import Target
from fusion.planning.usable_packages import Usable
from fusion.records import Input, Match, Plan, Step
from fusion.report.failures import failure, raised
from fusion.stages.plan.lowering_run import Run
from fusion.stages.plan.result_fit import has_unreliable_strides, mismatch

Plans = Mapping[str, Plan | Refused]
"""For the name of each lowering its plan, or the reason why it has none."""


class _Traits(NamedTuple):
    """Names of captures that plans depend on beyond the metadata of tensors.

    Attributes:
        owned: captures that a result is copied back over, so that they are written in place.
        prepared: captures that come from Parameters alone.
    """

    owned: frozenset[str]
    prepared: frozenset[str]


class PlanBook:
    """The plans of one graph for `targets`, the first of which sets the prices.

    `plan_lower` is the compiler whose limits count on an NPU.
    """

    def __init__(
        self,
        graph: Graph,
        fakes: Fakes,
        targets: Sequence[Target],
        plan_lower: str,
        options: Options,
        texts: TextCache | None,
    ) -> None:
        self._graph, self._fakes, self._targets, self._texts = graph, fakes, targets, texts
        self._plan_lower, self._disabled = plan_lower, options.disable
        self._host_reads, self._usable = options.lengths == "host", Usable.of(options.packages)
        self.failures: list[Failure] = []
        self._plans: dict[Any, Plans] = {}
        self._looks: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self._refusals: dict[Any, str | None] = {}  # by operator, target, arguments and compiler
        self.is_prepared = cache(partial(_is_prepared, graph))
        self._key_of = cache(key_of)

    def plans_for(self, match: Match) -> Plans:
        """Return the plan of each lowering of `match`, or the reason why it has none, recorded once per signature."""
        spare = match.spare
        try:
            captures = {name: self._given(each, name in spare) for name, each in match.captures.items()}
        except Refused as refused:
            return {each.name: refused.with_traceback(None) for each in self._ways(match)}
        tensors = {name: each for name, each in match.captures.items() if isinstance(each, Value)}
        prepared = frozenset(name for name, each in tensors.items() if self.is_prepared(each))
        traits = _Traits(self._written_back(match, tensors), prepared)
        signature = tuple((name, self._look(each)) for name, each in captures.items())
        results = tuple(starmap(_wanted, zip(match.results, match.roots, strict=True)))
        key = (match.rule.name, results, has_unreliable_strides(match), signature, traits)
        if key not in self._plans:
            self._plans[key] = self._stored_or_recorded(key, match, captures, traits)
        return self._plans[key]

    def _ways(self, match: Match) -> list[Lowering]:
        """List the lowerings of the rule of `match` that suit the choices of its form.

        Lowerings whose operator the compiler does not take are left out, unless it takes none of them.
        """
        ways = [each for each in match.rule.lowerings() if each.suits(match.pattern.choices)]
        return [each for each in ways if not each.operator or self._runs(OPERATORS[each.operator])] or ways

    def _runs(self, operator: Operator) -> bool:
        """Return True if the compiler whose limits count on the first target takes `operator` or its in-place form."""
        planned, then = self._planned(self._targets[0]), OPERATORS[operator.in_place or operator.name]
        return planned is None or planned in operator.lowerings | then.lowerings

    def _planned(self, target: Target) -> str | None:
        """Return the compiler to plan for on `target`, if its operators have limits of compilers; None for a host and
        for eager.
        """
        return self._plan_lower if target.is_npu and self._plan_lower in LOWERINGS else None

    def _stored_or_recorded(self, key: Any, match: Match, captures: Mapping[str, Any], traits: _Traits) -> Plans:
        """Load the plans of `match` that an earlier graph has stored under `key`; if there are none, record and store
        them.

        They are not stored if a lowering raised. `captures` and `traits` are what lowerings are recorded with.
        """
        ways = [each.name for each in self._ways(match)]
        depends = key, ways, self._targets, self._plan_lower, self._disabled, self._host_reads, self._usable
        name = digest(self._key_of(match.rule), *depends) if self._texts else None
        if self._texts is None or name is None:
            return self._record_all(match, captures, traits)
        text = self._texts.get(name)
        if text is not None:
            return plans_of(text, self._fakes)
        raised = len(self.failures)
        plans = self._record_all(match, captures, traits)
        text = text_of(plans)
        if text is not None and len(self.failures) == raised:
            self._texts.put(name, text)
        return plans

    def _record_all(self, match: Match, captures: Mapping[str, Any], traits: _Traits) -> Plans:
        """Record the lowerings of `match` with `captures`, in the order of the rule.

        It ends at the first that is legal on all targets, has at most one kernel, and gives the strides of the model.
        Once a variant of a method is legal on all targets, its other variants are skipped.
        """
        plans: dict[str, Plan | Refused] = {}
        settled: set[str] = set()
        for each in self._ways(match):
            if each.method in settled:
                continue
            plan = plans[each.name] = self._attempt(match, each, captures, traits)
            if isinstance(plan, Plan) and not plan.refusals and mismatch(match, plan) is None:
                settled.add(each.method)
                same_strides = all(map(_has_strides_of, match.roots, plan.fakes))
                if len(plan.costs) <= 1 and same_strides:
                    break
        return plans

    def _written_back(self, match: Match, tensors: Mapping[str, Value]) -> frozenset[str]:
        """Return the names of `tensors` that a result of `match` is copied back over: it can be written in place."""
        olds = {self._graph.overwritten[each] for each in match.results if each in self._graph.overwritten}
        return frozenset(name for name, each in tensors.items() if unviewed(each) in olds)

    def _look(self, given: Any) -> Hashable:
        """Return a hashable key of what a lowering can depend on in `given`.

        That of a fake tensor, its metadata, is memoised by identity: many matches get the same fake.
        """
        if not isinstance(given, torch.Tensor):
            return frozen(given)
        if id(given) not in self._looks:
            self._looks[id(given)] = given, frozen(given)  # an id is unique only while its tensor is alive
        return self._looks[id(given)][1]

    def _given(self, capture: Any, spare: bool) -> Any:
        """Return what a lowering gets as argument for `capture`: for a value its fake tensor, else `capture` itself.

        None if no fake can be computed, and `spare` is True: lowerings can do without that capture.
        """
        if not isinstance(capture, Value):
            return capture
        try:
            return self._fakes.of(capture)
        except Refused:
            if spare:
                return None
            raise

    def _attempt(
        self, match: Match, lowering: Lowering, captures: Mapping[str, Any], traits: _Traits
    ) -> Plan | Refused:
        """Record `lowering` for `match`, as `_record_all` does; one that raises anything but `Refused` becomes a
        failure and a refusal.
        """
        try:
            return self._record(match, lowering, captures, traits)
        except Exception as error:
            self.failures.append(failure("plan", error, match.rule.name, match.node))
            return raised(f"lowering {lowering.name}", error)

    def _record(self, match: Match, lowering: Lowering, captures: Mapping[str, Any], traits: _Traits) -> Plan | Refused:
        inputs = {name: each for name, each in captures.items() if isinstance(each, torch.Tensor)}

        def run(inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
            results = lowering.run(match.rule, {**captures, **inputs})
            several = results[: len(match.results)] if isinstance(results, tuple) else (results,)
            return tuple(self._fitted(each, value) for each, value in zip(several, match.results, strict=True))

        try:
            recorder, results = self._fakes.record(run, inputs)
            named = tuple(recorder.name(each) for each in results)
        except Refused as refused:
            return refused.with_traceback(None)
        ran = Run(tuple(recorder.steps), inputs)
        used = ran.used | {each.name for each in named if isinstance(each, Input)}
        limits = {**self._limits(ran, traits.prepared, match.rule), **self._refused_on(lowering)}
        return Plan(tuple(ran.steps), named, results, limits, self._costs(ran, traits.owned), used)

    def _refused_on(self, lowering: Lowering) -> dict[str, str]:
        """Return target -> reason for each target on which `lowering` is declared not to do what its rule says."""
        return {each.name: lowering.refused_on[each.name] for each in self._targets if each.name in lowering.refused_on}

    def _fitted(self, result: torch.Tensor, value: Value) -> torch.Tensor:
        """Reshape `result` to the shape of `value`, if the two differ in dims of size 1 alone; else return it as it is.

        If `value` is a reshape, `result` may also differ in dims of size 1 from what is reshaped.
        """
        have, *wanted = map(but_ones, (dims_of(result.shape), value.shape, *(each.shape for each in _reshaped(value))))
        if have not in wanted or dims_of(result.shape) == value.shape:
            return result
        return result.reshape([self._fakes.size(size) for size in value.shape])

    def _costs(self, ran: Run, owned: frozenset[str]) -> tuple[tuple[float, frozenset[str]], ...]:
        """Return for each kernel of `ran` its microseconds, and the captures that it depends on.

        A write is priced by the rows that are written alone if it can be in place: into a capture of `owned`, or into
        memory that the plan itself has made.
        """
        costs: list[tuple[float, frozenset[str]]] = []
        for step, names in zip(ran.steps, ran.sources, strict=True):
            if not ran.is_kernel(step):
                continue
            operands, result = ran.operands(step), step.result
            moved = operands.values()
            written = {each: ran.origin(each) for each in _overwritten(step) if count(ran.lookup(each))}
            caches = [each for each, origin in written.items() if origin & owned]
            if caches and all(origin & owned or not origin for origin in written.values()):
                moved = [each for one, each in operands.items() if one not in caches]
                result = None
            elif written and not any(written.values()):
                moved = [each for one, each in operands.items() if one not in written]
            costs.append((ran.cost(step, self._targets[0], moved, result), names))
        return tuple(costs)

    def _limits(self, ran: Run, prepared: frozenset[str], rule: Rule) -> dict[str, str]:
        """Return for each target the first limit that forbids a call of `ran`, or the package that a call lacks.

        Steps that depend on `prepared` captures alone run eagerly, and so have the limits of eager mode. The name of an
        opt-in `rule` in the options stands for those of its packages.
        """
        calls = [
            (operator, ran.arguments(step), bool(names) and names <= prepared)
            for step, names in zip(ran.steps, ran.sources, strict=True)
            if (operator := operator_of(step.target)) is not None
        ]
        refusals = (self._usable.refusal(operator, *given) for operator, given, _ in calls if not rule.opt_in)
        lacking = next((each for each in refusals if each is not None), None)
        causes = {target.name: self._first_limit(calls, target) or lacking for target in self._targets}
        return {name: cause for name, cause in causes.items() if cause is not None}

    def _first_limit(self, calls: Sequence[tuple[Operator, tuple[Any, Any], bool]], target: Target) -> str | None:
        planned = self._planned(target)
        causes = (
            self._limit(operator, given, target, "eager" if planned and outside else planned)
            for operator, given, outside in calls
        )
        return next((cause for cause in causes if cause is not None), None)

    def _limit(self, operator: Operator, given: tuple[Any, Any], target: Target, lowering: str | None) -> str | None:
        if operator.in_place and lowering is not None and lowering not in operator.lowerings:
            operator = OPERATORS[operator.in_place]  # the in-place form runs there
        forms = (operator.short, operator.in_place.partition("::")[2])  # either of them may run
        if any(form.partition(".")[0] in self._disabled for form in forms):
            return (
                f"{operator.short}: the option disable names it; a rewrite requires it; remove it from disable "
                "to use it"
            )
        call = operator.name, target.name, *map(frozen, given), lowering
        if call not in self._refusals:
            self._refusals[call] = refusal(operator, target.name, *given, lowering, self._host_reads)
        return self._refusals[call]


def _wanted(result: Value, makers: Sequence[fx.Node]) -> Hashable:
    """Return a key of all that plans for `result` depend on: shape, shape below a reshape, dtype and strides.

    `makers` are the nodes that compute it.
    """
    strides = dims_of(makers[0].meta["val"].stride()) if makers else None
    return result.shape, *(each.shape for each in _reshaped(result)), result.dtype, strides


def _has_strides_of(makers: Sequence[fx.Node], fake: torch.Tensor) -> bool:
    """Return True if `fake` has the strides of the result that it replaces, or no node of `makers` computes that
    result.
    """
    return not makers or lie_alike(makers[0].meta["val"], fake)


def _is_prepared(graph: Graph, value: Value) -> bool:
    """Return True if `value` has a static shape and is computed from Parameters alone."""
    return all(isinstance(size, int) for size in value.shape) and graph.is_fixed(value)


def _overwritten(step: Step) -> list[Any]:
    """Return the arguments of the functional operator of `step` that its in-place form writes into; [] if it has no
    such form.
    """
    operator = operator_of(step.target)
    if operator is None or not operator.in_place:
        return []
    values = operator.bind(step.args, step.kwargs)
    return [values[name] for name in OPERATORS[operator.in_place].written]


def _reshaped(value: Value) -> tuple[Value, ...]:
    """Return (argument,) if `value` is a reshape, else ()."""
    return value.args if value.op == "reshape" else ()


def digest(key: str | None, *parts: Any) -> str | None:
    """Hash what the plans of a rule depend on, versions aside: the `key` of its code and `parts`.

    None where `key` is None or a part cannot be written as JSON.
    """
    if key is None:
        return None
    try:
        text = json.dumps([key, written(parts)])
    except UnwrittenError:
        return None
    return sha256(text.encode()).hexdigest()


def text_of(plans: Plans) -> str | None:
    """Write `plans` as JSON; None where they contain what JSON cannot express."""
    try:
        return json.dumps({name: written(each) for name, each in plans.items()})
    except UnwrittenError:
        return None


def plans_of(text: str, fakes: Fakes) -> Plans:
    """Read plans from JSON, with fake tensors of the mode of `fakes`."""
    return {name: read(each, fakes.made) for name, each in json.loads(text).items()}
