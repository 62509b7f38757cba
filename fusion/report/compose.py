"""Composition of the document of a report: equal entries of equal layers are one, with their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from operator import add
from typing import TypeVar

from fusion.records import Refusal
from fusion.report.copied_inputs import CopiedInput
from fusion.report.document import Change, Copied, Cost, Layers, Left, Module, Origin, Rewrite, Scope
from fusion.report.folding import Layer, alike, folded, inside, layers_of, nesting, ranges, template
from fusion.report.outcome import GraphReport, MatchReport
from fusion.report.trace import Call, Line, Missed, Replaced, Trace

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)
_NOTICEABLE = 0.05  # microseconds below which a saving is none
_ROUND = 2  # decimal places of microseconds by which entries are equal


@dataclass(frozen=True)
class Composition:
    """Traces of all graphs of a report, with the layers that are equal.

    Attributes:
        parts: the reports of the graphs.
    """

    parts: Sequence[GraphReport]

    @cached_property
    def traces(self) -> list[Trace]:
        """Traces of the graphs; names have the number of their graph where there are several."""
        if len(self.parts) == 1:
            return [self.parts[0].trace]
        return [_prefixed(part.trace, f"{number}:") for number, part in enumerate(self.parts)]

    @cached_property
    def before(self) -> list[Call]:
        """Calls of all graphs before; a call that was replaced is in the module of the first result of its rewrite."""
        at = {root: match.module for root, match in self._match_of.items()}
        calls = (call for trace in self.traces for call in trace.before)
        return [replace(each, module=at.get(each.root, each.module)) for each in calls]

    @cached_property
    def _match_of(self) -> dict[str, MatchReport]:
        """The reports of the rewrites by their names in the traces."""
        pairs = zip(self.traces, self.parts, strict=True)
        return {one.root: match for trace, part in pairs for one, match in _matched(trace, part)}

    @cached_property
    def after(self) -> list[Call]:
        """Calls of all graphs after."""
        return [call for trace in self.traces for call in trace.after]

    # rewrites -------------------------------------------------------------------------------------------------------

    def rewrites(self) -> tuple[Rewrite, ...]:
        """Compose the rewrites, those first that save most."""
        made = _by(self.after, lambda call: call.root)
        gone = _by((each for each in self.before if each.is_launch), lambda call: call.root)
        entries = [
            _Entry(match, one, _called(made.get(one.root, ())), Counter(each.op for each in gone.get(one.root, ())))
            for trace, part in zip(self.traces, self.parts, strict=True)
            for one, match in _matched(trace, part)
        ]
        rewrites = [_rewrite(group) for group in _by(entries, _Entry.key).values()]
        return tuple(sorted(rewrites, key=lambda each: -each.saved.us))

    # refusals -------------------------------------------------------------------------------------------------------

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Compose all refusals, those first that the model can mend, of these those that would save most."""
        entries = [
            (each, missed, part.rule_of.get(each.rule, ""), each.target * (each.target != part.machine.name))
            for trace, part in zip(self.traces, self.parts, strict=True)
            for each, missed in zip(part.refusals, trace.missed, strict=True)
        ]
        groups = _by(entries, lambda each: (each[2] or each[1].op, each[0].reason, each[3], bool(each[1].root)))
        changes = [_change([each[:2] for each in group], *group[0][2:]) for group in groups.values()]
        return tuple(sorted(changes, key=lambda each: (not each.is_mendable, -each.us, -each.launches)))

    # what is left ---------------------------------------------------------------------------------------------------

    def left(self) -> tuple[Left, ...]:
        """Compose the launches that stay and are no fused operators, those first that take longest."""
        reasons: dict[str, Change] = {}
        for change in reversed([each for each in self.changes if not each.target]):
            reasons |= dict.fromkeys(change.names, change)
        stay = [each for each in self.after if each.is_launch and not each.is_fused]
        rules = {root: match.rule for root, match in self._match_of.items()}

        def key(call: Call) -> Hashable:
            reason = reasons.get(call.name)
            equal = call.op, template(call.module), call.line, round(call.us, _ROUND)
            return *equal, reason and reason.reason, rules.get(call.root, "")

        groups = _by(stay, key).values()
        left = (_left(each, reasons.get(each[0].name), rules.get(each[0].root, "")) for each in groups)
        return tuple(sorted(left, key=lambda each: -each.us))

    def copied(self) -> tuple[Copied, ...]:
        """Compose the copies of inputs that stay, those first that take longest."""
        stay = [(each, each.copied) for each in self.after if each.is_launch and each.copied is not None]
        groups = _by(stay, lambda one: (one[0].op, one[1].kind, one[1].cure, template(one[0].module), one[0].line))
        return tuple(sorted(map(_copied, groups.values()), key=lambda each: -each.us))

    # modules and layers ---------------------------------------------------------------------------------------------

    @cached_property
    def layer_of(self) -> dict[str, Layer]:
        """The layer of each module that is inside one."""
        return layers_of(call.module for call in (*self.before, *self.after))

    @cached_property
    def equal(self) -> list[list[Layer]]:
        """Layers that have the same launches after, in the same modules."""
        seen = {layer: Counter[tuple[str, str]]() for layer in self.layer_of.values()}
        for call in self.after:
            if call.is_launch and (layer := self.layer_of.get(call.module)) is not None:
                seen[layer][call.op, inside(call.module, layer)] += call.times
        return alike({layer: frozenset(counts.items()) for layer, counts in seen.items()})

    def modules(self) -> tuple[Module, ...]:
        """Compose the costs of modules with their submodules; those of equal layers are one."""
        before, after = (_by(calls, lambda call: call.module) for calls in (self.before, self.after))
        around: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for path in dict.fromkeys((*after, *before)):
            parts, key = nesting(path), self._nesting(path)
            for depth in range(1, len(parts) + 1):
                around.setdefault(key[:depth], {}).setdefault(".".join(parts[:depth]), []).append(path)
        return tuple(_module(len(key), paths, before, after) for key, paths in _nested(around))

    def _nesting(self, path: str) -> tuple[str, ...]:
        """Return a key for each module around `path`, outermost first: equal for modules of equal layers only."""
        layer, parts = self.layer_of.get(path), nesting(path)
        if layer is None:
            return tuple(map(template, parts))
        first = next(group[0] for group in self.equal if layer in group)
        outer = len(nesting(str(layer))) - 1
        return (*map(template, parts[:outer]), *(f"{template(part)} of {first.number}" for part in parts[outer:]))

    def layers(self) -> tuple[Layers, ...]:
        """Compose the costs of equal layers, and their differences to the most frequent ones of their stem."""
        usual: dict[str, list[Layer]] = {}
        for group in self.equal:
            if len(group) > len(usual.get(group[0].stem, ())):
                usual[group[0].stem] = group
        sides = [_by(calls, lambda call: self.layer_of.get(call.module)) for calls in (self.before, self.after)]

        def row(group: list[Layer]) -> Layers:
            own, others = group[0], usual[group[0].stem]
            before, after = (mean_of(cost_of(side.get(each, ())) for each in group) for side in sides)
            numbers = ranges(each.number for each in group)
            path = folded(map(str, group))
            if group is others:
                return Layers(path, numbers, len(group), before, after, "", (), str(own))
            pair = [(each, sides[1].get(each, ())) for each in (own, others[0])]
            differences = tuple(_differences(*pair))
            than = ranges(each.number for each in others)
            return Layers(path, numbers, len(group), before, after, than, differences, str(own))

        return tuple(map(row, self.equal))

    def scopes(self) -> tuple[Scope, ...]:
        """Compose the calls of the first of several equal layers, and those outside of layers."""
        sides = [_by(calls, lambda call: self.layer_of.get(call.module)) for calls in (self.before, self.after)]
        groups = [("", 1, None), *((folded(map(str, group)), len(group), group[0]) for group in self.equal)]
        scopes = (Scope(path, times, *(tuple(side.get(key, ())) for side in sides)) for path, times, key in groups)
        return tuple(each for each in scopes if each.before or each.after)


