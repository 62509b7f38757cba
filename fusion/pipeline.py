"""The pipeline: the order of the stages.

dead code → layers → canonicalise → read → match → plan → select → rewrite → prepare → verify → reinplace → verify, and
the same for the bodies of `cond`, `while_loop` and the like
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch.fx as fx

from fusion import operators
from fusion._torch.frame_stack import roomy
from fusion._torch.garbage_collection import uncollected
from fusion._torch.operators import higher_order
from fusion._torch.tracing import copied, refill
from fusion.caching.text_cache import text_cache
from fusion.errors import Failure, FormatError, StageError
from fusion.facts import Facts
from fusion.graph.execution_scopes import scopes
from fusion.graph.launches import is_view
from fusion.graph.node_values import NodeValue
from fusion.graph.subgraphs import bodies
from fusion.language import Library, needed
from fusion.options import Options
from fusion.planning.fake_execution import Fakes
from fusion.planning.target import Target
from fusion.records import Candidate, Refusal, Repeats, Rewritten
from fusion.report.failures import stage
from fusion.report.outcome import Outcome, add_tallies, counted, live_calls, tally
from fusion.report.refusals import to_report, useless
from fusion.report.trace import mark
from fusion.stages.canonicalise import canonicalise
from fusion.stages.dead_code import drop_dead_code
from fusion.stages.host_reads import read_on_host
from fusion.stages.layers import Folded, NotRepeatedError, Origins, divide, fold, paired, unfold
from fusion.stages.match import match
from fusion.stages.plan import Planner
from fusion.stages.prepare import prepare, read_as_stored
from fusion.stages.read import read
from fusion.stages.reinplace import reinplace
from fusion.stages.rewrite import rewrite
from fusion.stages.select import select
from fusion.stages.verify import contract, verify, verify_formats

log = logging.getLogger("fusion")
NOT_ENTERED = "the code inside is not entered: it stays a graph of its own, as it came"
_CROSSES = (
    "the calls: they are in several scopes or on several streams; a fused call runs in one; move them into one scope"
)
REFERENCE = "ascend910_93"  # the chip whose refusals a host report lists as well


def fuse_graph(
    source: fx.Graph,
    library: Library,
    options: Options,
    facts: Facts = Facts(),
    original: fx.Graph | None = None,
    with_refusals: bool = True,
    in_place: bool = True,
) -> Outcome:
    """Rewrite one functional aten graph in place, with the bodies that its calls run.

    Every node outside the chosen matches stays the same object; a body is replaced by another module. A rule that
    raises is refused there; the others go on.

    Args:
        source: the graph.
        library: the rules and readers.
        options: the options of the user.
        facts: the facts about the inputs of the graph.
        original: a copy of the graph, where the caller has one.
        with_refusals: False to skip the work on refusals, which the outcome then lacks.
        in_place: False to leave the graph functional, for a compiler that decides about in-place writes itself.

    Raises:
        FusionError: the graph has no shapes.
        StageError: a stage failed; the graph is unchanged.
    """
    with stage("operators"):
        operators.ensure()
        target = Target.resolve(options.target)
    original = copied(source) if original is None else original
    try:
        with uncollected():
            search = _Search(library, options, target, with_refusals, in_place)
            outcome = roomy(partial(_fused_for_formats, source, original, search, facts))
            with stage("bodies"):
                return _with_bodies(source, search, outcome)
    except BaseException:
        refill(source, original)
        raise


def _fused_for_formats(source: fx.Graph, original: fx.Graph, search: _Search, facts: Facts) -> Outcome:
    """Fuse `source` relying on the storage formats in `facts`; once more without them if a call would read another
    format.
    """
    try:
        return _fused(source, original, search, facts)
    except FormatError as error:
        log.debug("storage formats are not relied on: %s", error)
        refill(source, original)
        return _fused(source, original, search, replace(facts, fractal={}))


def _fused(source: fx.Graph, original: fx.Graph, search: _Search, facts: Facts) -> Outcome:
    calls = live_calls(source)
    with stage("dead_code"):
        dropped = drop_dead_code(source)
    made = search.rewritten(source, facts)
    with stage("report"):
        before = tally(calls, made.chosen)
        for each in made.done:
            mark(each.added, each.candidate.match.node)
    outcome = Outcome(
        facts, made.chosen, made.refusals, before, failures=_distinct(made.failures),
        match_count=made.match_count, refused_count=made.refused_count,
    )  # fmt: skip
    if made.chosen:
        return _finished(source, original, search, made, outcome)
    if dropped:
        refill(source, original)
    return outcome


@dataclass(frozen=True)
class _Made:
    """Rewrites and refusals in one graph.

    Attributes:
        chosen: the rewrites that were made, in the order of the graph.
        refusals: the refused fusions.
        failures: the errors of rules.
        done: the rewrites, with the nodes that they added.
        copies: the copies that give results their original strides and memory.
        values: the canonical values of the original nodes.
        match_count: number of matches in the graph that was searched.
        refused_count: number of these that no lowering takes.
    """

    chosen: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    failures: tuple[Failure, ...]
    done: tuple[Rewritten, ...]
    copies: tuple[fx.Node, ...]
    values: Mapping[fx.Node, NodeValue]
    match_count: int
    refused_count: int


@dataclass(frozen=True)
class _Search:
    """Parameters of the search and the rewriting of graphs.

    Attributes:
        library: the rules and readers.
        options: the options of the user.
        target: the chip.
        with_refusals: True if refusals are reported.
        in_place: True if caches may be written in place.
    """

    library: Library
    options: Options
    target: Target
    with_refusals: bool
    in_place: bool

    def rewritten(
        self,
        source: fx.Graph,
        facts: Facts,
        repeats: Repeats = Repeats(),
        walls: frozenset[fx.Node] = frozenset(),
    ) -> _Made:
        """Rewrite one graph in place: by a search in few layers that is repeated in their equals, else by one in all
        layers.

        `repeats` counts the nodes that each node stands for; `walls` are nodes at the beginning of layers some of which
        were left out.
        """
        for folded in self._folded(source, facts, walls):
            try:
                return self._layer_by_layer(Origins(folded), repeats, walls)
            except NotRepeatedError as error:
                log.debug("more layers are searched: %s", error)
        return self._searched(source, facts, repeats)

    def _folded(self, source: fx.Graph, facts: Facts, walls: frozenset[fx.Node]) -> Iterator[Folded]:
        """Yield `source` folded to one layer for all equal ones, then to one pair of layers for all equal pairs.

        Nothing is yielded where no layers repeat. `walls` are nodes at which layers must begin.
        """
        with stage("layers"):
            division = divide(source, facts, walls) if self.options.fuel is None else None
        if division is None:
            return
        with stage("layers"):
            folded = fold(source, facts, division)
        if folded is None:
            return
        yield folded
        with stage("layers"):
            wider = fold(source, facts, paired(source, facts, division, walls))
        if wider is not None:
            yield wider

    def _layer_by_layer(self, origins: Origins, repeats: Repeats, walls: frozenset[fx.Node]) -> _Made:
        folded = origins.folded
        order = {node: place for place, node in enumerate(folded.source.nodes)}
        made = self.rewritten(folded.graph, folded.facts, origins.repeats(repeats), origins.walls(walls))
        with stage("layers"):
            done, copies = unfold(origins, made.values, made.done, made.copies)
            chosen = sorted((each for one in made.chosen for each in origins.candidates(one)), key=_place_in(order))
            refusals = tuple(each for one in made.refusals for each in origins.refusals(one))
            values = {folded.origin[node]: each for node, each in made.values.items()}
        counts = made.match_count, made.refused_count
        return _Made(tuple(chosen), refusals, made.failures, tuple(done), tuple(copies), values, *counts)

    def _searched(self, source: fx.Graph, facts: Facts, repeats: Repeats) -> _Made:
        elsewhere = [] if self.target.is_npu else [Target.named(REFERENCE)]
        with stage("canonicalise"):
            graph = canonicalise(source, facts)
        on = [each for each in self.library.rules if not each.opt_in or each.name in self.options.opt_in]
        readers = needed(self.library.readers, on, reports=self.with_refusals)
        with stage("read"):
            graph, reader_failures = read(graph, readers)
        with stage("match"):
            matched = match(graph, on, self.options.unsafe, self.with_refusals)
        lowering = plan_lower(self.options, self.target)
        with stage("plan"):
            plans = text_cache("plans", self.library, self.options)
            planner = Planner(graph, Fakes(graph), self.target, lowering, elsewhere, self.options, repeats, plans)
            candidates = planner.candidates(matched.matches)
            if plans is not None:
                plans.save()
        with stage("select"):
            candidates, crossing = _in_one_scope(source, candidates)
            chosen = sorted(select(candidates, graph, self.options.fuel), key=_place_in(graph.order))
        refusals: list[Refusal] = []
        if self.with_refusals:
            with stage("report"):
                refused = [*matched.refusals, *planner.refusals, *crossing, *useless(candidates, frozenset(chosen))]
                refusals = to_report(refused, chosen, on)
        with stage("rewrite"):
            done, copies = rewrite(graph, chosen, planner.fakes) if chosen else ([], [])
        failures = (*reader_failures, *matched.failures, *planner.failures)
        counts = len(matched.matches), len(set(matched.matches) - {each.match for each in candidates})
        return _Made(tuple(chosen), tuple(refusals), failures, tuple(done), tuple(copies), graph.value_of, *counts)


def _in_one_scope(source: fx.Graph, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Refusal]]:
    """Return the candidates whose nodes run in one scope and on one stream, and refusals of the others.

    Candidates that are made for a refused one are refused as well.
    """
    scope_of = scopes(source)
    if not scope_of:
        return list(candidates), []
    allowed: list[Candidate] = []
    refused: list[Refusal] = []
    for each in candidates:
        parts = [each, *([each.needs] if each.needs else [])]
        nodes = {node for part in parts for node in (*part.dying, part.match.node)}
        if len({scope_of[node] for node in nodes if node.op == "call_function" and not is_view(node.target)}) <= 1:
            allowed.append(each)
        else:
            refused.append(Refusal(each.match.rule.name, _CROSSES, each.match.node))
    return allowed, refused


def _place_in(order: Mapping[fx.Node, int]) -> Callable[[Candidate], int]:
    return lambda candidate: order[candidate.match.node]


def _finished(source: fx.Graph, original: fx.Graph, search: _Search, made: _Made, outcome: Outcome) -> Outcome:
    """Prepare computations from Parameters in the rewritten `source`, write in place, and verify its contract.

    `original` is its copy before the rewrites `made`. Returns the completed `outcome`.
    """
    options, target = search.options, search.target
    lowering = plan_lower(options, target)
    with stage("verify"):  # after the search, whose guards on sizes hold for the copy as well
        before = contract(original, outcome.facts.strides)
    with stage("prepare"):
        if options.prepack == "share":
            read_as_stored(source, outcome.facts, target.is_npu)
        prepared = prepare(source, outcome.facts, options.prepack)
    names = [each.name for each in prepared]
    with stage("verify"):
        verify(source, before, [node for each in made.done for node in each.added], names)
    with stage("reinplace"):
        decomposed = lowering == "eager" and not target.is_npu
        in_place = reinplace(source, operators.HOST if decomposed else lowering) if search.in_place else ()
        waits = read_on_host(source, lowering) if target.is_npu else 0
    with stage("verify"):
        verify(source, before, [], names)
        verify_formats(source, outcome.facts.fractal)
    relied = frozenset(name for each in made.chosen for name in each.match.relies) | outcome.facts.bands.keys()
    copies = len(made.copies)
    return replace(
        outcome, assumed=relied, in_place=in_place, prepared=prepared, host_reads=waits, result_copies=copies
    )


def _distinct(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the first of the failures that differ only in their place."""
    return tuple({(each.stage, each.rule, each.error): each for each in reversed(failures)}.values())[::-1]


