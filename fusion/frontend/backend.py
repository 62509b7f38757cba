"""The `torch.compile` backend "cann_fusion": capture, fuse, lower; and `fuse`, a decorator that compiles with it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, TypeVar, overload

import torch
import torch.fx as fx

from fusion._torch.garbage_collection import uncollected
from fusion._torch.inductor import inductor_mode
from fusion._torch.tracing import Boxed, aot_plain, copied, inline_regions, outside_modes, specialise_floats
from fusion.caching import graph_cache
from fusion.errors import ExpectationWarning, FusionError, OptionError, StageError
from fusion.facts import Facts
from fusion.frontend.compilations import TRAINING, Captured, add, described, keeping, unfused
from fusion.frontend.dumps import dump
from fusion.frontend.expectations.compare import unmet, warn_unmet
from fusion.frontend.library import completed, library_for
from fusion.frontend.regions import Place, region_reports, regions_in
from fusion.frontend.rerun import rerun
from fusion.inputs.assumptions import assumed, checks_of, loosened
from fusion.inputs.dynamo_inputs import Known
from fusion.language import Library, Reader, Rule
from fusion.options import Options
from fusion.pipeline import fuse_graph, plan_lower
from fusion.planning.target import Target
from fusion.report.failures import attempted, stage, warn
from fusion.report.outcome import GraphReport, Outcome, counted
from fusion.report.progress import watched
from fusion.report.refusals import rule_names
from fusion.report.report import Report
from fusion.routes.hints import hinted
from fusion.routes.vendor import converts_to_ge
from fusion.runtime.prepared_weights import supply
from fusion.runtime.verification import Subject, verified
from fusion.stages.capture import capture, is_training
from fusion.stages.lower import guests_idle, handed_on, lower, route
from fusion.stages.verify import contract, verify

log = logging.getLogger("fusion")
_numbers = count()
Model = TypeVar("Model", bound=Callable[..., Any])


def cann_fusion(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo; the function behind `torch.compile(model, backend="cann_fusion", options={...})`."""
    return _compile_by(lambda: FusionBackend().changed(options, mode), gm, example_inputs)


