"""Terms that match a value by a semantic op that another rule or a reader has assigned to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.graph import Reading, Value
from fusion.language.terms import Bindings, Capture, Context, Term, attributes

RELIES = "inputs of which something is assumed"


def relied(bound: Bindings) -> frozenset[str]:
    """Return the names of the inputs on whose assumed contents the match with these bindings relies."""
    return bound.get(RELIES, frozenset())


@dataclass(frozen=True, eq=False)
class Meaning(Term):
    """A value that has a reading as the semantic op `op`, whose captures match the terms in `captures`, by name."""

    op: str
    captures: Mapping[str, Any]

    def below(self) -> tuple[Any, ...]:
        """Return the terms, and attributes, of the captures."""
        return tuple(self.captures.values())

    def heads(self) -> frozenset[str]:
        """Return the key under which matching indexes values with a reading as `op`, whatever their canonical op."""
        return frozenset((f"reading:{self.op}",))

    def follows(self, bound: Bindings) -> bool:
        """Return True if a term in or below `captures` is bound; a plain capture, such as a shared table, does not
        count.
        """
        return any(_is_bound(each, bound) for each in self.captures.values() if not isinstance(each, Capture))

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        for reading in cx.readings(value, self.op):
            if not reading.captures.keys() <= self.captures.keys():
                continue  # a gain, a mask or a bias that the pattern does not name would be lost
            relies = {RELIES: relied(bound) | reading.relies} if reading.relies else {}
            yield from self._take(list(self.captures.items()), reading, {**bound, **relies}, cx)

    def _take(
        self, wanted: Sequence[tuple[str, Any]], reading: Reading, bound: Bindings, cx: Context
    ) -> Iterator[Bindings]:
        if not wanted:
            yield bound
            return
        (name, term), rest = wanted[0], wanted[1:]
        have = reading.captures.get(name)
        if have is None and isinstance(term, Capture) and term.optional:
            if bound.get(term) is None:  # bound to None, so that no other reading with this capture matches
                yield from self._take(rest, reading, {**bound, term: None}, cx)
        elif isinstance(term, Term) and isinstance(have, Value):
            for bindings in term.match(have, bound, cx):
                yield from self._take(rest, reading, bindings, cx)
        elif not isinstance(term, Term):
            known = attributes((term,), (have,), bound)
            if known is not None:
                yield from self._take(rest, reading, known, cx)


def _is_bound(term: Any, bound: Bindings) -> bool:
    """Return True if `term`, or any term below it, is bound."""
    return isinstance(term, Term) and (term in bound or any(_is_bound(each, bound) for each in term.below()))
