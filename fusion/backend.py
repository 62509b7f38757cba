"""The `torch.compile` backend "cann_fusion": capture, fuse, lower."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch.fx as fx

from fusion._torch import Boxed, aot_plain, boxed, specialise_floats
from fusion.dump import write_graph
from fusion.facts import Facts
from fusion.language import Rule
from fusion.library import rules_for
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.prepared import supply
from fusion.report import GraphReport, match_report, tally
from fusion.stages.capture import capture, is_training
from fusion.stages.lower import handed_on, lower, route
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
        rules: the rules to choose from; None for the installed ones.
    """

    options: Options
    rules: tuple[Rule, ...] | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph; what `torch.compile` calls."""
        specialise_floats(gm)
        if is_training(example_inputs):
            warnings.warn(
                "cann-fusion fuses inference graphs only, and this one is traced for training: it runs unfused. "
                "Call the model under torch.no_grad() or torch.inference_mode(), or freeze its parameters.",
                stacklevel=2,
            )
            return aot_plain(gm, example_inputs)
        return capture(gm, example_inputs, partial(self._compile, marks(example_inputs)))

    def _compile(self, marked: Sequence[Mark | None], gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        rules = rules_for(self.options, self.rules)
        original = fx.GraphModule(gm, _copy(gm.graph))
        try:
            report = self.fuse(gm, rules, Facts(parameter_inputs(gm.graph, marked)))
        except Exception as error:  # whatever a rule does, the model runs as it came
            log.debug("fusing a graph failed", exc_info=True)
            warnings.warn(
                f"cann-fusion could not fuse a graph and runs it as it came: {type(error).__name__}: {error}. "
                "fusion.explain(model, ...) shows where; options={'disable': {rule}} leaves a rule out.",
                stacklevel=2,
            )
            return lower(original, example_inputs, route(self.options.lower))
        prepared = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(example_inputs) :]]
        run = lower(gm, [*example_inputs, *prepared], route(self.options.lower))
        run = supply(run, gm.graph, report.prepared)
        return verified(original, run) if self.options.verify else run

    def fuse(self, gm: fx.GraphModule, rules: Sequence[Rule] | None = None, facts: Facts = Facts()) -> GraphReport:
        """Rewrite one functional aten graph in place and report."""
        dump = partial(_dump, self.options.dump_dir, next(_numbers))
        dump("captured", gm.graph)
        outcome = fuse_graph(gm.graph, rules or rules_for(self.options, self.rules), self.options, facts)
        if outcome.chosen:
            gm.recompile()
        dump("fused", gm.graph)
        report = GraphReport(
            gm,
            tuple(match_report(each) for each in outcome.chosen),
            outcome.refusals,
            outcome.before,
            tally(gm.graph),
            partial(handed_on, by=route(self.options.lower)),
            outcome.prepared,
        )
        log.info("fused %d places, refused %d", len(report.matches), len(report.refusals))
        return report


@dataclass(frozen=True)
class Explainer:
    """A backend that fuses and reports, and whose graphs give fake results instead of running."""

    backend: FusionBackend
    parts: list[GraphReport]

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph to its report."""
        specialise_floats(gm)
        return capture(gm, example_inputs, partial(self._compile, marks(example_inputs)))

    def _compile(self, marked: Sequence[Mark | None], gm: fx.GraphModule, example_inputs: Iterable[Any]) -> Boxed:
        original = fx.GraphModule(gm, _copy(gm.graph))
        self.parts.append(self.backend.fuse(gm, facts=Facts(parameter_inputs(gm.graph, marked))))
        return boxed(fx.Interpreter(original).run)


def _copy(source: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    result = copied.graph_copy(source, {})
    copied.output(result)
    return copied


def _dump(folder: str, number: int, stage: str, source: fx.Graph) -> None:
    if folder:
        write_graph(Path(folder) / f"graph{number}_{stage}.txt", source)
