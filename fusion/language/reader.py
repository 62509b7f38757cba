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
from typing import Any, TypeVar

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

    def require(self, who: Callable[[], str], used: Iterable[str]) -> None:
        """Raise a RuleError where `who` names what this word is not applied to."""
        if self.captures is not None:
            require_known(lambda: f"{who()} {self.name} of", used, self.captures, "which is no capture of it")


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
        module, name = self.read.__module__, self.read.__qualname__
        if getattr(sys.modules.get(module), name, None) is self:
            return _declared, (module, name)
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
    """Rules, and the readers of the words that are no rules, as a package provides them.

    Raises:
        RuleError: something is no rule or no reader, a name occurs twice, or a word is given twice.
    """

    rules: tuple[Rule, ...]
    readers: tuple[Reader, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("rules", Rule), ("readers", Reader)):
            object.__setattr__(self, name, tuple(_checked_kind(each, kind) for each in getattr(self, name)))
        rules = [(each.name, _defined(type(each))) for each in self.rules]
        _require_unique("rule", rules)
        _require_unique("reader", ((each.name, _defined(each.read)) for each in self.readers))
        words = [(word, f"the reader {each.name}") for each in self.readers for word in each.gives]
        _require_unique("word", (*words, *((name, f"the rule {kind}") for name, kind in rules)))

    def words(self) -> dict[str, Word]:
        """What the readers give, by name."""
        return {each.name: each for reader in self.readers for each in reader.words}

    def __add__(self, more: object) -> Library:
        """Add the rules and readers of another library, of a list or one alone behind those of this one."""
        other = Library.of(more)
        return Library((*self.rules, *other.rules), (*self.readers, *other.readers))

    def __radd__(self, more: object) -> Library:
        """Add the rules and readers of another library, of a list or one alone before those of this one."""
        return Library.of(more) + self

    @staticmethod
    def of(given: object) -> Library:
        """Make a library of a rule, a reader, or a collection of both; a library is given back as it is.

        Raises:
            RuleError: something is neither a rule nor a reader, or a name occurs twice.
        """
        if isinstance(given, Library):
            return given
        listed = given if isinstance(given, Iterable) and not isinstance(given, type | str) else [given]
        checked = [_checked_kind(each, (Rule, Reader)) for each in listed]
        rules = (each for each in checked if isinstance(each, Rule))
        return Library(tuple(rules), tuple(each for each in checked if isinstance(each, Reader)))


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


Provided = TypeVar("Provided", bound=Rule | Reader)


def _checked_kind(given: Any, wanted: type[Provided] | tuple[type[Provided], ...]) -> Provided:
    """Give back a rule or a reader.

    Raises:
        RuleError: it is not what is `wanted`.
    """
    if isinstance(given, wanted) and _is_hashable(given):
        return given
    what, todo = f"{given!r} is neither a rule nor a reader", "hand over instances of classes derived from Rule"
    if isinstance(given, type) and issubclass(given, Rule):
        what, todo = f"{given.__name__} is a class", f"hand over an instance, {given.__name__}()"
    elif isinstance(given, str):
        what, todo = f"{given!r} is a name", "the option `rules` takes the names of rules, and the argument the rules"
    elif isinstance(given, wanted):
        what, todo = f"{given!r} has a field that cannot be hashed", "give it a value that cannot change, as a tuple"
    elif isinstance(given, Rule | Reader):
        what, todo = f"{given!r} stands in the place of the other", "write Library(rules, readers)"
    elif callable(given):
        what, todo = f"{given!r} is a function", "mark a reader with @reader(gives=...)"
    raise RuleError(f"handing over rules: {what}; {todo}")


def _is_hashable(given: Any) -> bool:
    try:
        hash(given)
    except TypeError:
        return False
    return True


def _defined(kind: Callable[..., Any] | type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _require_unique(kind: str, named: Iterable[tuple[str, str]]) -> None:
    """Raise a RuleError where two providers, each with what it is defined as, have one name."""
    seen: dict[str, str] = {}
    for name, provider in named:
        if name in seen:
            both = f"by {seen[name]}" if seen[name] == provider else f"by {seen[name]} and by {provider}"
            raise RuleError(
                f"loading rules and readers: the {kind} {name!r} is provided twice, {both}; rename one of them, or "
                "leave one out"
            )
        seen[name] = provider


def require_known(
    who: Callable[[], str],
    used: Iterable[str],
    known: Iterable[str],
    wrong: str,
    hints: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Raise a RuleError for the first name in `used` that is not `known`, with the nearest of `known` and `hints`."""
    for each in sorted(set(used) - set(known)):
        near = get_close_matches(each, sorted({*known, *hints()}), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RuleError(f"loading rules and readers: {who()} {each!r}, {wrong}{hint}")
