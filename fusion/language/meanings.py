"""Terms for what a value was found to mean, by another rule or by a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.graph import Reading, Value
from fusion.language.terms import Bindings, Capture, Context, Term, attributes

RELIES = "inputs of which something is assumed"


def relied(bound: Bindings) -> frozenset[str]:
    """The inputs of which something was assumed where these bindings were read."""
    return bound.get(RELIES, frozenset())


@dataclass(frozen=True, eq=False)
class Meaning(Term):
    """A value that already reads as a semantic op, such as rms_norm, with what it is applied to."""

    op: str
    captures: Mapping[str, Any]

    def below(self) -> tuple[Any, ...]:
        """Its parts."""
        return tuple(self.captures.values())

    def heads(self) -> frozenset[str]:
        """Any op: found by its reading."""
        return frozenset((f"reading:{self.op}",))

    def follows(self, bound: Bindings) -> bool:
        """Whether something below what it is applied to is bound already; to share a table is not to follow."""
        return any(_holds(each, bound) for each in self.captures.values() if not isinstance(each, Capture))

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        for reading in cx.readings(value, self.op):
            if not reading.captures.keys() <= self.captures.keys():
                continue  # a gain, a mask or a bias that the pattern does not speak of may not get lost
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
            if bound.get(term) is None:  # bound to nothing, so that no other meaning can have it
                yield from self._take(rest, reading, {**bound, term: None}, cx)
        elif isinstance(term, Term) and isinstance(have, Value):
            for found in term.match(have, bound, cx):
                yield from self._take(rest, reading, found, cx)
        elif not isinstance(term, Term):
            known = attributes((term,), (have,), bound)
            if known is not None:
                yield from self._take(rest, reading, known, cx)


def _holds(term: Any, bound: Bindings) -> bool:
    """Whether a term, or one below it, is bound."""
    return isinstance(term, Term) and (term in bound or any(_holds(each, bound) for each in term.below()))