def _nested(around: dict[tuple[str, ...], _T]) -> Iterator[tuple[tuple[str, ...], _T]]:
    """Yield the entries of `around` with each key behind its own prefix, siblings in the order given."""

    def below(key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], _T]]:
        yield key, around[key]
        for each in around:
            if each[:-1] == key:
                yield from below(each)

    for key in around:
        if len(key) == 1:
            yield from below(key)


def _module(
    depth: int, paths: dict[str, list[str]], before: dict[str, list[Call]], after: dict[str, list[Call]]
) -> Module:
    """Sum up equal modules, `paths` with their submodules, at `depth`."""
    inner = [each for submodules in paths.values() for each in submodules]
    return Module(
        folded(paths),
        folded(nesting(each)[-1] for each in paths),
        depth - 1,
        len(paths),
        cost_of(chain.from_iterable(before.get(each, ()) for each in inner)),
        cost_of(chain.from_iterable(after.get(each, ()) for each in inner)),
        sum(call.times for each in inner for call in after.get(each, ()) if not call.is_launch),
        frozenset(inner),
    )


def _matched(trace: Trace, part: GraphReport) -> Iterator[tuple[Replaced, MatchReport]]:
    return zip(trace.replaced, part.matches, strict=True)


def cost_of(calls: Iterable[Call]) -> Cost:
    """Sum the launches and microseconds of `calls`."""
    return reduce(add, (Cost(each.times, each.times * each.us) for each in calls if each.is_launch), Cost())


def mean_of(costs: Iterable[Cost]) -> Cost:
    """Return the mean of `costs`, launches rounded."""
    listed = list(costs)
    total = reduce(add, listed, Cost())
    return Cost(round(total.launches / len(listed)), total.us / len(listed))


@dataclass(frozen=True)
class _Entry:
    """One rewrite, with the operators that it calls and those that it replaces."""

    match: MatchReport
    replaced: Replaced
    calls: Counter[str]
    gone: Counter[str]

    def key(self) -> Hashable:
        """Return a key that is equal for the same rewrite in equal layers."""
        match, lines = self.match, frozenset((template(module), line) for module, line in self.replaced.lines)
        counts = frozenset(self.calls.items()), frozenset(self.gone.items())
        return match.rule, match.lowering, template(match.module), match.saved, match.remark, counts, lines


