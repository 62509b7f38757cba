"""Stage match: find the places where rules apply.

Nothing in the graph changes; a match adds a reading to its first result. A value without a node is an intermediate of
the canonical form that no node of the graph has as its result.
"""

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
"""Distance in calls, along a path, within which the results of one match are searched: a layer has some fifty."""


@dataclass
class MatchResult:
    """The outcome of matching.

    Attributes:
        matches: the places where rules apply.
        refusals: the places where rules do not apply, with reasons.
        failures: exceptions of rules, each of which is among the refusals too.
    """

    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def match(
    graph: Graph, rules: Sequence[Rule], unsafe: frozenset[str] = frozenset(), diagnose: bool = True
) -> MatchResult:
    """Match all `rules` on `graph`, level by level; with `diagnose` add refusals for guards, look-alikes and misses.

    The guards of the rules named in `unsafe` are not called.
    """
    search = Search(graph, unsafe, diagnose)
    for level in levels(rules):
        for rule in level:
            search.attempt(search.apply, rule)
    if diagnose:
        for rule in rules:
            search.attempt(search.note_lookalikes, rule)
        search.note_misses()
    return search.result


def _require_elements(captures: Mapping[str, Any], results: Sequence[Value]) -> None:
    """Refuse, by raising `Refused`, a match with an empty tensor among `captures` or `results`."""
    for name, value in (*captures.items(), *(("result", each) for each in results)):
        shape = list(value.shape) if isinstance(value, Value) else []
        require(
            0 not in shape,
            "{name}: its shape is {shape}, without elements; a rewrite requires elements, as there is nothing "
            "to compute; nothing to change",
            name=name,
            shape=shape,
        )


def _place(graph: Graph, value: Value) -> tuple[float, int]:
    """Return the sort key of `value`: the position of its node in `graph`, infinite where it has none, then its id."""
    node = graph.node(value)
    return (math.inf if node is None else graph.order[node]), value.id


