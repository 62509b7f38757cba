"""Exported programs: `fuse_exported` returns one that calls fused operators, `explain_exported` reports on it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from fusion._torch.exported import (
    cast_inside,
    functional,
    is_exported,
    parameters,
    return_writes,
    with_buffers,
    write_at_end,
)
from fusion._torch.tracing import copied, keep_names
from fusion.errors import OperatorError, OptionError, StageError
from fusion.facts import Facts
from fusion.frontend.backend import FusionBackend
from fusion.frontend.compilations import Captured, add, described, keeping, unfused
from fusion.frontend.expectations.compare import unmet, warn_unmet
from fusion.frontend.rerun import rerun
from fusion.graph.aliasing import name_results, outputs
from fusion.graph.origin import place_of
from fusion.language import Library, Reader, Rule
from fusion.options import Options
from fusion.planning.target import Target
from fusion.records import Prepared
from fusion.report.failures import attempted, stage, warn
from fusion.report.outcome import GraphReport
from fusion.report.report import Report
from fusion.routes.inductor_guest import decompose_added
from fusion.stages.lower import handed_on

if TYPE_CHECKING:
    from torch.export import ExportedProgram


STAY = "the program reads its Parameters elsewhere too"


def fuse_exported(
    program: ExportedProgram,
    options: Options | Mapping[str, Any] | None = None,
    rules: Library | Iterable[Rule | Reader] | None = None,
) -> ExportedProgram:
    """Return a functional program that computes the results of `program` by fused operators.

    `program` is not changed. The result runs, saves, loads, is a program for AOTInductor, and keeps dynamic shapes,
    range constraints and writes to buffers and inputs. Tensors that depend on Parameters alone are computed now and
    become buffers `prepared_<n>`; a Parameter that no call reads any more is removed from the state dict, so that
    loading weights later fails instead of having no effect. A process that loads the result calls
    `fusion.operators.ensure()` before; with `options["lower"]` "inductor" the fused operators are replaced by their
    decompositions, and nothing of this package is needed.

    Where the pass fails, the result is `program` in functional form, with a warning.

    Raises:
        OptionError: `program` is none, or an option is wrong, or checks calls, of which an exported program has none.
        OperatorError: `program` calls an operator that torch traces without the casts of autocast.
        RuleError: a rule is declared wrongly.
    """
    plain, backend = _functional(program), _backend(options, rules)
    started = perf_counter()
    report = _report(plain, backend)
    captured, seconds = Captured(lambda: report), perf_counter() - started
    warn(report.failures)
    try:
        with stage("lower"):
            fused = _program(plain, report, backend.options.lower)
    except StageError as error:
        add(unfused("fuse_exported", backend.options.target, plain.graph, str(error)))
        warn([error.failure])
        return plain
    target, made = backend.options.target, report.graph.graph
    add(described("fuse_exported", target, plain.graph, made, report, captured, seconds), report)
    compare = partial(unmet, Report(report.machine.name, (report,)), backend.options, backend.rules)
    warn_unmet(attempted("comparing fusions with the option expect", compare, ""))
    return keeping(fused, captured)


def explain_exported(
    program: ExportedProgram,
    options: Options | Mapping[str, Any] | None = None,
    rules: Library | Iterable[Rule | Reader] | None = None,
) -> Report:
    """Return the report of `fuse_exported`; nothing is computed.

    Raises:
        OptionError: an option is wrong, or checks calls, of which an exported program has none.
        OperatorError: `program` calls an operator that torch traces without the casts of autocast.
        RuleError: a rule is declared wrongly.
    """
    backend = _backend(options, rules)
    report = Report(Target.resolve(backend.options.target).name, (_report(_functional(program), backend),))
    if backend.options.expect:
        warn_unmet(unmet(report, backend.options, backend.rules))
    return report


def _backend(
    options: Options | Mapping[str, Any] | None, rules: Library | Iterable[Rule | Reader] | None
) -> FusionBackend:
    checked = Options.of(options)
    for name in ("assume", "verify"):
        if getattr(checked, name):
            raise OptionError(
                f"fusing an exported program, with option {name}: what it says is checked when a compiled graph is "
                "called, and nothing of this package sees the calls of a program; compile its module to use the option"
            )
    return FusionBackend(checked, rules)


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Return a functional program that computes what `program` does.

    Raises:
        OptionError: `program` is no exported program.
        OperatorError: `program` calls an operator that torch traces without the casts of autocast.
    """
    if not is_exported(program):
        raise OptionError(
            f"fusing an exported program: a {type(program).__name__} is none; give what torch.export.export(module, "
            "args) or torch.export.load(path) returns"
        )
    for node in cast_inside(program):
        raise OperatorError(
            f"fusing an exported program: {node.target} {place_of(node)} is called under autocast, which casts its "
            "operands inside; torch's run_decompositions leaves these casts out; cast the operands in the model, or "
            "write the call by torch.matmul"
        )
    return functional(program)


def _report(plain: ExportedProgram, backend: FusionBackend) -> GraphReport:
    """Fuse a copy of the graph of the functional program `plain` by `backend`, and report."""
    gm = fx.GraphModule(plain.graph_module, copied(plain.graph))
    facts = Facts(parameters(plain.graph_signature))
    try:
        with stage("capture"):
            write_at_end(gm, plain.graph_signature)
            captured = fx.GraphModule(gm, copied(gm.graph))
        again = rerun(captured, lambda assume: facts, backend.options, backend.rules, in_place=False)
        report = replace(backend.fuse(gm, facts, in_place=False), rerun=again)
    except StageError as error:
        report = backend.failed(gm, error)
    dropped = {node.name for node in gm.graph.find_nodes(op="placeholder") if not node.users}
    prepared = tuple(_as_buffer(each, dropped) for each in report.prepared)
    return replace(report, prepared=prepared, hand_on=partial(handed_on, by=backend.options.lower))


def _as_buffer(prepared: Prepared, dropped: Set[str]) -> Prepared:
    """Return the record of a buffer, which has no cost if all Parameters that it is computed from are `dropped`."""
    leave = prepared.sources and dropped >= set(prepared.sources)  # a tensor computed from constants has no sources
    return replace(prepared, copied="" if leave else prepared.copied or STAY)


def _program(plain: ExportedProgram, report: GraphReport, lower: str) -> ExportedProgram:
    """Return `plain` with a copy of the graph of `report`, in which prepared tensors are buffers."""
    gm = copy.deepcopy(report.graph)
    keep_names(report.graph.graph, gm.graph)
    if lower == "inductor":
        decompose_added(gm.graph, {})
    return_writes(gm, plain.graph_signature)
    name_results(gm.graph, [node.name for node in outputs(plain.graph)])
    targets, tensors = plain.graph_signature.inputs_to_parameters, plain.state_dict
    with torch.no_grad():
        made = {each.name: each.module(*(tensors[targets[name]] for name in each.sources)) for each in report.prepared}
    return with_buffers(plain, gm, made)
