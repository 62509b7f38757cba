"""Outcome of the pass for one graph, and its counts: launches by module, rewrites, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch.fx as fx

from fusion._torch.pickled import pack, unpack
from fusion._torch.tensors import byte_count
from fusion.errors import Failure
from fusion.facts import Facts, plain
from fusion.graph.launches import is_bookkeeping, is_launch
from fusion.graph.origin import location, module_path
from fusion.graph.subgraphs import bodies
from fusion.language import Rule, call
from fusion.operators import ensure
from fusion.planning.target import Target
from fusion.records import Candidate, Prepared, Refusal
from fusion.report.copied_inputs import Inputs
from fusion.report.failures import raised
from fusion.report.regions import RegionReport
from fusion.report.trace import Trace, traced


@dataclass(frozen=True)
class Tally:
    """Live calls of one module: `launches` on data, `bookkeeping` on positions, masks and counts alone."""

    launches: int = 0
    bookkeeping: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.launches + other.launches, self.bookkeeping + other.bookkeeping)


@dataclass(frozen=True)
class MatchReport:
    """One rewrite.

    Attributes:
        rule: name of the rule.
        lowering: name of the lowering that was chosen.
        module: path of the module of the first result.
        where: `file:line` in the model's code.
        saved: launches saved.
        benefit: predicted microseconds saved on the target.
        remark: the rule's remark on the choice, or "".
    """

    rule: str
    lowering: str
    module: str
    where: str
    saved: int
    benefit: float
    remark: str = ""


@dataclass(frozen=True)
class LayerReport:
    """Counts of one module path before and after the rewrites."""

    before: Tally = field(default_factory=Tally)
    after: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Outcome:
    """Outcome of the pass for one graph.

    Attributes:
        facts: the facts about its inputs.
        chosen: the rewrites, in the order of the graph.
        refusals: fusions that were refused, with the reasons; empty where no report was requested.
        before: live calls per module before; calls that a rewrite replaces count for the module of its first result.
        assumed: inputs whose assumption a rewrite relies on: the graph may run only behind a check at each call.
        in_place: names of the `copy_` nodes that in-place writes have replaced.
        prepared: the further inputs of the rewritten graph, computed from Parameters once.
        host_reads: number of times that a call synchronises the device to read lengths on the host (option `lengths`).
        result_copies: number of copies per call that give results the strides that they have in the model.
        is_replayed: True if the graph was rewritten as an equal one was, without a search; then `before` is empty.
        match_count: number of places at which a form of a rule was found, equal layers once; 0 for a replayed graph.
        refused_count: number of these that no lowering takes on the target.
        failures: errors: of a stage, after which the graph is unchanged, or of rules, each dropped once.
    """

    facts: Facts = field(default_factory=Facts)
    chosen: tuple[Candidate, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    before: Mapping[str, Tally] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    in_place: tuple[str, ...] = ()
    prepared: tuple[Prepared, ...] = ()
    host_reads: int = 0
    result_copies: int = 0
    is_replayed: bool = False
    match_count: int = 0
    refused_count: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def unprepared(self) -> str:
        """Tensors computed from Parameters that are not prepared, and the reason; "" where all are."""
        if not self.facts.prepares:
            return (
                "anything: FusionPass is a guest of a compiler whose code looks up no prepared weights "
                "(docs/guests.md), or the graph reads no Parameters. Weights are joined, transposed or cast at every "
                "call or not at all; the backend cann_fusion does this once"
            )
        if self.facts.wrapped:
            first, more = self.facts.wrapped[0], len(self.facts.wrapped) - 1
            several = f"{first} and {more} more: they wrap" if more else f"{first}: it wraps"
            return f"{several} other tensors (DTensor, a quantised subclass), which are no Parameters"
        return ""


@dataclass(frozen=True)
class Rerun:
    """The pass, to be run again over edited copies of a graph.

    Attributes:
        captured: the graph as it was captured.
        fuse: rewrites a copy of that graph in place; keywords replace options.
        masks: names for the option assume of the inputs that may be masks.
    """

    captured: fx.GraphModule
    fuse: Callable[..., Outcome]
    masks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphReport(Outcome):
    """Outcome for one graph, with that graph; derived attributes are computed when they are read.

    Reports pickle, but for `rerun` and `chosen`, whose candidates refer to the search: `matches` has their reports.

    Attributes:
        graph: the rewritten graph, with real operator names, before lowering.
        machine: the target.
        hand_on: converts the graph to that for the compiler that runs it.
        compiler: the compiler that the graph is planned for.
        regions: the regions in which the model's author expects a fusion.
        original: a copy of the graph before the rewrites; None where no report was requested.
        rule_of: by the name that a refusal has, the name of a rule.
        inputs: the names in the model of the inputs of the graph before it was rewritten, where they are known.
        results: the names in the model of its results, where they are known.
        counted: the attributes that the call sets to Python numbers: the graph is of the numbers that they had.
        rerun: the pass to be run again, for changes of the model; None where the report is not of `explain`.
    """

    graph: fx.GraphModule
    machine: Target
    hand_on: Callable[[fx.GraphModule], fx.GraphModule]
    compiler: str = "eager"
    regions: tuple[RegionReport, ...] = ()
    original: fx.GraphModule | None = None
    rule_of: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    rerun: Rerun | None = None

    def __repr__(self) -> str:
        """Name the target and count the entries: a full representation would print the graph many times."""
        return f"GraphReport({self.machine.name}: {len(self.chosen)} rewrites, {len(self.refusals)} refusals)"

    def __getstate__(self) -> dict[str, Any]:
        computed = {"matches": self.matches, "after": self.after, "trace": self.trace}
        return {**vars(self), **computed, "chosen": (), "graph": pack(self.graph), "original": None, "rerun": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ensure()  # the graph calls operators by their names
        vars(self).update(state, graph=unpack(state["graph"]))

    @cached_property
    def matches(self) -> tuple[MatchReport, ...]:
        """Reports of the rewrites."""
        return tuple(match_report(each, self.machine) for each in self.chosen)

    @cached_property
    def trace(self) -> Trace:
        """Calls before and after, with the lines that were replaced and the places of refusals."""
        before = self.graph if self.original is None else self.original
        placeholders = before.graph.find_nodes(op="placeholder")
        names = dict(zip((each.name for each in placeholders), self.inputs, strict=False))
        inputs = Inputs(self.compiler, names, self.facts.parameters, not self.facts.prepares)
        return traced(before.graph, self.graph.graph, self.machine, self.chosen, self.refusals, inputs)

    @cached_property
    def after(self) -> Mapping[str, Tally]:
        """Live calls per module after the rewrites."""
        return counted(self.graph.graph)

    @property
    def assumptions(self) -> dict[str, str]:
        """Kind of mask, or storage format, that the rewrites rely on, by the path of the argument."""
        return {name: plain(str(kind)) for name, kind in map(self.facts.assumption, sorted(self.assumed))}

    @property
    def prepared_bytes(self) -> int:
        """Additional bytes of the prepared weights, for one set of Parameters."""
        return sum(each.bytes for each in self.prepared)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the Parameters that the graph reads."""
        inputs = self.graph.graph.find_nodes(op="placeholder")
        vals = [each.meta["val"] for each in inputs if each.name in self.facts.parameters]
        return sum(map(byte_count, vals))


