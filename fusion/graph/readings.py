"""Readings: the meanings of values, a typed multimap. A value may have several: a write of rows, and one of a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fusion.graph.value import Value


@dataclass(frozen=True)
class Reading:
    """One meaning of a value.

    Attributes:
        op: the semantic op, a word that forms may use.
        captures: the operands of the op, by name.
        relies: the inputs whose assumed contents (option `assume`) the meaning depends on.
        over: for a write, the value before the write: equal to this value wherever nothing was written; else None.
    """

    op: str
    captures: Mapping[str, Any]
    relies: frozenset[str] = frozenset()
    over: Value | None = None


@dataclass(frozen=True)
class Miss:
    """Reason why a value that looks like an op is not one; `rule` is named in the report.

    Attributes:
        rule: the rule whose op the value looks like.
        reason: the requirement that is not met.
        at: values to blame, the likeliest first: the report names the line of the first that a node computes.
        of: the subject, where several values look like one op: the report has one reason for each subject.
        limited: True if the value does mean the op, and `reason` is the limit of an operator that refuses it.
        useless: True if the value does mean the op, and `reason` is why a rewrite may save nothing.
        covers: values that this reason explains: the report drops the reasons of other rules about them.
    """

    rule: str
    reason: str
    at: tuple[Value, ...] = ()
    of: Value | None = None
    limited: bool = False
    useless: bool = False
    covers: frozenset[Value] = frozenset()


Annotation = tuple[Value, Reading | Miss]


@dataclass(frozen=True)
class Readings:
    """Meanings and misses of the values of one graph, and the pairs of a value and a rule without misses."""

    _readings: Mapping[Value, tuple[Reading, ...]] = field(default_factory=lambda: MappingProxyType({}))
    _misses: tuple[tuple[Value, Miss], ...] = ()
    _superseded: frozenset[tuple[Value, str]] = frozenset()

    def __iter__(self) -> Iterator[tuple[Value, Reading]]:
        """Iterate over the pairs of a value and one of its meanings."""
        return ((value, each) for value, several in self._readings.items() for each in several)

    def of(self, value: Value, *ops: str) -> tuple[Reading, ...]:
        """Return the meanings of `value` with one of `ops`, or all of them."""
        return tuple(each for each in self._readings.get(value, ()) if not ops or each.op in ops)

    def one(self, value: Value, *ops: str) -> Reading | None:
        """Return the first meaning of `value` with one of `ops`, or with any op; None where there is none."""
        return next(iter(self.of(value, *ops)), None)

    def all(self, *ops: str) -> list[tuple[Value, Reading]]:
        """List the pairs of a value and a meaning with one of `ops`."""
        return [(value, each) for value, each in self if each.op in ops]

    def missed(self, *rules: str) -> list[tuple[Value, Miss]]:
        """List the pairs of a value and a miss with one of `rules`, or all of them."""
        return [(value, each) for value, each in self._misses if not rules or each.rule in rules]

    def is_superseded(self, value: Value, rule: str) -> bool:
        """Return True if a reader that supersedes `rule` has read `value`, or said why not."""
        return (value, rule) in self._superseded

    def joined(self, new: Iterable[Annotation], supersedes: Iterable[str] = ()) -> Readings:
        """Return these readings and the `new` ones, each once; drop misses of rules that they supersede."""
        new = list(new)
        superseded = self._superseded | {(value, rule) for value, _ in new for rule in supersedes}
        readings, misses = dict(self._readings), dict.fromkeys(self._misses)
        for value, each in new:
            if isinstance(each, Miss):
                misses[value, each] = None
            elif each not in readings.get(value, ()):
                readings[value] = (*readings.get(value, ()), each)
        remaining = tuple((value, each) for value, each in misses if (value, each.rule) not in superseded)
        return Readings(MappingProxyType(readings), remaining, superseded)
