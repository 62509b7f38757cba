"""The `torch.compile` backend "cann_fusion": capture, fuse, lower."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from fusion._torch import Boxed, aot_plain, argument_path, boxed, outside_modes, specialise_floats
from fusion.assumptions import ArgumentPath, assumed, checks_of, facts_of
from fusion.dump import write_graph
from fusion.errors import FusionError, StageError
from fusion.facts import Facts
from fusion.failures import stage, warn
from fusion.language import Library, Rule
from fusion.library import library_for
from fusion.options import Options
from fusion.pipeline import Outcome, fuse_graph
from fusion.prepared import supply
from fusion.regions import inline_regions
from fusion.report import GraphReport, match_report, tally, unfused
from fusion.results import returned, strides_of
from fusion.stages.capture import capture, is_training
from fusion.stages.lower import handed_on, lower, route
from fusion.target import Target
from fusion.verification import verified
from fusion.weights import Mark, marks, parameter_inputs

log = logging.getLogger("fusion")
_numbers = count()


def cann_fusion(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo; the function behind `torch.compile(model, backend="cann_fusion", options={...})`.

    `mode` is accepted because transformers' `generate` passes it; how graphs run is decided by `options["lower"]`.

    Raises:
        FusionError: the options, the rules or a vendor compiler cannot be used.
    """
    return FusionBackend(Options.of(options))(gm, example_inputs)