class _Candidates:
    """Values that may match one term, in the order of the graph, with an index by position.

    All results of a match are computed from nearly the same calls. So once its first result is bound, only candidates
    near that are tried for the others: few of those that a model of many layers has.
    """

    def __init__(self, candidates: Sequence[Value], position: Callable[[Value], tuple[int, ...]]) -> None:
        self.candidates, self._position = candidates, position

    def near(self, value: Value) -> Iterator[Value]:
        """Yield the candidates within `_NEAR` calls of `value` on each of the longest paths of the graph."""
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
        """For each path, the indices of the candidates in each block of `_NEAR` consecutive calls."""
        positions = [self._position(each) for each in self.candidates]
        blocks: list[dict[int, list[int]]] = [defaultdict(list) for _ in positions[0]]
        for number, position in enumerate(positions):
            for path, place in enumerate(position):
                blocks[path][place // _NEAR].append(number)
        return blocks


class Search:
    """The state of one search, and the context in which terms match."""

    def __init__(self, graph: Graph, unsafe: frozenset[str], diagnose: bool) -> None:
        self.graph, self.result = graph, MatchResult()
        self._makers, self._place = cache(graph.makers), cache(partial(_place, graph))
        self._position = cache(self._place_on_paths)
        self._listed: dict[frozenset[str], tuple[int, _Candidates]] = {}
        self._unsafe, self._diagnose = unsafe, diagnose
        self._words = set[str]()
        self._readings: dict[Value, list[Reading]] = defaultdict(list)
        self._by_head: dict[str, list[Value]] = defaultdict(list)
        self._all: dict[str, list[Value]] = defaultdict(list)  # by op, values without a node included
        self._users: dict[Value, list[Value]] = defaultdict(list)
        self._above: dict[Any, Set[Value]] = {}  # by (ops or words, their count, ops allowed between)
        self._explained: set[tuple[str, Value]] = set()
        self._guarded: set[Value] = set()  # a form matched here, but its guard refused
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
        """Return the readings `op` of `value` so far."""
        return [each for each in self._readings.get(value, ()) if each.op == op]

    def _read(self, value: Value, reading: Reading) -> None:
        self._words.add(reading.op)
        if not self.readings(value, reading.op):
            insort(self._by_head[f"reading:{reading.op}"], value, key=self._place)
        self._readings[value].append(reading)

    def _candidates(self, term: Term) -> Sequence[Value]:
        """List the values that may match `term`, in the order of the graph, values without a node last."""
        return self._indexed(term).candidates

    def _indexed(self, term: Term) -> _Candidates:
        """Return the candidates for `term`, memoised by its heads.

        The list is built again once readings were added.
        """
        heads = term.heads()
        values = [self._by_head.get(head, []) for head in heads]
        count = sum(map(len, values))
        if heads not in self._listed or self._listed[heads][0] != count:
            several = dict.fromkeys(merge(*values, key=self._place))
            self._listed[heads] = count, _Candidates(tuple(values[0] if len(values) == 1 else several), self._position)
        return self._listed[heads][1]

    def _where(self, form: Pattern, candidates: Sequence[Value]) -> Sequence[Value]:
        """Filter `candidates` for the first result of `form` to those that contain its rarest necessary op or word.

        Only ops in `form.between` may be on the way from there to the candidate.
        """
        counts = {heads: sum(map(self._count, heads)) for heads in form.needed}
        rarest = min(counts, key=lambda heads: (counts[heads], heads != form.results[0].heads()), default=None)
        if rarest is None or rarest == form.results[0].heads():
            return candidates
        key = rarest, counts[rarest], form.between
        if key not in self._above:
            self._above[key] = self._users_of(rarest, form.between)
        return [each for each in candidates if each in self._above[key]]

    def _count(self, head: str) -> int:
        return len(self._all.get(head) or self._by_head.get(head, ()))

    def _users_of(self, heads: frozenset[str], between: frozenset[str]) -> Set[Value]:
        """Collect the values of the ops or words `heads`, and all computed from them by ops in `between` alone."""
        waiting = [each for head in heads for each in (self._all.get(head) or self._by_head.get(head, ()))]
        reached = set(waiting)
        while waiting:
            users = {each for each in self._users.get(waiting.pop(), ()) if each.op in between} - reached
            reached |= users
            waiting += users
        return reached

    def attempt(self, step: Callable[[Rule], object], rule: Rule) -> bool:
        """Call `step(rule)`; return False, with the exception recorded as a failure and a refusal, if it raises.

        Raises:
            RuleError: the rule itself is malformed.
        """
        try:
            step(rule)
        except RuleError:
            raise
        except Exception as error:
            node = culprit(error) or self.graph.source.output_node()
            self.result.failures.append(failure("match", error, rule.name, node))
            self.result.refusals.append(Refusal(rule.name, raised("pattern", error), node))
            return False
        return True

    def apply(self, rule: Rule) -> None:
        """Find the matches of `rule`, form by form, and add a reading for each.

        A value at which a form matched is tried again only with forms that make other choices.
        """
        taken: dict[Value, list[Set[Any]]] = {}
        for form in rule.patterns():
            chosen = form.given.items()
            for value in self._where(form, self._candidates(form.results[0])) if self._may_occur(form) else ():
                if any(chosen <= each for each in taken.get(value, ())) or not self._makers(value):
                    continue
                matched = self._try(rule, form, value)
                if matched is not None:
                    taken.setdefault(value, []).append(chosen)
                    self.result.matches.append(matched)
                    self._read(value, Reading(rule.name, matched.captures, matched.relies))

    def _may_occur(self, form: Pattern) -> bool:
        """Return True if the graph has a reading for each word of `form`, and a value for each of its necessary ops."""
        return form.words <= self._words and all(any(map(self._count, heads)) for heads in form.needed)

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
                if self._diagnose:
                    refused = refused or reason.with_traceback(None)  # its frames would keep this search alive
                    self._guarded.add(value)
                    self._explain(rule, value, captures)
                continue
            except Exception as error:
                self.result.failures.append(failure("match", error, rule.name, roots[0][0]))
                refused = raised("guard", error)
                continue
            return Match(rule, form, captures, results, roots, relied(bound))
        if refused is not None:
            self._refuse(rule.name, refused, value, form.name if form.varies else "")
        return None

    def _may_replace(self, value: Value) -> bool:
        """Return True if a node computes `value`, or no node has it as its value: then only other matches read it."""
        return bool(self._makers(value)) or value not in self.graph.places

    def _explain(self, rule: Rule, value: Value, captures: Mapping[str, Any]) -> None:
        """Mark the values between `value` and `captures` as explained: a refusal of the guard of `rule` covers them."""
        taken = {each for each in captures.values() if isinstance(each, Value)}
        taken |= {each.arg for each in taken if each.op == "reshape"}  # a capture that lost dims of size 1
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if each not in taken and (rule.name, each) not in self._explained:
                self._explained.add((rule.name, each))
                waiting.extend(each.args)

    def _circular(self, captures: Mapping[str, Any], roots: Sequence[tuple[fx.Node, ...]]) -> bool:
        """Return True if the match cannot be one call: one of `captures` depends on a result, or on a write to memory
        behind it.

        `roots` are the nodes of each result. A capture may be cut from the result, as the start of a rolled buffer is
        from its end.
        """
        taken = [node for each in captures.values() if isinstance(each, Value) for node in self.graph.reads(each)]
        if len(roots) == 1:  # nodes before the result cannot depend on it
            order, regions, root = self.graph.order, self.graph.regions, roots[0][0]
            taken = [node for node in taken if order[node] >= order[root]]
            if any(regions[node] != regions[root] for node in taken):
                return True  # the call would move behind a write to memory
        return any(self.graph.depends(node, root) for node in taken for makers in roots for root in makers)

    def _complete(self, form: Pattern, value: Value) -> Iterator[Bindings]:
        """Yield the bindings of `form` with its first result at `value` and the other results near it."""
        for bound in form.results[0].match(value, {}, self):
            yield from self._join(form, form.results[1:], value, bound)

    def _join(self, form: Pattern, missing: Sequence[Term], first: Value, bound: Bindings) -> Iterator[Bindings]:
        """Extend `bound` by each `missing` result, tried at the candidates near `first`; yield the complete bindings.

        Of two results with the same heads the first in graph order is bound first, so that a pair is matched once.
        """
        missing = [term for term in missing if term not in bound]  # one result may be an operand of another
        if not missing:
            yield bound
            return
        order, start = self.graph.order, self._makers(first)[0]
        alike = not missing[0].heads().isdisjoint(form.results[0].heads())
        anywhere = not alike or missing[0].follows(bound)
        used = {bound[each] for each in form.results if each in bound}
        for value in self._indexed(missing[0]).near(first):
            makers = self._makers(value)
            if value in used or not self._may_replace(value):
                continue
            if makers and not anywhere and (order[makers[0]] < order[start] or self.graph.depends(makers[0], start)):
                continue
            for extended in missing[0].match(value, bound, self):
                yield from self._join(form, missing[1:], first, extended)

    def _place_on_paths(self, value: Value) -> tuple[int, ...]:
        """Return the position of `value` on each of the longest paths of the graph."""
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
        """Record a refusal of `rule` at the node that computes `value`, once per cause; none if no node does.

        `variant`, `miss` and `words` are as in `Refusal`.
        """
        makers = self._makers(value)
        owner = makers[0] if makers else self.graph.owners.get(value)
        key = rule, value, cause.template if isinstance(cause, Refused) else cause
        if owner is not None and key not in self._refused:
            self._refused.add(key)
            blamed = next(filter(None, map(self._computes, miss.at)), None) if miss else None
            about = self.graph.node(miss.of) if miss and miss.of else None
            covers = self._covered(miss) if miss else frozenset[fx.Node]()
            self.result.refusals.append(
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
        """Return the nodes that compute the values which `miss` accounts for, as a result or as an intermediate."""
        owners = (self.graph.owners.get(each) for each in miss.covers)
        places = (node for each in miss.covers for node in self.graph.places.get(each, ()))
        return frozenset((*filter(None, owners), *places))

    def _computes(self, value: Value) -> fx.Node | None:
        """Return the first call that computes `value`, as its result or as an intermediate; None for an input."""
        owner = self.graph.owners.get(value)
        return owner if owner is not None and owner.op == "call_function" else None

    def note_lookalikes(self, rule: Rule) -> None:
        """Refuse each value that matches a look-alike of `rule`, with the reason of that look-alike.

        Values inside of one node are tried too: a division contains a power. Rules list the nearest look-alike first,
        so the first that matches a value wins; a product that contains a refused product with fewer factors is not
        refused again.
        """
        refused: dict[Value, Pattern] = {}
        is_something = cache(lambda value: self._is_known(rule, value) or self._is_within(value))
        for form in filter(self._may_occur, rule.lookalikes()):
            for value in self._where(form, (*self._candidates(form.results[0]), *self._inside(form.results[0]))):
                is_longer = value.op == "mul" and any(refused.get(each, form) is not form for each in value.args)
                if value in refused or is_longer or is_something(value):
                    continue
                for bound in form.results[0].match(value, {}, self):
                    captures = captured(form, bound)
                    if form.keeps_apart(captures):
                        refused[value] = form
                        self._refuse(rule.name, Refused(form.reason, captures), value, words=form.words)
                        break

    def _is_known(self, rule: Rule, value: Value) -> bool:
        """Return True if `value`, or a product among its operands, has a reading of `rule`, or the guard explains
        it.
        """
        products = (each for each in value.args if each.op == "mul") if value.op == "mul" else ()
        if any(each in self._guarded or self.readings(each, rule.name) for each in (value, *products)):
            return True
        return (rule.name, value) in self._explained

    def _is_within(self, value: Value) -> bool:
        """Return True if `value` is an intermediate of a node whose result has a reading."""
        owner = None if value in self.graph.places else self.graph.owners.get(value)
        result = None if owner is None else self.graph.value_of.get(owner)
        return isinstance(result, Value) and bool(self._readings.get(result))

    def _inside(self, term: Term) -> list[Value]:
        """List the values that may match `term` and are intermediates, the result of no node."""
        values = (each for head in sorted(term.heads()) for each in self._all.get(head, ()))
        return [each for each in values if each not in self.graph.places]

    def note_misses(self) -> None:
        """Refuse, with its reason, each miss of a reader, unless the rule of the miss matched there after all."""
        for value, miss in self.graph.readings.missed():
            if miss.limited or miss.useless or not self.readings(value, miss.rule):
                self._refuse(miss.rule, miss.reason, value, miss=miss)
