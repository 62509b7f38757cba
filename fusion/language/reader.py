"""Readers: what finds a meaning that no form can say, because it takes a proof: masks, layouts of rows, exponentials.

    @reader(gives=("rotation",), needs=("linear",))
    def rotations(graph: Graph) -> Iterator[Found]: ...

A library declares its readers beside its rules. They run before any rule is matched, each after those that give what
it needs; what they give are words, as the names of rules are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from fusion.errors import RuleError
from fusion.graph import Graph
from fusion.graph.readings import Found
from fusion.language.rule import Rule

Read = Callable[[Graph], Iterator[Found]]


@dataclass(frozen=True)
class Reader:
    """One way to find meanings.

    Attributes:
        name: what it is called in errors.
        read: gives values of a graph with what they mean, and values that only look like it with the reason.
        gives: the semantic ops that it may find.
        needs: those that must have been found before.
        refines: those that another reader gives, of which it finds more.
    """

    name: str
    read: Read
    gives: frozenset[str]
    needs: frozenset[str] = frozenset()
    refines: frozenset[str] = frozenset()

    def waits_for(self, other: Reader) -> bool:
        """Whether another must have run before."""
        known = (other.gives | other.refines) & self.needs or other.gives & self.refines
        return other is not self and bool(known)


def reader(*, gives: Iterable[str], needs: Iterable[str] = (), refines: Iterable[str] = ()) -> Callable[[Read], Reader]:
    """Make a reader of a function."""

    def make(read: Read) -> Reader:
        return Reader(read.__name__, read, frozenset(gives), frozenset(needs), frozenset(refines))

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

    def checked(self) -> Library:
        """This library, if every word that its readers and rules use is given by something."""
        given = {word for each in self.readers for word in each.gives}
        words = given | {rule.name for rule in self.rules}
        for each in self.readers:
            _require_known(f"reader {each.name} needs", each.needs | each.refines, given)
        for rule in self.rules:
            _require_known(f"rule {rule.name} uses", rule.uses(), words)
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


def _require_unique(kind: str, names: Sequence[str]) -> None:
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise RuleError(f"loading rules and readers: the {kind} {twice[0]!r} is provided twice; rename one of them")


def _require_known(who: str, words: Iterable[str], known: Iterable[str]) -> None:
    for word in sorted(set(words) - set(known)):
        near = get_close_matches(word, sorted(known), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RuleError(f"loading rules and readers: {who} {word!r}, which no rule or reader gives{hint}")