def live_calls(source: fx.Graph) -> dict[fx.Node, Tally]:
    """Map each live kernel call to its tally."""
    launches = {node: is_launch(node) for node in source.nodes}
    return {node: Tally(1) if each else Tally(0, 1) for node, each in launches.items() if each or is_bookkeeping(node)}


def tally(calls: Mapping[fx.Node, Tally], chosen: Sequence[Candidate] = ()) -> dict[str, Tally]:
    """Count live `calls` per module path; those that one of `chosen` replaces count for its first result's module."""
    owner = {node: module_path(each.match.node) for each in chosen for node in each.dying}
    counts: dict[str, Tally] = {}
    for node, each in calls.items():
        path = owner.get(node, module_path(node))
        counts[path] = counts.get(path, Tally()) + each
    return counts


def counted(source: fx.Graph) -> dict[str, Tally]:
    """Count live calls per module path; calls of rewritable bodies count once for each call that runs the body."""
    inside = (counted(each.code.graph) for each in bodies(source) if each.code is not None and each.is_entered)
    return reduce(add_tallies, inside, tally(live_calls(source)))


def add_tallies(some: Mapping[str, Tally], more: Mapping[str, Tally]) -> dict[str, Tally]:
    """Add two mappings of module paths to tallies."""
    return {path: some.get(path, Tally()) + more.get(path, Tally()) for path in (*some, *more)}


def match_report(candidate: Candidate, machine: Target) -> MatchReport:
    """Build the report of a candidate that was rewritten."""
    node, rule = candidate.match.node, candidate.match.rule
    context = {**candidate.match.captures, "lowering": candidate.lowering, "machine": machine}
    where, benefit, remark = location(node), round(candidate.benefit, 3), _remark(rule, context)
    return MatchReport(rule.name, candidate.lowering, module_path(node), where, candidate.launches, benefit, remark)


def _remark(rule: Rule, context: Mapping[str, Any]) -> str:
    try:
        return call(rule.remark, context)
    except Exception as error:
        return str(raised("remark", error))
