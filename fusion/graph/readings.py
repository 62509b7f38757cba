"""Readings: what values mean. A typed multimap, as a value may mean several things: a write of rows, and of a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fusion.graph.value import Value


@dataclass(frozen=True)
class Reading:
    """One thing that a value means.

    Attributes:
        op: the semantic op, a word that forms may use.
        captures: what it is applied to, by name.
        relies: the inputs that are assumed to be what is said of them.
        over: what it writes over: a value that is elsewhere as this one is; None for what is no write.
    """

    op: str
    captures: Mapping[str, Any]
    relies: frozenset[str] = frozenset()
    over: Value | None = None


@dataclass(frozen=True)
class Miss:
    """Why a value that looks like something is nothing of the kind; `rule` is named in the report.

    Attributes:
        rule: what it looks like.
        reason: why it is none.
        at: values to blame for it, the likeliest first: the line of the first that a node computes is told.
        of: what it is said of, where several values look like one thing: it is told once.
        limited: the value does read so, and this is why a limit of an operator refuses it.
        useless: the value does read so, and this is why a rewrite of it may save nothing.
        covers: values that this reason accounts for: reports drop the reasons of other rules about them.
    """

    rule: str
    reason: str
    at: tuple[Value, ...] = ()
    of: Value | None = None
    limited: bool = False
    useless: bool = False
    covers: frozenset[Value] = frozenset()


Found = tuple[Value, Reading | Miss]


@dataclass(frozen=True)
class Readings:
    """What is known of the values of one graph."""

    _of: Mapping[Value, tuple[Reading, ...]] = field(default_factory=lambda: MappingProxyType({}))
    _misses: tuple[tuple[Value, Miss], ...] = ()

    def __iter__(self) -> Iterator[tuple[Value, Reading]]:
        """Every value with each thing that it means."""
        return ((value, each) for value, several in self._of.items() for each in several)

    def of(self, value: Value, *ops: str) -> tuple[Reading, ...]:
        """What a value means, of some ops or of all."""
        return tuple(each for each in self._of.get(value, ()) if not ops or each.op in ops)

    def one(self, value: Value, *ops: str) -> Reading | None:
        """The first of these."""
        return next(iter(self.of(value, *ops)), None)

    def all(self, *ops: str) -> list[tuple[Value, Reading]]:
        """The values that mean one of these ops."""
        return [(value, each) for value, each in self if each.op in ops]

    def missed(self, *rules: str) -> list[tuple[Value, Miss]]:
        """What looks like something and is not, of some rules or of all."""
        return [(value, each) for value, each in self._misses if not rules or each.rule in rules]

    def joined(self, found: Iterable[Found]) -> Readings:
        """These and more; what is known already is not said twice."""
        of, misses = dict(self._of), dict.fromkeys(self._misses)
        for value, each in found:
            if isinstance(each, Miss):
                misses[value, each] = None
            elif each not in of.get(value, ()):
                of[value] = (*of.get(value, ()), each)
        return Readings(MappingProxyType(of), tuple(misses))