def _compile_by(
    make: Callable[[], FusionBackend], gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile one graph by the backend that `make` returns.

    Where an option or a rule is wrong, the returned function raises the `FusionError`, so that the caller sees the
    error even if Dynamo suppresses errors; likewise an `ExpectationWarning` that a filter makes an error.
    """
    try:
        backend = make()
    except FusionError as error:
        return partial(_raise, error.with_traceback(None))
    try:
        return backend.compile(gm, example_inputs)
    except ExpectationWarning as error:
        return partial(_raise, error.with_traceback(None))


def _raise(error: Exception, *inputs: Any) -> Any:
    raise error


@overload
def fuse(model: Model, /) -> Model: ...
@overload
def fuse(
    model: None = None,
    /,
    *,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **fields: Any,
) -> Callable[[Model], Model]: ...
def fuse(
    model: Callable[..., Any] | None = None,
    /,
    *,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **fields: Any,
) -> Any:
    """Compile the decorated function, method or module with the fusion backend, at its first call.

    Works bare (`@fuse`) or with options (`@fuse(target="ascend910_93")`, `@fuse(options={...})`), on a function, on
    `forward` inside a class body (all instances share the compiled code, each with its own weights), and on a module
    instance (`model = fuse(model)`).

    Raises:
        OptionError: an option is not known, or has a value that it cannot have.
    """
    if model is not None and not callable(model):
        raise OptionError(f"decorating: {model!r} is no model; give options by name, as fuse(options={{...}})")
    backend = FusionBackend(Options.of(options, **fields))

    def decorate(target: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(target, backend=backend, dynamic=dynamic, fullgraph=fullgraph)

    return decorate if model is None else decorate(model)


@dataclass(frozen=True)
class FusionBackend:
    """Backend of `torch.compile` with its options and, if they are not the installed ones, its rules.

    Attributes:
        options: the options, or a mapping of names to values.
        rules: the rules to choose from: a library, as `fusion.installed() + [MyRule()]`, or rules and readers, to which
            the installed readers are added; None for the installed ones.
        settings: settings of the vendor's compiler that runs the graphs, see `fusion.integrations`; None for defaults.

    Raises:
        OptionError: an option has a value that is not accepted, or names a rule that does not exist.
        RuleError: a rule is declared wrongly.
    """

    options: Options = Options()
    rules: Library | Iterable[Rule | Reader] | None = None
    settings: Any = None

    def __post_init__(self) -> None:
        """Check options and rules before anything is compiled."""
        object.__setattr__(self, "options", Options.of(self.options))
        if self.rules is not None:
            object.__setattr__(self, "rules", completed(self.rules))
        library_for(self.options, self.rules)

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options | Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph; `options` and `mode`, if `torch.compile` passes them, replace those of this backend."""
        return _compile_by(lambda: self.changed(options, mode), gm, example_inputs)

    def changed(self, options: Options | Mapping[str, Any] | None, mode: str | None) -> FusionBackend:
        """Copy this backend with other options and another `mode`, each if not None.

        `options` replaces all options if an `Options`, and those that are named if a mapping.

        Raises:
            OptionError: one of them is wrong.
        """
        more = {} if mode is None else {"mode": mode}
        if options is None and not more:
            return self
        given = Options.of(options, **more)
        if isinstance(options, Options):
            return replace(self, options=given)
        named = {name: getattr(given, name) for name in (*(options or ()), *more)}
        return replace(self, options=replace(self.options, **named))

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph of Dynamo; a graph that is traced for training runs unfused, with a warning."""
        specialise_floats(gm)
        _warn_of_mode(self.options)
        if is_training(gm, example_inputs):
            warnings.warn(
                "cann-fusion fuses inference graphs only, and this one is traced for training: it runs unfused. "
                "Call the model under torch.no_grad() or torch.inference_mode(), or freeze its parameters.",
                stacklevel=2,
            )
            add(unfused("backend", self.options.target, gm.graph, TRAINING, is_captured=False))
            return aot_plain(gm, example_inputs)
        inline_regions(gm)
        return capture(gm, example_inputs, partial(self._compile, Known.from_dynamo(gm, example_inputs)))

    def _compile(self, known: Known, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        with watched("capture", self.options.progress):
            return self._compiled(known, gm, example_inputs)

    def _compiled(self, known: Known, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        original = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        try:
            with stage("capture"):
                facts = known.facts(gm.graph, self.options.assume)
        except FusionError as error:  # the model must run whatever fails
            return self._without_fusion(original, example_inputs, error)
        return self._fused(known, facts, gm, original, example_inputs)

    def _fused(
        self,
        known: Known,
        facts: Facts,
        gm: fx.GraphModule,
        original: fx.GraphModule,
        example_inputs: Sequence[Any],
    ) -> Boxed:
        """Fuse and lower `gm`, a copy of `original`, and check the assumptions in `facts` at each call."""
        started = perf_counter()
        try:
            outcome = self.outcome(gm, facts, original.graph)
        except FusionError as error:
            return self._without_fusion(original, example_inputs, error)
        seconds = perf_counter() - started
        captured = Captured(partial(self._reported_later, known, facts, original))
        listed = described("backend", self.options.target, original.graph, gm.graph, outcome, captured, seconds)
        lacks = attempted("comparing fusions with the option expect", partial(self._lacks, outcome, known), "")
        prepared = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(example_inputs) :]]
        subject = self._subject(known, facts, original, gm, outcome) if self.options.verify else None
        try:
            with stage("lower"):
                run = self._lowered(self._hinted(gm, facts, outcome), [*example_inputs, *prepared])
        except StageError as error:
            return self._without_fusion(original, example_inputs, error)
        add(listed, outcome)
        warn(outcome.failures)
        warn_unmet(lacks)
        run = supply(run, gm.graph, outcome.prepared, known.names_in(gm.graph))
        if subject is not None:
            run = verified(subject, run)
        checks = checks_of(gm.graph, facts, outcome.assumed)
        if checks:
            looser, again = loosened(original.graph, facts), None
            if looser != facts and not _is_symbolic(original.graph):
                again = partial(self._fused_again, known, looser, original, example_inputs)
            run = assumed(run, partial(self._unfused, original, example_inputs), checks, again)
        return keeping(run, captured)

    def _lacks(self, outcome: Outcome, known: Known) -> str:
        """Describe the expectations that `outcome` does not meet; "" if it meets all, as a replayed one does."""
        if not isinstance(outcome, GraphReport):
            return ""
        return unmet(Report(outcome.machine.name, (outcome,)), self.options, self.rules, known.is_complete)

    def _fused_again(
        self, known: Known, facts: Facts, original: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Boxed:
        """Fuse a fresh copy of `original` by other assumptions in `facts`, after Dynamo has set its guards."""
        fresh = fx.GraphModule(original, copy.deepcopy(original.graph))
        with outside_modes():
            return self._fused(known, facts, fresh, original, example_inputs)

    def _subject(
        self, known: Known, facts: Facts, original: fx.GraphModule, gm: fx.GraphModule, outcome: Outcome
    ) -> Subject:
        """Collect what the verification of `gm`, fused from `original` with `outcome`, needs; `gm` is copied, as
        compilers may change it.
        """

        def again(fuel: int | None) -> tuple[fx.GraphModule, Outcome]:
            fresh = fx.GraphModule(original, copy.deepcopy(original.graph))
            options = self.options if fuel is None else replace(self.options, fuel=fuel)
            made = fuse_graph(fresh.graph, library_for(options, self.rules), options, facts, with_refusals=False)
            fresh.recompile()
            return fresh, made

        fused = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        is_compiled = route(self.options.lower) != "eager"
        names = known.named(original.graph)
        return Subject(original, fused, outcome.prepared, names, is_compiled, again, self.options.dump_dir)

    def _without_fusion(self, original: fx.GraphModule, example_inputs: Sequence[Any], error: FusionError) -> Boxed:
        """Compile `original` unfused, and warn once of the `error` of the pass; errors of the compiler are
        passed on.
        """
        log.debug("fusing a graph failed", exc_info=error)
        add(unfused("backend", self.options.target, original.graph, str(error)))
        run = self._lowered(original, example_inputs)
        if isinstance(error, StageError):
            warn([error.failure])
        else:
            warnings.warn(f"cann-fusion could not fuse a graph and runs it as it came: {error}", stacklevel=2)
        return run

    def _unfused(self, original: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile `original` as it is, after Dynamo has set its guards.

        Graphs of symbolic sizes are interpreted: a compiler may add a guard, which nothing would check.
        """
        with outside_modes():
            return self._lowered(original, example_inputs, "eager" if _is_symbolic(original.graph) else None)

    def _lowered(self, gm: fx.GraphModule, example_inputs: Sequence[Any], by: str | None = None) -> Boxed:
        """Compile a graph by the compiler `by`, that of the options if None: Inductor in the mode of the options."""
        by = by or route(self.options.lower)
        with inductor_mode(self.options.mode) if by == "inductor" else nullcontext(), guests_idle():
            return lower(gm, example_inputs, by, self.settings)

    def _hinted(self, gm: fx.GraphModule, facts: Facts, outcome: Outcome) -> fx.GraphModule:
        """Return `gm` with the hints of the options where torchair compiles it to GE, which alone reads them."""
        if not self.options.hints or route(self.options.lower) != "torchair" or not converts_to_ge(self.settings):
            return gm
        weights = facts.parameters.union(each.name for each in outcome.prepared)
        return hinted(gm, self.options.hints, weights, Target.resolve(self.options.target))

    def outcome(self, gm: fx.GraphModule, facts: Facts, original: fx.Graph) -> Outcome:
        """Fuse `gm` in place, replaying the rewrites of an equal graph where the cache has one.

        Where fusions are expected, the graph is searched anew: the cache does not tell what fused, or why not.

        Raises:
            FusionError: the options or a rule cannot be used.
            StageError: a stage failed; the graph is not to be used.
        """
        with stage("report"):
            regions = regions_in(gm.graph)
        if self.options.expect or regions:
            return self.fuse(gm, facts, original, places=regions)
        with stage("graph_cache"), uncollected():
            entry = graph_cache.entry(gm.graph, facts, library_for(self.options, self.rules), self.options)
            known = entry and entry.replayed(original, partial(_check_replayed, gm.graph, original))
        if known is not None:
            return known
        outcome = self.fuse(gm, facts, original, with_refusals=False, places=regions)
        if entry is not None:
            with stage("graph_cache"), uncollected():
                entry.keep(outcome)
        return outcome

    def fuse(
        self,
        gm: fx.GraphModule,
        facts: Facts = Facts(),
        original: fx.Graph | None = None,
        with_refusals: bool = True,
        in_place: bool = True,
        places: Sequence[Place] | None = None,
    ) -> GraphReport:
        """Rewrite one functional aten graph in place and report; the module is not recompiled.

        Args:
            gm: the graph.
            facts: the facts about its inputs.
            original: a copy of the graph, name for name, where the caller has one.
            with_refusals: False to skip the work on refusals, which compilations do not report.
            in_place: False to leave the graph functional.
            places: the regions of the graph, where the caller has listed them.

        Raises:
            FusionError: the options or a rule cannot be used.
            StageError: a stage failed; the graph is not to be used.
        """
        if places is None:
            with stage("report"):
                places = regions_in(gm.graph)
        number = next(_numbers)
        dumped = dump(self.options.dump_dir, f"graph{number}_captured.txt", gm.graph)
        library = library_for(self.options, self.rules)
        before = None
        if with_refusals:
            before = fx.GraphModule(gm, copied(gm.graph) if original is None else original)
        outcome = fuse_graph(gm.graph, library, self.options, facts, original, with_refusals, in_place)
        with stage("report"):
            regions = region_reports(places, outcome, self.options, self.rules) if places else ()
        if dumped:
            dump(self.options.dump_dir, f"graph{number}_fused.txt", gm.graph)
        machine = Target.resolve(self.options.target)
        names = rule_names(library) if with_refusals else {}
        return GraphReport(
            **vars(outcome), graph=gm, machine=machine, hand_on=self.hand_on(), original=before, rule_of=names,
            regions=regions, compiler=route(plan_lower(self.options, machine)),
        )  # fmt: skip

    def reported(self, known: Known, facts: Facts, gm: fx.GraphModule, original: fx.GraphModule) -> GraphReport:
        """Fuse `gm`, a copy of `original`, and report with the names of inputs and results, and the pass to be run
        again.

        Raises:
            StageError: a stage failed; the graph is not to be used.
        """
        report = self.fuse(gm, facts, original.graph)
        gm.recompile()
        inputs, results = known.named(original.graph)
        again = rerun(original, partial(known.facts, original.graph), self.options, self.rules)
        return replace(report, inputs=inputs, results=results, counted=known.counted, rerun=again)

    def _reported_later(self, known: Known, facts: Facts, original: fx.GraphModule) -> GraphReport:
        """Report on `original`, which is not changed, after it was compiled."""
        gm, before = (fx.GraphModule(original, copied(original.graph)) for _ in range(2))
        quiet = replace(self, options=replace(self.options, dump_dir="", progress=False))
        try:
            with outside_modes():
                return quiet.reported(known, facts, gm, before)
        except StageError as error:
            return quiet.failed(original, error)

    def failed(self, gm: fx.GraphModule, error: StageError) -> GraphReport:
        """Return the report of the unchanged graph `gm`, whose only content is the `error` of a stage."""
        outcome = Outcome(facts=Facts(extensible=True), before=counted(gm.graph), failures=(error.failure,))
        machine = Target.resolve(self.options.target)
        return GraphReport(**vars(outcome), graph=gm, machine=machine, hand_on=self.hand_on(), original=gm)

    def hand_on(self) -> Callable[[fx.GraphModule], fx.GraphModule]:
        """Return a function that turns a rewritten graph into the one that the compiler on this machine gets, see
        `handed_on`.
        """
        return partial(handed_on, by=route(self.options.lower))


def _is_symbolic(graph: fx.Graph) -> bool:
    """Return True if a node of `graph` is a symbolic size."""
    return any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.nodes)


def _check_replayed(source: fx.Graph, original: fx.Graph, outcome: Outcome) -> None:
    """Require that `source`, rewritten from the cache with `outcome`, has the inputs, results and writes of `original`.

    Raises:
        VerificationError: one of them differs.
    """
    verify(source, contract(original, outcome.facts.strides), [], [each.name for each in outcome.prepared])


def _warn_of_mode(options: Options) -> None:
    """Warn where the mode has no effect, as the compiler that runs graphs here has none."""
    by = route(options.lower)
    if options.mode != "default" and by != "inductor":
        warnings.warn(
            f"cann-fusion runs fused graphs by {by!r} here, and mode={options.mode!r}, a mode of Inductor, changes "
            "nothing. Set option lower to 'inductor', or on an NPU to 'npugraph_ex', which captures graphs.",
            stacklevel=2,
        )