def _with_bodies(source: fx.Graph, search: _Search, outcome: Outcome) -> Outcome:
    """Rewrite the bodies that calls of `source` run, each once, and return `outcome` with the outcomes of the bodies
    added.

    Launches of a body count once for each call that runs it. The old modules are not changed; a body in which a stage
    fails stays unchanged.
    """
    rewritten: dict[fx.GraphModule, tuple[fx.GraphModule, Outcome]] = {}
    names: dict[str, fx.GraphModule] = {}
    for each in bodies(source):
        if each.code is None or not each.is_entered:
            continue
        if each.code not in rewritten:
            rewritten[each.code] = code, inner = _body(each.code, search, len(outcome.chosen))
            outcome = _with_body(outcome, inner)
        code, inner = rewritten[each.code]
        names[each.name] = code
        waits = outcome.host_reads + inner.host_reads
        outcome = replace(outcome, before=add_tallies(outcome.before, inner.before), host_reads=waits)
    not_entered = dict.fromkeys(each.call for each in bodies(source) if not each.is_entered)
    refused = [Refusal(higher_order(call.target), NOT_ENTERED, call) for call in not_entered if search.with_refusals]
    for name, code in names.items():
        cast(fx.GraphModule, source.owning_module).add_submodule(name, code)
    return replace(outcome, refusals=(*outcome.refusals, *refused))


