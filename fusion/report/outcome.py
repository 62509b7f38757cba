"""What was done in one graph, and what it counts: launches by module, rewrites, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch.fx as fx

from fusion._torch.operators import OpOverload, schema_of
from fusion._torch.pickled import pack, unpack
from fusion.errors import Failure
from fusion.facts import Facts, plain
from fusion.graph.launches import is_bookkeeping, is_launch
from fusion.graph.origin import location, module_path
from fusion.graph.subgraphs import bodies
from fusion.language import Rule, call
from fusion.operators import ensure, operator_of
from fusion.planning.target import Target
from fusion.records import Candidate, Prepared, Refusal
from fusion.report.failures import raised

_FUSED_IN_ATEN = frozenset({"aten::native_layer_norm"})  # aten's own fused kernels, where a rule emits them


@dataclass(frozen=True)
class Tally:
    """Live calls of one module: on data, and on integers alone."""

    launches: int = 0
    bookkeeping: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(self.launches + other.launches, self.bookkeeping + other.bookkeeping)


@dataclass(frozen=True)
class MatchReport:
    """One rewrite that was made.

    Attributes:
        rule: name of the rule.
        lowering: which of its lowerings.
        module: path of the module that it stands in.
        where: `file:line` in the model's code.
        saved: launches saved.
        benefit: predicted microseconds saved on the target.
        remark: what the rule says of the choice, "" where it says nothing.
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
    """One module path before and after."""

    before: Tally = field(default_factory=Tally)
    after: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Outcome:
    """What the pass did to one graph.

    Attributes:
        facts: what was known of its inputs.
        chosen: the rewrites that were made, in the order of the graph.
        refusals: what was not done, and why; none where nobody is told.
        before: live calls per module before, with what was rewritten counted where its result belongs.
        assumed: inputs whose assumption a rewrite relies on: without a check of each call, the graph must not run.
        in_place: names of the `copy_` nodes that in-place writes have made needless.
        prepared: the further inputs of the rewritten graph, computed from Parameters once.
        host_reads: how often a call waits for the device, to read lengths on the host (option `lengths`).
        result_copies: how many copies a call makes so that its results lie in memory as those of the model do.
        failures: what raised: a stage, for which the graph is as it came, or rules, which were left out, each once.
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
    failures: tuple[Failure, ...] = ()

    @property
    def unprepared(self) -> str:
        """Say what is not prepared although it comes from Parameters, and why; "" where all is."""
        if not self.facts.prepares:
            return (
                "anything: FusionPass is a guest of a compiler that passes it no further inputs. Weights are joined, "
                "transposed or cast at every call or not at all; the backend cann_fusion does this once"
            )
        if self.facts.wrapped:
            first, more = self.facts.wrapped[0], len(self.facts.wrapped) - 1
            several = f"{first} and {more} more: they wrap" if more else f"{first}: it wraps"
            return f"{several} other tensors (DTensor, a quantised subclass), which are no Parameters"
        return ""


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphReport(Outcome):
    """The outcome for one graph, with that graph; what is told of it is worked out when it is read.

    Reports pickle, but for `chosen`, whose candidates are of the search: `matches` has what is told of them.

    Attributes:
        graph: the rewritten graph, with real operator names, before lowering.
        machine: the target.
        hand_on: gives the graph as it is handed to the compiler that runs it.
    """

    graph: fx.GraphModule
    machine: Target
    hand_on: Callable[[fx.GraphModule], fx.GraphModule]

    def __repr__(self) -> str:
        """Name the target and count what the report holds: matches and reasons hold the graph many times over."""
        return f"GraphReport({self.machine.name}: {len(self.chosen)} rewrites, {len(self.refusals)} refusals)"

    def __getstate__(self) -> dict[str, Any]:
        told = {"matches": self.matches, "after": self.after}
        return {**vars(self), **told, "chosen": (), "graph": pack(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ensure()  # the graph calls operators by their names
        vars(self).update(state, graph=unpack(state["graph"]))

    @cached_property
    def matches(self) -> tuple[MatchReport, ...]:
        """The rewrites, as they are told."""
        return tuple(match_report(each, self.machine) for each in self.chosen)

    @cached_property
    def after(self) -> Mapping[str, Tally]:
        """Live calls per module after."""
        return counted(self.graph.graph)

    @property
    def assumptions(self) -> dict[str, str]:
        """Return what the rewrites rely on: the kind of mask, or a storage format, by the path of the argument."""
        return {name: plain(str(kind)) for name, kind in map(self.facts.assumption, sorted(self.assumed))}

    @property
    def prepared_bytes(self) -> int:
        """Bytes that the prepared weights hold beside the Parameters, for one set of Parameters."""
        return sum(each.bytes for each in self.prepared)

    @property
    def parameter_bytes(self) -> int:
        """Count the bytes of the Parameters that the graph reads."""
        inputs = self.graph.graph.find_nodes(op="placeholder")
        vals = [each.meta["val"] for each in inputs if each.name in self.facts.parameters]
        return sum(each.numel() * each.element_size() for each in vals)


def live_calls(source: fx.Graph) -> dict[fx.Node, Tally]:
    """Each call of a graph that counts."""
    launches = {node: is_launch(node) for node in source.nodes}
    return {node: Tally(1) if each else Tally(0, 1) for node, each in launches.items() if each or is_bookkeeping(node)}


def tally(calls: Mapping[fx.Node, Tally], chosen: Sequence[Candidate] = ()) -> dict[str, Tally]:
    """Count live calls per module path; what a rewrite replaces belongs to the module of its first result."""
    owner = {node: module_path(each.match.node) for each in chosen for node in each.dying}
    counts: dict[str, Tally] = {}
    for node, each in calls.items():
        path = owner.get(node, module_path(node))
        counts[path] = counts.get(path, Tally()) + each
    return counts


def counted(source: fx.Graph) -> dict[str, Tally]:
    """Live calls per module path, with those of the bodies that are entered, once for each call that runs them."""
    inside = (counted(each.code.graph) for each in bodies(source) if each.code is not None and each.is_entered)
    return reduce(together, inside, tally(live_calls(source)))


def together(some: Mapping[str, Tally], more: Mapping[str, Tally]) -> dict[str, Tally]:
    """What both count, per module path."""
    return {path: some.get(path, Tally()) + more.get(path, Tally()) for path in (*some, *more)}


def match_report(candidate: Candidate, machine: Target) -> MatchReport:
    """What is told of a candidate that was rewritten."""
    node, rule = candidate.match.node, candidate.match.rule
    told = {**candidate.match.captures, "lowering": candidate.lowering, "machine": machine}
    where, benefit, remark = location(node), round(candidate.benefit, 3), _remark(rule, told)
    return MatchReport(rule.name, candidate.lowering, module_path(node), where, candidate.launches, benefit, remark)


def _remark(rule: Rule, told: Mapping[str, Any]) -> str:
    try:
        return call(rule.remark, told)
    except Exception as error:
        return str(raised("remark", error))


def emitted(node: fx.Node) -> str:
    """The name of a fused operator that the pass put into a graph, without its overload; "" for any other node."""
    if "fusion" not in node.meta or not isinstance(node.target, OpOverload):
        return ""
    name = schema_of(node.target).name
    return name if operator_of(node.target) is not None or name in _FUSED_IN_ATEN else ""
