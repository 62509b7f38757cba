"""The pipeline: the one place that knows the order of the stages.

canonicalise → read → match → plan → select → rewrite → prepare → verify → reinplace → verify
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.fx as fx

from fusion import operators
from fusion._torch import higher_order, refill
from fusion.errors import Failure
from fusion.facts import Facts
from fusion.failures import stage
from fusion.graph import Graph
from fusion.language import Library, Refused, Rule
from fusion.options import Options
from fusion.recording import Fakes
from fusion.records import Candidate, Refusal
from fusion.report import Outcome, tally
from fusion.stages.canonicalise import canonicalise
from fusion.stages.host_reads import read_on_host
from fusion.stages.match import match
from fusion.stages.plan import Planner
from fusion.stages.prepare import prepare
from fusion.stages.read import read
from fusion.stages.reinplace import reinplace
from fusion.stages.rewrite import rewrite
from fusion.stages.select import TIE, select
from fusion.stages.verify import contract, verify
from fusion.target import Target

REFERENCE = "ascend910_93"  # the chip whose refusals a host report lists as well


def fuse_graph(source: fx.Graph, library: Library, options: Options, facts: Facts = Facts()) -> Outcome:
    """Rewrite one functional aten graph in place; every node outside the chosen matches stays the same object.

    A rule that raises is refused where it does so; the others go on.

    Raises:
        FusionError: the graph carries no shapes.
        StageError: a stage failed; the graph is as it came.
    """
    with stage("operators"):
        operators.ensure()
        target = Target.resolve(options.target)
    elsewhere = [] if target.is_npu else [Target.named(REFERENCE)]
    with stage("canonicalise"):
        graph = canonicalise(source, facts)
    with stage("read"):
        graph, unread = read(graph, library.readers)
    with stage("match"):
        found = match(graph, library.rules, options.unsafe)
    lowering = plan_lower(options, target)
    with stage("plan"):
        planner = Planner(graph, Fakes(graph), target, lowering, elsewhere, options)
        candidates = planner.candidates(found.matches)
    with stage("select"):
        chosen = select(candidates, graph, options.fuel)
    with stage("report"):
        refusals = _worth_telling([*found.refusals, *planner.refusals, *_useless(candidates)], chosen, found.sound)
        counted = tally(source, chosen)
    failures = _apart([*unread, *found.failures, *planner.failures])
    outcome = Outcome(facts, tuple(chosen), (*refusals, *_not_entered(source)), counted, failures=failures)
    return _rewritten(graph, outcome, planner.fakes, options, target) if chosen else outcome


def _rewritten(graph: Graph, outcome: Outcome, fakes: Fakes, options: Options, target: Target) -> Outcome:
    """Put into the graph what was chosen; where that fails, the graph is again as it came."""
    source, facts, lowering = graph.source, outcome.facts, plan_lower(options, target)
    kept = copy.deepcopy(source)
    try:
        with stage("rewrite"):
            before = contract(source, facts.strides)
            done, copies = rewrite(graph, outcome.chosen, fakes)
        with stage("prepare"):
            prepared = prepare(source, facts, options.prepack)
        names = [each.name for each in prepared]
        with stage("verify"):
            verify(source, before, [node for each in done for node in each.added], names)
        with stage("reinplace"):
            in_place = reinplace(source, lowering)
            waits = read_on_host(source, lowering) if target.is_npu else 0
        with stage("verify"):
            verify(source, before, [], names)
    except BaseException:
        refill(source, kept)
        raise
    relied = frozenset(name for each in outcome.chosen for name in each.match.relies)
    return replace(
        outcome, assumed=relied, in_place=in_place, prepared=prepared, host_reads=waits, result_copies=copies
    )


def _apart(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """The first of those that differ in nothing but their place."""
    return tuple({(each.stage, each.rule, each.error): each for each in reversed(failures)}.values())[::-1]


def _not_entered(source: fx.Graph) -> list[Refusal]:
    """The calls that keep code as graphs of their own."""
    reason = "the code inside is not entered: it stays a graph of its own, as it came"
    return [Refusal(higher_order(node.target), reason, node) for node in source.nodes if _calls_graphs(node)]


def _calls_graphs(node: fx.Node) -> bool:
    held = (each for each in node.all_input_nodes if each.op == "get_attr")
    return bool(higher_order(node.target)) and any(not isinstance(each.meta.get("val"), torch.Tensor) for each in held)


def plan_lower(options: Options, target: Target) -> str:
    """The compiler that fusions are planned for: torchair on an Ascend target unless the user says otherwise.

    Inductor launches the vendor's operators as an interpreter does.
    """
    if options.plan_lower and options.plan_lower != "auto":
        return "eager" if options.plan_lower == "inductor" and target.is_npu else options.plan_lower
    return "torchair" if target.is_npu else options.lower


def _useless(candidates: Sequence[Candidate]) -> list[Refusal]:
    """The matches that the target could run otherwise, but slower; what takes as long is left as it is."""
    template = "by {lowering} it would take about {lost:.1f} us more, not less"
    slower = [each for each in candidates if each.benefit < -TIE]
    causes = [Refused(template, {"lowering": each.lowering, "lost": -each.benefit}) for each in slower]
    return [Refusal(each.match.rule.name, cause, each.match.node) for each, cause in zip(slower, causes, strict=True)]


def _worth_telling(refusals: Sequence[Refusal], chosen: Sequence[Candidate], rules: Sequence[Rule]) -> list[Refusal]:
    """Without those inside something that was fused after all, unless a larger fusion was refused around it.

    What a rule takes in one of its variants may be less than it would have taken in another.
    """
    gone = {node for candidate in chosen for node in candidate.dying}
    made = {node: each.match for each in chosen for makers in each.match.roots for node in makers}
    uses = {rule.name: rule.uses() for rule in rules}

    def larger(each: Refusal) -> bool:
        by = made.get(each.node)
        if by is None:
            return False
        varied = by.rule.name == each.rule and each.variant not in ("", by.variant)
        return varied or bool(each.target) or by.rule.name in uses.get(each.rule, ())

    told = [each for each in refusals if each.node not in gone or larger(each)]
    unique = {(each.rule, each.reason, each.node, each.target): each for each in told}
    return list(unique.values())
