"""Readers: functions that assign semantic ops to values by proofs that no form can express, e.g. of what a mask shows.

    ROTATION = word("rotation", "x · cos + partner(x) · sin", x="[.., D]", cos="[.., D]", sin="[.., D]")

    @reader(gives=(ROTATION,), needs=("linear",))
    def rotations(graph: Graph) -> Iterator[Annotation]: ...

A library declares its readers in addition to its rules. They run before any rule is matched, each after the readers of
the words that it needs. A word is the name of a semantic op that a reader gives; the names of rules are semantic ops
as well.
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
from fusion.graph.readings import Annotation
from fusion.language.rule import Rule
from fusion.operators import Operator, Package

Read = Callable[[Graph], Iterator[Annotation]]


@dataclass(frozen=True)
class Word:
    """The declaration of a semantic op that a reader gives.

    Attributes:
        name: the name in forms and readers.
        meaning: a formula or description of such a value, for the docs.
        captures: operand or attribute -> its dims or possible values, as text; None if undeclared, hence unchecked.
    """

    name: str
    meaning: str = ""
    captures: Mapping[str, str] | None = field(default=None, hash=False)

    def require(self, who: Callable[[], str], used: Iterable[str]) -> None:
        """Require that the names `used` are captures of the word; `who` begins the message.

        Raises:
            RuleError: one of them is not.
        """
        if self.captures is not None:
            require_known(lambda: f"{who()} {self.name} of", used, self.captures, "which is no capture of it")


def word(name: str, meaning: str, /, **captures: str) -> Word:
    """Declare a word with its meaning and all its captures."""
    return Word(name, meaning, captures)


@dataclass(frozen=True)
class Reader:
    """A function that yields readings of the values of a graph, with its declared dependencies.

    Attributes:
        name: the function's name.
        read: the function: yields (value, reading), or (value, miss) for a value that only resembles one.
        gives: the names of the words that the reader may yield, given by no other reader or rule.
        needs: the names of the words whose readers must run first.
        refines: the names of words that another reader gives, and of which this one, run later, yields more.
        words: the declarations of the words in `gives`.
        supersedes: rules whose misses are dropped about each value of which this reader yields a reading or a miss.
    """

    name: str
    read: Read
    gives: frozenset[str]
    needs: frozenset[str] = frozenset()
    refines: frozenset[str] = frozenset()
    words: tuple[Word, ...] = ()
    supersedes: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the reader by its qualified name if its module has it under that name, else by its fields."""
        module, name = self.read.__module__, self.read.__qualname__
        if getattr(sys.modules.get(module), name, None) is self:
            return _declared, (module, name)
        return Reader, tuple(getattr(self, each.name) for each in fields(self))

    @property
    def only_reports(self) -> bool:
        """True if this reader yields misses alone: of what is left after all readers of words."""
        return not self.gives and not self.refines

    def waits_for(self, other: Reader) -> bool:
        """Return True if `other` must run first: it gives or refines a needed word, gives a word that this one refines,
        or gives or refines any word where this one `only_reports`.
        """
        awaited = (other.gives | other.refines) & self.needs or other.gives & self.refines
        return other is not self and bool(awaited or (self.only_reports and not other.only_reports))


def _declared(module: str, name: str) -> Reader:
    return getattr(import_module(module), name)


def reader(
    *,
    gives: Iterable[Word | str] = (),
    needs: Iterable[str] = (),
    refines: Iterable[str] = (),
    supersedes: Iterable[str] = (),
) -> Callable[[Read], Reader]:
    """Turn a function into a `Reader` that gives the words `gives`, after the readers of `needs` and of the words it
    `refines`.

    The captures of a word that is given by name alone are not checked in forms.
    """
    words = tuple(each if isinstance(each, Word) else Word(each) for each in gives)
    names = frozenset(each.name for each in words)

    def make(read: Read) -> Reader:
        return Reader(read.__name__, read, names, frozenset(needs), frozenset(refines), words, frozenset(supersedes))

    return make


