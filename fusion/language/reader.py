"""Readers: what finds a meaning that no form can say, because it takes a proof: masks, layouts of rows, exponentials.

    ROTATION = word("rotation", "x · cos + partner(x) · sin", x="[.., D]", cos="[.., D]", sin="[.., D]")

    @reader(gives=(ROTATION,), needs=("linear",))
    def rotations(graph: Graph) -> Iterator[Found]: ...

A library declares its readers beside its rules. They run before any rule is matched, each after those that give what
it needs; what they give are words, as the names of rules are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from fusion.errors import RuleError
from fusion.graph import Graph
from fusion.graph.readings import Found
from fusion.language.rule import Rule

Read = Callable[[Graph], Iterator[Found]]


@dataclass(frozen=True)
class Word:
    """A semantic op that a reader gives.

    Attributes:
        name: what forms and readers call it.
        meaning: what a value that reads so is.
        captures: what it is applied to, each with its dims or the values it may have; None where nothing is declared.
    """

    name: str
    meaning: str = ""
    captures: Mapping[str, str] | None = field(default=None, hash=False)

    def require(self, who: str, used: Iterable[str]) -> None:
        """Raise a RuleError where `who` names what this word is not applied to."""
        if self.captures is not None:
            _require_known(f"{who} {self.name} of", used, self.captures, "which is no capture of it")


def word(name: str, meaning: str, /, **captures: str) -> Word:
    """Declare a word, with all that it is applied to."""
    return Word(name, meaning, captures)


@dataclass(frozen=True)
class Reader:
    """One way to find meanings.

    Attributes:
        name: what it is called in errors.
        read: gives values of a graph with what they mean, and values that only look like it with the reason.
        gives: the names of the words that it may find.
        needs: those that must have been found before.
        refines: those that another reader gives, of which it finds more.
        words: what it gives as declared.
    """

    name: str
    read: Read
    gives: frozenset[str]
    needs: frozenset[str] = frozenset()
    refines: frozenset[str] = frozenset()
    words: tuple[Word, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reader by its name in its module, as a function is; a local one by its parts."""
        place = self.read.__module__, self.read.__qualname__
        if vars(sys.modules[place[0]]).get(place[1]) is self:
            return _declared, place
        return Reader, tuple(getattr(self, each.name) for each in fields(self))

    def waits_for(self, other: Reader) -> bool:
        """Whether another must have run before."""
        known = (other.gives | other.refines) & self.needs or other.gives & self.refines
        return other is not self and bool(known)


def _declared(module: str, name: str) -> Reader:
    return getattr(import_module(module), name)


def reader(
    *, gives: Iterable[Word | str], needs: Iterable[str] = (), refines: Iterable[str] = ()
) -> Callable[[Read], Reader]:
    """Make a reader of a function; a word that is given by its name alone is not checked where it is used."""
    words = tuple(each if isinstance(each, Word) else Word(each) for each in gives)
    names = frozenset(each.name for each in words)

    def make(read: Read) -> Reader:
        return Reader(read.__name__, read, names, frozenset(needs), frozenset(refines), words)

    return make


@dataclass(frozen=True)
class Library:
    """What a package provides: rules, and the readers of the words that are no rules.

    Raises:
        RuleError: a name occurs twice, a word is given by two readers or by nothing, or readers need each other.
    """

    rules: tuple[Rule, ...]
    readers: tuple[Reader, ...] = ()

    def __post_init__(self) -> None:
        for kind, names in (("rule", [each.name for each in self.rules]), ("reader", [r.name for r in self.readers])):
            _require_unique(kind, names)
        _require_unique("word", [word for each in self.readers for word in each.gives])

    def words(self) -> dict[str, Word]:
        """What the readers give, by name."""
        return {each.name: each for reader in self.readers for each in reader.words}

    def checked(self) -> Library:
        """This library, if all words that its readers and rules use are given, and applied to what they declare."""
        declared, given = self.words(), {word for each in self.readers for word in each.gives}
        words = given | {rule.name for rule in self.rules}
        for each in self.readers:
            _require_known(f"reader {each.name} needs", each.needs | each.refines, given)
        for rule in self.rules:
            _require_known(f"rule {rule.name} uses", rule.uses(), words)
            for name, captures in rule.applies():
                if name in declared:
                    declared[name].require(f"rule {rule.name} uses", captures)
        ordered(self.readers)
        return self

    def joined(self, other: Library) -> Library:
        """Both."""
        return Library((*self.rules, *other.rules), (*self.readers, *other.readers))


def ordered(readers: Sequence[Reader]) -> list[Reader]:
    """Readers so that each comes after those that give what it needs, otherwise as they are declared.

    Raises:
        RuleError: they need each other in a circle.
    """
    left, done = list(readers), list[Reader]()
    while left:
        ready = next((each for each in left if not any(each.waits_for(other) for other in left)), None)
        if ready is None:
            raise RuleError(f"loading readers: they need each other in a circle: {sorted(each.name for each in left)}")
        left.remove(ready)
        done.append(ready)
    return done


def levels(rules: Sequence[Rule]) -> list[list[Rule]]:
    """Rules so that each comes after those whose readings it uses, by name where neither uses the other.

    Raises:
        RuleError: they use each other in a circle.
    """
    left, found = list(rules), list[list[Rule]]()
    while left:
        names = {rule.name for rule in left}
        ready = [rule for rule in left if names.isdisjoint(rule.uses())]
        if not ready:
            raise RuleError(f"loading rules: they use each other in a circle: {sorted(names)}")
        found.append(sorted(ready, key=lambda rule: rule.name))
        left = [rule for rule in left if rule not in ready]
    return found


def _require_unique(kind: str, names: Sequence[str]) -> None:
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise RuleError(f"loading rules and readers: the {kind} {twice[0]!r} is provided twice; rename one of them")


def _require_known(
    who: str, words: Iterable[str], known: Iterable[str], wrong: str = "which no rule or reader gives"
) -> None:
    for each in sorted(set(words) - set(known)):
        near = get_close_matches(each, sorted(known), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RuleError(f"loading rules and readers: {who} {each!r}, {wrong}{hint}")