def _body(code: fx.GraphModule, search: _Search, used: int) -> tuple[fx.GraphModule, Outcome]:
    """Return `code` rewritten, or unchanged after an error, with the outcome; `used` is the fuel that is spent."""
    fresh, fuel = fx.GraphModule(code, copied(code.graph)), search.options.fuel
    options = search.options if fuel is None else replace(search.options, fuel=max(fuel - used, 0))
    try:
        outcome = fuse_graph(
            fresh.graph,
            search.library,
            options,
            original=code.graph,
            with_refusals=search.with_refusals,
            in_place=search.in_place,
        )
    except StageError as error:
        return code, Outcome(before=counted(code.graph), failures=(error.failure,))
    fresh.recompile()
    return fresh, outcome


def _with_body(outcome: Outcome, inner: Outcome) -> Outcome:
    """Return the `outcome` of a graph with that of one of its bodies, `inner`, added."""
    both = {
        name: (*getattr(outcome, name), *getattr(inner, name))
        for name in ("chosen", "refusals", "in_place", "failures")
    }
    counts = {
        name: getattr(outcome, name) + getattr(inner, name)
        for name in ("result_copies", "match_count", "refused_count")
    }
    return replace(outcome, **counts, **both)


def plan_lower(options: Options, target: Target) -> str:
    """Return the compiler that fusions are planned for: torchair on an Ascend target, unless options say otherwise.

    Inductor launches the vendor's operators as an interpreter does: "eager".
    """
    if options.plan_lower and options.plan_lower != "auto":
        return "eager" if options.plan_lower == "inductor" and target.is_npu else options.plan_lower
    return "torchair" if target.is_npu else options.lower
