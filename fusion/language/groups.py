"""Groups: captures that belong together, declared once and taken as one by forms, guards and lowerings.

    @dataclass(frozen=True)
    class Tables(Group):
        cos: Any = tensor("T U Dr")
        sin: Any = tensor("T U Dr")

    @pattern
    def form(self, p, x=tensor("*B D"), tables=Tables): ...        in the form, tables.cos is a term
    def guard(self, x, tables): ...                                and here the value that it took, or None

A *facet* is a mode that is independent of others: a family of groups with the same methods, among which `variants`
chooses. What a mode means, takes and refuses, and the arguments that it becomes, then stand in one class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Self, TypeGuard


@dataclass(frozen=True)
class Tensor:
    """A declared tensor: its named dims, whether it may be lacking, and whether it must be computed if it is not."""

    dims: tuple[str, ...]
    optional: bool
    needed: bool


@dataclass(frozen=True)
class Attribute:
    """A declared number, or other thing that is no tensor; one `among` some, where any are named."""

    among: tuple[Any, ...] = ()


def tensor(dims: str, optional: bool = False, needed: bool = True) -> Any:
    """Declare a captured tensor by its named dims, e.g. "*B D": any leading dims, then D.

    Args:
        dims: the names, with a star before those of any number of leading dims.
        optional: whether it may not be there: then it is None.
        needed: whether a match is refused whose tensor cannot be computed, as neither a node nor a recipe gives it;
            lowerings get None for one that is not needed, as what is told of it in other captures is enough for some.
    """
    return Tensor(tuple(dims.split()), optional, needed)


def scalar() -> Any:
    """Declare a captured number that the graph holds as a constant."""
    return Attribute()


def attribute(*among: Any) -> Any:
    """Declare a captured attribute of an op: dims, an exponent, an order of lanes; if any are named, one `among` them.

    So the kinds of a facet share one word: each is matched where the attribute is one of its own.
    """
    return Attribute(among)


@dataclass(frozen=True)
class Group:
    """Captures that belong together: a frozen dataclass whose fields have `tensor`, `scalar`, `attribute` as defaults.

    A field may be a group itself. In a form fields are terms; in a guard or a lowering they are what was captured.
    Those that a kind names in `differing` must be different values.
    """

    differing: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def made(cls, name: str, make: Callable[[str, Any], Any]) -> Self:
        """The group with what `make` gives for the full name of each field and what it is declared as."""
        named = _named(cls, name)
        return cls(**{own: kind.made(full, make) if is_group(kind) else make(full, kind) for own, full, kind in named})

    @classmethod
    def bound(cls, name: str, captures: Mapping[str, Any]) -> Self:
        """The group `name` of some captures; a field that the form lacks is None."""
        return cls.made(name, lambda full, _: captures.get(full))


@cache
def _named(kind: type[Group], name: str) -> tuple[tuple[str, str, Any], ...]:
    """Each field of a group of that name: its own name, its full name, and what it is declared as."""
    return tuple((each.name, f"{name}.{each.name}", each.default) for each in fields(kind))


def is_group(declared: Any) -> TypeGuard[type[Group]]:
    """Whether something is a kind of group, and not one group."""
    return isinstance(declared, type) and issubclass(declared, Group)
