"""Groups and match records: several captures as one parameter.

A *group* is declared once as a dataclass, and forms, guards and lowerings take it as one parameter:

    @dataclass(frozen=True)
    class Tables(Group):
        cos: Any = tensor("T U Dr")
        sin: Any = tensor("T U Dr")

    @pattern
    def form(self, p, x=tensor("*B D"), tables=Tables): ...        here tables.cos is a term
    def guard(self, x, tables): ...                                here tables.cos is the captured value, or None

A *facet* is a mode that is independent of all others: a family of groups with the same methods, among which `variants`
chooses. The captures, terms, refusals and operator arguments of one mode are then defined in one class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Self, TypeGuard


@dataclass(frozen=True)
class Tensor:
    """The declaration of a captured tensor; `tensor` documents the fields."""

    dims: tuple[str, ...]
    optional: bool
    needed: bool


@dataclass(frozen=True)
class Attribute:
    """The declaration of a captured constant that is no tensor; if `among` is not empty, one of its elements."""

    among: tuple[Any, ...] = ()


def tensor(dims: str, optional: bool = False, needed: bool = True) -> Any:
    """Declare a captured tensor by its named dims, e.g. "*B D": any number of leading dims, then D.

    Args:
        dims: names or literal sizes, separated by spaces; a leading name with a star takes any number of dims.
        optional: True if a semantic op may lack the tensor; the capture is None then.
        needed: True if a match is refused where neither a node nor a recipe computes the tensor; lowerings get None
            for such a tensor if it is not needed.
    """
    return Tensor(tuple(dims.split()), optional, needed)


def scalar() -> Any:
    """Declare a captured number, constant in the graph."""
    return Attribute()


def attribute(*among: Any) -> Any:
    """Declare a captured attribute of an op, such as dims or an exponent; only values `among` the given ones match.

    Kinds of a facet that use the same semantic op differ in `among`, which must be disjoint.
    """
    return Attribute(among)


@dataclass(frozen=True)
class Group:
    """Base of groups: frozen dataclasses whose defaults are `tensor(...)`, `scalar()`, `attribute(...)` or a group.

    Fields are terms in a form, and the captured values in a guard or a lowering. The fields that a subclass names in
    `differing` must be bound to pairwise different values.
    """

    differing: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def made(cls, name: str, make: Callable[[str, Any], Any]) -> Self:
        """Build the group `name`, each field being `make("name.field", declaration)`; nested groups recursively."""
        named = _named(cls, name)
        return cls(**{own: kind.made(full, make) if is_group(kind) else make(full, kind) for own, full, kind in named})

    @classmethod
    def bound(cls, name: str, captures: Mapping[str, Any]) -> Self:
        """Build the group `name` from the `captures` "name.field"; a field without a capture is None."""
        return cls.made(name, lambda full, _: captures.get(full))


@cache
def _named(kind: type[Group], name: str) -> tuple[tuple[str, str, Any], ...]:
    """List (field, "name.field", declaration) for each field of the group class `kind`."""
    return tuple((each.name, f"{name}.{each.name}", each.default) for each in fields(kind))


@dataclass(frozen=True)
class Captures:
    """Base of match records: frozen dataclasses whose fields are names of captures.

        @dataclass(frozen=True)
        class Match(Captures):
            x: Any
            eps: float

        def run(self, match: Match, version): ...        here match.x and match.eps are captured values

    A guard or a lowering takes a record as one parameter, annotated with its class, in place of one parameter for each
    capture. A field without a capture is None.
    """


def is_group(declared: Any) -> TypeGuard[type[Group]]:
    """Return True if `declared` is a subclass of `Group` (a class, not an instance)."""
    return isinstance(declared, type) and issubclass(declared, Group)