@dataclass(frozen=True)
class FusionBackend:
    """A backend with its options and, if they are not the installed ones, its rules.

    Attributes:
        options: how models are fused.
        rules: the rules to choose from, alone or with readers of their own; None for the installed ones.
    """

    options: Options
    rules: Library | tuple[Rule, ...] | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph; what `torch.compile` calls."""
        specialise_floats(gm)
        if is_training(gm, example_inputs):
            warnings.warn(
                "cann-fusion fuses inference graphs only, and this one is traced for training: it runs unfused. "
                "Call the model under torch.no_grad() or torch.inference_mode(), or freeze its parameters.",
                stacklevel=2,
            )
            return aot_plain(gm, example_inputs)
        inline_regions(gm)
        known = partial(known_facts, argument_paths(gm), marks(example_inputs), returned(gm), self.options)
        return capture(gm, example_inputs, partial(self._compile, known))

    def _compile(self, known: Callable[[fx.Graph], Facts], gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        original = fx.GraphModule(gm, _copy(gm.graph))
        try:
            with stage("capture"):
                facts = known(gm.graph)
            report = self.fuse(gm, facts)
        except FusionError as error:  # whatever fails, the model runs as it came
            return self._as_it_came(original, example_inputs, error)
        try:
            run = self._lowered(gm, example_inputs)
        except StageError as error:
            return self._as_it_came(original, example_inputs, error)
        warn(report.failures)
        run = supply(run, gm.graph, report.prepared)
        if self.options.verify:
            run = verified(original, run)
        checks = checks_of(gm.graph, facts, report.assumptions)
        return assumed(run, partial(self._unfused, original, example_inputs), checks) if checks else run

    def _as_it_came(self, original: fx.GraphModule, example_inputs: Sequence[Any], error: FusionError) -> Boxed:
        """The plain graph, with one warning; raises where the compiler is at fault, not what was fused."""
        log.debug("fusing a graph failed", exc_info=error)
        run = lower(original, example_inputs, route(self.options.lower))
        if isinstance(error, StageError):
            warn([error.failure])
        else:
            warnings.warn(f"cann-fusion could not fuse a graph and runs it as it came: {error}", stacklevel=2)
        return run

    def _lowered(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        prepared = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(example_inputs) :]]
        with stage("lower"):
            return lower(gm, [*example_inputs, *prepared], route(self.options.lower))

    def _unfused(self, original: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """The graph as it came, compiled after Dynamo has set its guards: with symbolic sizes only node by node,
        because a compiler may ask for another guard, which nothing would check."""
        symbolic = any(isinstance(node.meta.get("val"), torch.SymInt) for node in original.graph.nodes)
        with outside_modes():
            return lower(original, example_inputs, "eager" if symbolic else route(self.options.lower))

    def fuse(self, gm: fx.GraphModule, facts: Facts = Facts()) -> GraphReport:
        """Rewrite one functional aten graph in place and report.

        Raises:
            FusionError: the options or a rule cannot be used.
            StageError: a stage failed; the graph is not to be used.
        """
        dump = partial(_dump, self.options.dump_dir, next(_numbers))
        dump("captured", gm.graph)
        outcome = fuse_graph(gm.graph, library_for(self.options, self.rules), self.options, facts)
        if outcome.chosen:
            gm.recompile()
        dump("fused", gm.graph)
        with stage("report"):
            report = self._report(gm, outcome, facts)
        log.info("fused %d places, refused %d", len(report.matches), len(report.refusals))
        return report

    def _report(self, gm: fx.GraphModule, outcome: Outcome, facts: Facts) -> GraphReport:
        machine = Target.resolve(self.options.target)
        return GraphReport(
            gm,
            tuple(match_report(each, machine) for each in outcome.chosen),
            outcome.refusals,
            outcome.before,
            tally(gm.graph),
            partial(handed_on, by=route(self.options.lower)),
            {facts.arguments.get(name, name): facts.assumed[name] for name in sorted(outcome.assumed)},
            outcome.prepared,
            outcome.host_reads,
            outcome.result_copies,
            outcome.failures,
        )


@dataclass(frozen=True)
class Explainer:
    """A backend that fuses and reports, and whose graphs give fake results instead of running.

    Attributes:
        backend: what fuses.
        parts: where the reports go.
        positional: names of the positional arguments of what is explained.
    """

    backend: FusionBackend
    parts: list[GraphReport]
    positional: tuple[str, ...] = ()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph to its report."""
        specialise_floats(gm)
        inline_regions(gm)
        paths = [self._named(path) for path in argument_paths(gm)]
        known = partial(known_facts, paths, marks(example_inputs), returned(gm), self.backend.options)
        return capture(gm, example_inputs, partial(self._compile, known))

    def _compile(self, known: Callable[[fx.Graph], Facts], gm: fx.GraphModule, example_inputs: Iterable[Any]) -> Boxed:
        original = fx.GraphModule(gm, _copy(gm.graph))
        try:
            with stage("capture"):
                facts = known(gm.graph)
            self.parts.append(self.backend.fuse(gm, facts=facts))
        except StageError as error:
            hand_on = partial(handed_on, by=route(self.backend.options.lower))
            self.parts.append(unfused(original, error.failure, hand_on))
        return boxed(fx.Interpreter(original).run)

    def _named(self, path: ArgumentPath) -> ArgumentPath:
        """The path from the name of a positional argument, which is called as item of a tuple here."""
        if path[:1] != ("args",) or int(path[1]) >= len(self.positional):
            return path
        return self.positional[int(path[1])], *path[2:]


def known_facts(
    paths: Sequence[ArgumentPath],
    marked: Sequence[Mark | None],
    results: Sequence[Any],
    options: Options,
    source: fx.Graph,
) -> Facts:
    """What is known of a captured graph: which inputs hold Parameters, what the user says of them, how results lie.

    `results` are those of the graph of Dynamo that it was captured from.
    """
    facts = facts_of(source, paths, options.assume)
    return replace(facts, parameters=parameter_inputs(source, marked), strides=strides_of(results, source))


def argument_paths(gm: fx.GraphModule) -> list[ArgumentPath]:
    """For each input of a graph of Dynamo, where it is found in the arguments of the compiled function, if there."""
    return [argument_path(node) for node in gm.graph.find_nodes(op="placeholder")]


def _copy(source: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    result = copied.graph_copy(source, {})
    copied.output(result)
    return copied


def _dump(folder: str, number: int, name: str, source: fx.Graph) -> None:
    if folder:
        with stage("dump"):
            write_graph(Path(folder) / f"graph{number}_{name}.txt", source)
