"""Stage 4, match: find where rules apply. Nothing is changed; a match adds a reading to its first result."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from heapq import merge
from itertools import chain
from typing import Any

import torch.fx as fx

from fusion.errors import Failure, RuleError
from fusion.graph import Graph, Miss, Reading, Value
from fusion.language import Bindings, Pattern, Refused, Rule, Term, ask_guard, captured, levels, relied, require
from fusion.records import Match, Refusal
from fusion.report.failures import culprit, failure, raised

_NEAR = 128
"""Calls of a path within which all results of one operator are computed: a layer has some fifty."""


@dataclass
class Found:
    """What matching found.

    Attributes:
        matches: where rules apply.
        refusals: where they do not, with their reasons.
        failures: what rules raised, which are refused there.
    """

    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def match(graph: Graph, rules: Sequence[Rule], unsafe: frozenset[str] = frozenset(), told: bool = True) -> Found:
    """Match every rule everywhere; what only looks like one is searched if it is `told`.

    `unsafe` names rules whose guard is not asked.
    """
    search = _Search(graph, unsafe)
    for level in levels(rules):
        for rule in level:
            search.attempt(search.apply, rule)
    if told:
        for rule in rules:
            search.attempt(search.note_lookalikes, rule)
        search.note_misses()
    return search.found


def _require_elements(captures: Mapping[str, Any], results: Sequence[Value]) -> None:
    """Refuse what no kernel has to be launched for."""
    for name, value in (*captures.items(), *(("result", each) for each in results)):
        shape = list(value.shape) if isinstance(value, Value) else []
        require(0 not in shape, "{name} {shape} has no elements: there is nothing to compute", name=name, shape=shape)


def _place(graph: Graph, value: Value) -> tuple[float, int]:
    """Where a value stands: what no node holds, last."""
    node = graph.node(value)
    return (math.inf if node is None else graph.order[node]), value.id


class _Candidates:
    """What may be one term, in the order of the graph, and which of it stands near a value.

    Results of one operator are computed from nearly the same calls, so that of a model of many layers few are tried.
    """

    def __init__(self, candidates: Sequence[Value], position: Callable[[Value], tuple[int, ...]]) -> None:
        self.candidates, self._position = candidates, position

    def near(self, value: Value) -> Iterator[Value]:
        """Yield those that are, on each of the longest paths of the graph, within `_NEAR` calls of `value`."""
        if not self.candidates:
            return
        position = self._position(value)
        path = max(range(len(position)), key=position.__getitem__)
        block = position[path] // _NEAR
        blocks = (self._blocks[path].get(each, ()) for each in (block - 1, block, block + 1))
        for number in sorted(chain.from_iterable(blocks)):
            others = self._position(self.candidates[number])
            if all(abs(one - other) <= _NEAR for one, other in zip(position, others, strict=True)):
                yield self.candidates[number]

    @cached_property
    def _blocks(self) -> Sequence[Mapping[int, Sequence[int]]]:
        """For each path the numbers of the candidates in each stretch of `_NEAR` calls."""
        positions = [self._position(each) for each in self.candidates]
        blocks: list[dict[int, list[int]]] = [defaultdict(list) for _ in positions[0]]
        for number, position in enumerate(positions):
            for path, place in enumerate(position):
                blocks[path][place // _NEAR].append(number)
        return blocks


class _Search:
    """The state of one search; also the context that terms ask."""

    def __init__(self, graph: Graph, unsafe: frozenset[str]) -> None:
        self.graph, self.found = graph, Found()
        self._makers, self._place = cache(graph.makers), cache(partial(_place, graph))
        self._position = cache(self._place_on_paths)
        self._listed: dict[frozenset[str], tuple[int, _Candidates]] = {}
        self._unsafe = unsafe
        self._spoken = set[str]()
        self._readings: dict[Value, list[Reading]] = defaultdict(list)
        self._by_head: dict[str, list[Value]] = defaultdict(list)
        self._all: dict[str, list[Value]] = defaultdict(list)  # of an op, with those that no node holds
        self._users: dict[Value, list[Value]] = defaultdict(list)
        self._above: dict[Any, Set[Value]] = {}  # by ops or words, how many there are, and what may stand between
        self._explained: set[tuple[str, Value]] = set()
        self._guarded: set[Value] = set()  # where all of a form was there, and a guard has said why not
        self._refused: set[tuple[str, Value, str]] = set()
        for value in graph.places:
            self._by_head[value.op].append(value)
        for value in graph.owners:
            self._all[value.op].append(value)
            for each in value.args:
                self._users[each].append(value)
        for value, reading in graph.readings:
            self._read(value, reading)

    def readings(self, value: Value, op: str) -> Sequence[Reading]:
        """Meanings found for `value` so far."""
        return [each for each in self._readings.get(value, ()) if each.op == op]

    def _read(self, value: Value, reading: Reading) -> None:
        self._spoken.add(reading.op)
        if not self.readings(value, reading.op):
            insort(self._by_head[f"reading:{reading.op}"], value, key=self._place)
        self._readings[value].append(reading)

    def _candidates(self, term: Term) -> Sequence[Value]:
        """List what may be `term`, in the order in which nodes hold it; what no node holds comes last."""
        return self._indexed(term).candidates

    def _indexed(self, term: Term) -> _Candidates:
        """Candidates for a term; listed again where readings were added since."""
        heads = term.heads()
        held = [self._by_head.get(head, []) for head in heads]
        count = sum(map(len, held))
        if heads not in self._listed or self._listed[heads][0] != count:
            several = dict.fromkeys(merge(*held, key=self._place))
            self._listed[heads] = count, _Candidates(tuple(held[0] if len(held) == 1 else several), self._position)
        return self._listed[heads][1]

    def _where(self, form: Pattern, candidates: Sequence[Value]) -> Sequence[Value]:
        """Those of the candidates for its first result that are above something of its rarest op or word."""
        counts = {heads: sum(map(self._count, heads)) for heads in form.needed}
        rarest = min(counts, key=lambda heads: (counts[heads], heads != form.results[0].heads()), default=None)
        if rarest is None or rarest == form.results[0].heads():
            return candidates
        key = rarest, counts[rarest], form.between
        if key not in self._above:
            self._above[key] = self._found_above(rarest, form.between)
        return [each for each in candidates if each in self._above[key]]

    def _count(self, head: str) -> int:
        return len(self._all.get(head) or self._by_head.get(head, ()))

    def _found_above(self, heads: frozenset[str], between: frozenset[str]) -> Set[Value]:
        """The values of some ops or words, and what is computed from them by ops `between` alone."""
        waiting = [each for head in heads for each in (self._all.get(head) or self._by_head.get(head, ()))]
        found = set(waiting)
        while waiting:
            users = {each for each in self._users.get(waiting.pop(), ()) if each.op in between} - found
            found |= users
            waiting += users
        return found

    def attempt(self, step: Callable[[Rule], object], rule: Rule) -> bool:
        """Take a step with one rule; if it raises, that rule alone is lost, from there on."""
        try:
            step(rule)
        except RuleError:
            raise
        except Exception as error:
            node = culprit(error) or self.graph.source.output_node()
            self.found.failures.append(failure("match", error, rule.name, node))
            self.found.refusals.append(Refusal(rule.name, raised("pattern", error), node))
            return False
        return True

    def apply(self, rule: Rule) -> None:
        """Find the matches of one rule; where a form holds, later ones are tried that choose something else."""
        taken: dict[Value, list[Set[Any]]] = {}
        for form in rule.patterns():
            chosen = form.given.items()
            for value in self._where(form, self._candidates(form.results[0])) if self._may_occur(form) else ():
                if any(chosen <= each for each in taken.get(value, ())) or not self._makers(value):
                    continue
                matched = self._try(rule, form, value)
                if matched is not None:
                    taken.setdefault(value, []).append(chosen)
                    self.found.matches.append(matched)
                    self._read(value, Reading(rule.name, matched.captures, matched.relies))

    def _may_occur(self, form: Pattern) -> bool:
        """Whether something has each meaning that a form mentions, and there is something of each of its parts."""
        return form.words <= self._spoken and all(any(map(self._count, heads)) for heads in form.needed)

    def _try(self, rule: Rule, form: Pattern, value: Value) -> Match | None:
        refused: Refused | None = None
        for bound in self._complete(form, value):
            captures = captured(form, bound)
            results = tuple(bound[term] for term in form.results)
            roots = tuple(self._makers(each) for each in results)
            if not form.keeps_apart(captures):
                continue
            if not all(map(self._may_replace, results)) or self._circular(captures, roots):
                continue
            try:
                _require_elements(captures, results)
                if rule.name not in self._unsafe:
                    ask_guard(rule, captures)
            except Refused as reason:
                refused = refused or reason.with_traceback(None)  # its frames hold all of this search
                self._guarded.add(value)
                self._explain(rule, value, captures)
                continue
            except Exception as error:
                self.found.failures.append(failure("match", error, rule.name, roots[0][0]))
                refused = raised("guard", error)
                continue
            return Match(rule, form, captures, results, roots, relied(bound))
        if refused is not None:
            self._refuse(rule.name, refused, value, form.name if form.varies else "")
        return None

    def _may_replace(self, value: Value) -> bool:
        """Whether nodes compute a value from something else; or none holds it, and only other matches read it."""
        return bool(self._makers(value)) or value not in self.graph.places

    def _explain(self, rule: Rule, value: Value, captures: Mapping[str, Any]) -> None:
        """Remember that the guard says why of everything from `value` down to what was captured."""
        taken = {each for each in captures.values() if isinstance(each, Value)}
        taken |= {each.arg for each in taken if each.op == "reshape"}  # a capture that lost dims of size 1
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if each not in taken and (rule.name, each) not in self._explained:
                self._explained.add((rule.name, each))
                waiting.extend(each.args)

    def _circular(self, captures: Mapping[str, Any], roots: Sequence[tuple[fx.Node, ...]]) -> bool:
        """Whether one result is needed to compute what the match takes: a call cannot wait for itself.

        What is taken may be cut out of the result: the end of a buffer that was rolled is its beginning.
        """
        taken = [node for each in captures.values() if isinstance(each, Value) for node in self.graph.reads(each)]
        if len(roots) == 1:  # what stands before the result needs no search
            order, regions, root = self.graph.order, self.graph.regions, roots[0][0]
            taken = [node for node in taken if order[node] >= order[root]]
            if any(regions[node] != regions[root] for node in taken):
                return True  # the call would move behind a write to memory
        return any(self.graph.depends(node, root) for node in taken for makers in roots for root in makers)

    def _complete(self, form: Pattern, value: Value) -> Iterator[Bindings]:
        """Match the first result at `value`; results that this does not reach are those beside it."""
        for bound in form.results[0].match(value, {}, self):
            yield from self._join(form, form.results[1:], value, bound)

    def _join(self, form: Pattern, missing: Sequence[Term], first: Value, bound: Bindings) -> Iterator[Bindings]:
        missing = [term for term in missing if term not in bound]  # one may hold another
        if not missing:
            yield bound
            return
        order, start = self.graph.order, self._makers(first)[0]
        alike = not missing[0].heads().isdisjoint(form.results[0].heads())
        anywhere = not alike or missing[0].follows(bound)  # else the first of two comes first: a pair is found once
        found_before = {bound[each] for each in form.results if each in bound}
        for value in self._indexed(missing[0]).near(first):
            makers = self._makers(value)
            if value in found_before or not self._may_replace(value):
                continue
            if makers and not anywhere and (order[makers[0]] < order[start] or self.graph.depends(makers[0], start)):
                continue
            for found in missing[0].match(value, bound, self):
                yield from self._join(form, missing[1:], first, found)

    def _place_on_paths(self, value: Value) -> tuple[int, ...]:
        """Where a value stands on the longest paths of the graph."""
        return self.graph.dependence.position(self._makers(value) or self.graph.reads(value))

    def _refuse(
        self,
        rule: str,
        cause: Refused | str,
        value: Value,
        variant: str = "",
        miss: Miss | None = None,
        words: frozenset[str] | None = None,
    ) -> None:
        makers = self._makers(value)
        owner = makers[0] if makers else self.graph.owners.get(value)
        said = rule, value, cause.template if isinstance(cause, Refused) else cause
        if owner is not None and said not in self._refused:
            self._refused.add(said)
            blamed = next(filter(None, map(self._computes, miss.at)), None) if miss else None
            about = self.graph.node(miss.of) if miss and miss.of else None
            covers = self._covered(miss) if miss else frozenset[fx.Node]()
            self.found.refusals.append(
                Refusal(
                    rule,
                    cause,
                    owner,
                    variant=variant,
                    miss=miss,
                    about=about,
                    blamed=blamed,
                    words=words,
                    covers=covers,
                )
            )

    def _covered(self, miss: Miss) -> frozenset[fx.Node]:
        """Return the nodes that hold, or are built from, the values that a miss accounts for."""
        owners = (self.graph.owners.get(each) for each in miss.covers)
        places = (node for each in miss.covers for node in self.graph.places.get(each, ()))
        return frozenset((*filter(None, owners), *places))

    def _computes(self, value: Value) -> fx.Node | None:
        """The first node that computes a value, or is built from it; None for what is passed in."""
        owner = self.graph.owners.get(value)
        return owner if owner is not None and owner.op == "call_function" else None

    def note_lookalikes(self, rule: Rule) -> None:
        """Say why what looks like the rule is something else, in a node or inside one (a division holds a power).

        Of several look-alikes of one value the first is told: rules name the nearest first. So it is of a product and
        the same with more factors.
        """
        told: dict[Value, Pattern] = {}
        is_something = cache(lambda value: self._is_known(rule, value) or self._is_within(value))
        for form in filter(self._may_occur, rule.lookalikes()):
            for value in self._where(form, (*self._candidates(form.results[0]), *self._inside(form.results[0]))):
                is_longer = value.op == "mul" and any(told.get(each, form) is not form for each in value.args)
                if value in told or is_longer or is_something(value):
                    continue
                for bound in form.results[0].match(value, {}, self):
                    captures = captured(form, bound)
                    if form.keeps_apart(captures):
                        told[value] = form
                        self._refuse(rule.name, Refused(form.reason, captures), value, words=form.words)
                        break

    def _is_known(self, rule: Rule, value: Value) -> bool:
        """True if a value is what a rule means, or that with more factors, or a guard has said why it is not."""
        products = (each for each in value.args if each.op == "mul") if value.op == "mul" else ()
        if any(each in self._guarded or self.readings(each, rule.name) for each in (value, *products)):
            return True
        return (rule.name, value) in self._explained

    def _is_within(self, value: Value) -> bool:
        """Whether one node computes a value on the way to something that was recognised."""
        owner = None if value in self.graph.places else self.graph.owners.get(value)
        held = None if owner is None else self.graph.held.get(owner)
        return isinstance(held, Value) and bool(self._readings.get(held))

    def _inside(self, term: Term) -> list[Value]:
        """Values that a node is built from without holding them."""
        found = (each for head in sorted(term.heads()) for each in self._all.get(head, ()))
        return [each for each in found if each not in self.graph.places]

    def note_misses(self) -> None:
        """Say why what looked to a reader like something is nothing of the kind."""
        for value, miss in self.graph.readings.missed():
            if miss.limited or miss.useless or not self.readings(value, miss.rule):
                self._refuse(miss.rule, miss.reason, value, miss=miss)