@dataclass(frozen=True)
class Library:
    """The rules of a package, the readers of the words that they use, and operators of its own that they emit.

    `packages` are the Python packages that register these operators on an NPU.

    Raises:
        RuleError: an element is of another kind, two have one name, or two give one word.
    """

    rules: tuple[Rule, ...]
    readers: tuple[Reader, ...] = ()
    operators: tuple[Operator, ...] = ()
    packages: tuple[Package, ...] = ()

    def __post_init__(self) -> None:
        kinds = ("rules", Rule), ("readers", Reader), ("operators", Operator), ("packages", Package)
        for name, kind in kinds:
            object.__setattr__(self, name, tuple(_checked_kind(each, kind) for each in getattr(self, name)))
        rules = [(each.name, _defined(type(each))) for each in self.rules]
        _require_unique("rule", rules)
        _require_unique("reader", ((each.name, _defined(each.read)) for each in self.readers))
        _require_unique("operator", ((each.name, _defined(each.compute)) for each in self.operators))
        _require_unique("package", ((each.name, each.source) for each in self.packages))
        words = [(word, f"the reader {each.name}") for each in self.readers for word in each.gives]
        _require_unique("word", (*words, *((name, f"the rule {kind}") for name, kind in rules)))

    def words(self) -> dict[str, Word]:
        """Return name -> word for all words that the readers give."""
        return {each.name: each for reader in self.readers for each in reader.words}

    def __add__(self, more: object) -> Library:
        """Add the parts of a library, of a collection, or a single part, after those of this."""
        other = Library.of(more)
        return Library(
            (*self.rules, *other.rules),
            (*self.readers, *other.readers),
            (*self.operators, *other.operators),
            (*self.packages, *other.packages),
        )

    def __radd__(self, more: object) -> Library:
        """Add the parts of a library, of a collection, or a single part, before those of this."""
        return Library.of(more) + self

    @staticmethod
    def of(given: object) -> Library:
        """Convert a rule, a reader, an operator, a package, or a collection of these to a library; return a library
        unchanged.

        Raises:
            RuleError: an element is none of these, two have one name, or two give one word.
        """
        if isinstance(given, Library):
            return given
        listed = given if isinstance(given, Iterable) and not isinstance(given, type | str) else [given]
        checked = [_checked_kind(each, (Rule, Reader, Operator, Package)) for each in listed]
        return Library(
            tuple(each for each in checked if isinstance(each, Rule)),
            tuple(each for each in checked if isinstance(each, Reader)),
            tuple(each for each in checked if isinstance(each, Operator)),
            tuple(each for each in checked if isinstance(each, Package)),
        )


def ordered(readers: Sequence[Reader]) -> list[Reader]:
    """Sort `readers` topologically by `waits_for`, otherwise in the given order.

    Raises:
        RuleError: the dependencies are cyclic.
    """
    left, done = list(readers), list[Reader]()
    while left:
        ready = next((each for each in left if not any(each.waits_for(other) for other in left)), None)
        if ready is None:
            raise RuleError(f"loading readers: they need each other in a circle: {sorted(each.name for each in left)}")
        left.remove(ready)
        done.append(ready)
    return done


def needed(readers: Sequence[Reader], rules: Iterable[Rule], reports: bool = False) -> list[Reader]:
    """Select the readers that give or refine a word which `rules` use, or which another selected reader needs.

    With `reports` also those that only report, if all words that they need are given.
    """
    words = set[str]().union(*(rule.uses() for rule in rules))
    selected: list[Reader] = []
    while more := [
        each for each in readers if each not in selected and not words.isdisjoint(each.gives | each.refines)
    ]:
        selected += more
        words |= set[str]().union(*(each.needs | each.refines for each in more))
    given = set[str]().union(*(each.gives for each in selected))
    return [each for each in readers if each in selected or (reports and each.only_reports and each.needs <= given)]


def levels(rules: Sequence[Rule]) -> list[list[Rule]]:
    """Partition `rules` into topological levels: a rule uses only rules of earlier levels; each level sorted by name.

    Raises:
        RuleError: the dependencies are cyclic.
    """
    left, sorted_levels = list(rules), list[list[Rule]]()
    while left:
        names = {rule.name for rule in left}
        ready = [rule for rule in left if names.isdisjoint(rule.uses())]
        if not ready:
            raise RuleError(f"loading rules: they use each other in a circle: {sorted(names)}")
        sorted_levels.append(sorted(ready, key=lambda rule: rule.name))
        left = [rule for rule in left if rule not in ready]
    return sorted_levels


Provided = TypeVar("Provided", bound=Rule | Reader | Operator | Package)


def _checked_kind(given: Any, wanted: type[Provided] | tuple[type[Provided], ...]) -> Provided:
    """Return `given`, checked to be a hashable instance of `wanted`.

    Raises:
        RuleError: it is not.
    """
    if isinstance(given, wanted) and _is_hashable(given):
        return given
    what, todo = f"{given!r} is no rule, no reader and no operator", "hand over instances of classes derived from Rule"
    if isinstance(given, type) and issubclass(given, Rule):
        what, todo = f"{given.__name__} is a class", f"hand over an instance, {given.__name__}()"
    elif isinstance(given, str):
        what, todo = f"{given!r} is a name", "the option `rules` takes the names of rules, and the argument the rules"
    elif isinstance(given, wanted):
        what, todo = f"{given!r} has a field that cannot be hashed", "give it a value that cannot change, as a tuple"
    elif isinstance(given, Rule | Reader | Operator | Package):
        what, todo = (
            f"{given!r} stands in the place of another kind",
            "write Library(rules, readers, operators, packages)",
        )
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
    """Require that no name occurs twice in the (name, provider) pairs `named`.

    Raises:
        RuleError: two providers have one name.
    """
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
    """Require that all names in `used` are in `known`.

    Raises:
        RuleError: one is not; the message is `who()`, the name, `wrong` and the nearest name of `known` and `hints()`.
    """
    for each in sorted(set(used) - set(known)):
        near = get_close_matches(each, sorted({*known, *hints()}), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RuleError(f"loading rules and readers: {who()} {each!r}, {wrong}{hint}")