def _called(calls: Iterable[Call]) -> Counter[str]:
    """Count the fused operators among `calls`, or all launches where there are none."""
    launches = [each for each in calls if each.is_launch]
    return Counter(each.op for each in launches if each.is_fused) or Counter(each.op for each in launches)


def _rewrite(group: Sequence[_Entry]) -> Rewrite:
    """Join equal rewrites of equal layers."""
    first = group[0]
    lines: dict[str, dict[Line, None]] = {}
    paths: dict[str, list[str]] = {}
    for each in group:
        for module, line in each.replaced.lines:
            paths.setdefault(template(module), []).append(module)
            lines.setdefault(template(module), {})[line] = None
    origins = [Origin(folded(paths[kind]), tuple(sorted(each))) for kind, each in lines.items()]
    saved = Cost(sum(each.match.saved for each in group), sum(each.match.benefit for each in group))
    return Rewrite(
        first.match.rule,
        first.match.lowering,
        first.calls,
        first.gone,
        folded(each.match.module for each in group),
        len(group),
        tuple(origins),
        saved,
        first.match.remark,
        frozenset(each.replaced.root for each in group),
    )


def _change(group: Sequence[tuple[Refusal, Missed]], rule: str, target: str) -> Change:
    """Join refusals with one reason in equal layers; `rule` and other `target` are those to show."""
    refusal, missed = group[0]
    places = _outermost(group)
    names = frozenset(name for each in places for name in each.calls)
    return Change(
        rule,
        missed.op,
        refusal.reason,
        target,
        folded(each.module for each, _ in group),
        len(places),
        missed.line,
        len(names),
        sum(each.saving for each in places if each.saving > _NOTICEABLE),
        missed.is_planned,
        bool(missed.root),
        refusal.is_mendable,
        names,
    )


def _outermost(group: Sequence[tuple[Refusal, Missed]]) -> list[Missed]:
    """List the places of refusals with one reason, without those inside of others; several forms refuse one place."""
    places: dict[frozenset[str], Missed] = {}
    for refusal, missed in sorted(group, key=lambda each: -len(each[1].calls)):
        calls = frozenset(missed.calls or (f"{refusal.module} {missed.line}",))
        if not any(calls <= each for each in places):
            places[calls] = missed
    return list(places.values())


def _left(group: Sequence[Call], change: Change | None, made_by: str) -> Left:
    """Join equal launches of equal layers, explained by the refusal `change`, or made by a rewrite of a rule."""
    first, times = group[0], sum(each.times for each in group)
    return Left(
        first.op,
        folded(each.module for each in group),
        times,
        first.line,
        sum(each.us * each.times for each in group),
        sum(each.bytes * each.times for each in group),
        change.rule if change else "",
        change.reason if change else "",
        made_by,
        tuple(dict.fromkeys(each.copied.name for each in group if each.copied)),
        frozenset(each.name for each in group),
    )


def _copied(group: Sequence[tuple[Call, CopiedInput]]) -> Copied:
    """Join equal copies of inputs in equal layers."""
    first, of = group[0]
    return Copied(
        of.kind,
        first.op,
        tuple(dict.fromkeys(each.name for _, each in group)),
        folded(each.module for each, _ in group),
        sum(each.times for each, _ in group),
        first.line,
        sum(each.us * each.times for each, _ in group),
        sum(each.bytes * each.times for each, _ in group),
        of.cure,
    )


def _differences(own: tuple[Layer, Iterable[Call]], other: tuple[Layer, Iterable[Call]]) -> Iterator[str]:
    """Describe the launches that layer `own` has and `other` has not, and the reverse."""
    counts = [
        Counter((call.op, inside(call.module, layer)) for call in calls if call.is_launch)
        for layer, calls in (own, other)
    ]
    for sign, more in (("+", counts[0] - counts[1]), ("-", counts[1] - counts[0])):
        for (op, module), times in more.items():
            yield f"{sign}{op}" + f" x{times}" * (times > 1) + f" in {module}" * bool(module)


def _by(entries: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Group `entries` by `key`, in the order of the first of each group."""
    groups: dict[_K, list[_T]] = {}
    for each in entries:
        groups.setdefault(key(each), []).append(each)
    return groups


def _prefixed(trace: Trace, prefix: str) -> Trace:
    """Put `prefix` before all names of calls in `trace`."""

    def named(name: str) -> str:
        return prefix + name if name else ""

    def renamed(call: Call) -> Call:
        return replace(call, name=named(call.name), reads=tuple(map(named, call.reads)), root=named(call.root))

    return Trace(
        tuple(map(renamed, trace.before)),
        tuple(map(renamed, trace.after)),
        tuple(replace(each, root=named(each.root)) for each in trace.replaced),
        tuple(replace(each, root=named(each.root), calls=tuple(map(named, each.calls))) for each in trace.missed),
    )
