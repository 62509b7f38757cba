"""Terms: expression trees that patterns are traced into, and that are matched against canonical values.

A pattern is traced once; matching recurses from a root value into its arguments and never traces. One term object
stands for one value: where a pattern uses a term twice, both places must be the same value of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Protocol

from fusion.graph import Graph, Reading, Value
from fusion.graph.proof_steps import must, proof, proven

Bindings = Mapping[Any, Any]
"""Term -> value; `Parameter` -> constant; dim name, such as "D" -> size; `meanings.RELIES` -> names of inputs."""


class Context(Protocol):
    """The queries that terms make of the search while they match."""

    @property
    def graph(self) -> Graph:
        """The canonical graph."""
        ...

    def readings(self, value: Value, op: str) -> Sequence[Reading]:
        """Return the readings of `value` as the semantic op `op` that exist so far."""
        ...


class Term:
    """A node of a pattern. The operators *, + and - on terms build terms."""

    rank = 0
    """Precedence among the factors of a product: the lowest rank, the most selective terms, are matched first."""

    def heads(self) -> frozenset[str]:
        """Return the canonical ops, or "reading:op", of the values that the term can match; empty for any value."""
        raise NotImplementedError

    def below(self) -> tuple[Any, ...]:
        """Return the direct subterms, and other constituents such as attributes."""
        return ()

    def parts(self) -> tuple[Term, ...]:
        """Return the subterms that match the value itself or its arguments, rather than a view of them."""
        return ()

    def follows(self, bound: Bindings) -> bool:
        """Return True if a term that this one is computed from is bound already."""
        return False

    def flattened(self) -> Iterator[list[Term]]:
        """Yield each way to write the term as a list of factors: itself alone, or the factors of a nested product."""
        yield [self]

    def match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        """Yield `bound` extended by each way in which `value` matches the term; none where it does not.

        A term that is bound already matches only the value that it is bound to. `cx` answers queries about the graph.
        """
        if self in bound:
            if bound[self] is value:
                yield bound
            return
        for bindings in self._match(value, bound, cx):
            yield {**bindings, self: value}

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        raise NotImplementedError

    def __mul__(self, other: Term | float) -> Term:
        return Product((self, other)) if isinstance(other, Term) else Apply((self,), ("scale",), (other,))

    def __rmul__(self, other: float) -> Term:
        return self * other

    def __add__(self, other: Term | float) -> Term:
        if isinstance(other, Term):
            return Sum((self, other))
        return Apply((self,), ("shift",), (other,))

    def __sub__(self, other: Term) -> Term:
        return Sum((self, Apply((other,), ("scale",), (-1.0,))))


@dataclass(frozen=True, eq=False)
class Capture(Term):
    """A term that matches any tensor of the named dims, and binds it; `groups.tensor` documents the fields."""

    name: str
    dims: tuple[str, ...]
    optional: bool = False
    needed: bool = True
    rank = 3

    def heads(self) -> frozenset[str]:
        """Return the empty set: a capture matches values of any op."""
        return frozenset()

    def match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        """Bind `fit(value)`, if its dims have the sizes that `bound` has for their names."""
        value = self.fit(value, cx)
        if self in bound:
            if bound[self] is value:
                yield bound
            return
        sizes: dict[Any, Any] = {**bound, self: value}
        if self._have_sizes(value, sizes):
            yield sizes

    def _have_sizes(self, value: Value, sizes: dict[Any, Any]) -> bool:
        """Return True if the sizes of `value` agree with those in `sizes` by dim name; adds the sizes of new names."""
        fixed = self.dims[self._starred :]
        lead = value.rank - len(fixed)
        if lead < 0 or (lead and not self._starred):
            return False
        if self._starred and sizes.setdefault(self.dims[0], value.shape[:lead]) != value.shape[:lead]:
            return False
        for name, size in zip(fixed, value.shape[lead:], strict=True):
            known = int(name) if name.isdigit() else sizes.setdefault(name, size)
            if known != size:
                return False
        return True

    @cached_property
    def _starred(self) -> bool:
        """Return True if the first dim is starred, for any number of leading dims."""
        return any(name.startswith("*") for name in self.dims)

    def fit(self, value: Value, cx: Context) -> Value:
        """Reshape `value` to the declared rank, if all excess leading dims have size 1; else return `value`."""
        extra = value.rank - len(self.dims)
        if self._starred or extra <= 0 or any(size != 1 for size in value.shape[:extra]):
            return value
        return cx.graph.algebra.reshape(value, value.shape[extra:])


@dataclass(frozen=True, eq=False)
class Parameter:
    """A captured constant that is no tensor: a number, an order, dims; if `among` is not empty, one of its elements."""

    name: str
    among: tuple[Any, ...] = ()

    def takes(self, have: Any, bound: Bindings) -> bool:
        """Return True if `have` is among the allowed values, and equal to the bound one if there is one."""
        return (not self.among or have in self.among) and bound.get(self, have) == have


@dataclass(frozen=True, eq=False)
class Operation(Term):
    """A term that matches the result of one of the canonical ops `ops`, whose arguments match `args`."""

    args: tuple[Term, ...]
    ops: tuple[str, ...]

    def below(self) -> tuple[Any, ...]:
        """Return the terms of the arguments."""
        return self.args

    parts = below

    def heads(self) -> frozenset[str]:
        """Return `ops`."""
        return frozenset(self.ops)


@dataclass(frozen=True, eq=False)
class Apply(Operation):
    """An operation with the attributes `attrs`, any of which may be a `Parameter`; None for any attributes."""

    attrs: tuple[Any, ...] | None = ()

    def follows(self, bound: Bindings) -> bool:
        """Return True if the term of an argument is bound already."""
        return any(arg in bound for arg in self.args)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op not in self.ops or len(value.args) != len(self.args):
            return
        known = bound if self.attrs is None else attributes(self.attrs, value.attrs, bound)
        if known is not None:
            yield from matched(self.args, value.args, known, cx)


def attributes(wanted: Sequence[Any], real: Sequence[Any], bound: Bindings) -> Bindings | None:
    """Match the attributes `real` with `wanted`, one by one, and return `bound` extended; None for a mismatch.

    A `Parameter` binds the attribute at its place; a single one binds the tuple of all if their number is not one.
    """
    if len(wanted) == 1 and isinstance(wanted[0], Parameter) and len(real) != 1:
        wanted, real = wanted, (tuple(real),)
    if len(wanted) != len(real):
        return None
    for want, have in zip(wanted, real, strict=True):
        if isinstance(want, Parameter):
            if not want.takes(have, bound):
                return None
            bound = {**bound, want: have}
        elif want != have:
            return None
    return bound


def matched(terms: Sequence[Term], values: Sequence[Value], bound: Bindings, cx: Context) -> Iterator[Bindings]:
    """Yield `bound` extended by each way in which every term matches the value at its position."""
    if not terms:
        yield bound
        return
    for bindings in terms[0].match(values[0], bound, cx):
        yield from matched(terms[1:], values[1:], bindings, cx)


@dataclass(frozen=True, eq=False)
class Sum(Operation):
    """x + y with the operands in either order."""

    ops: tuple[str, ...] = ("add",)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op == "add":
            yield from matched(self.args, value.args, bound, cx)
            yield from matched(self.args, value.args[::-1], bound, cx)


@dataclass(frozen=True, eq=False)
class Product(Operation):
    """A product in any association and order; the term that is matched last takes the product of all factors left."""

    ops: tuple[str, ...] = ("mul",)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op != "mul":
            return
        factors = value.factors()
        for terms in self._in_order:
            yield from _assign(terms, factors, bound, cx)
            if self._takes_products and len(terms) == len(value.args) < len(factors):
                yield from _assign(terms, list(value.args), bound, cx)

    def flattened(self) -> Iterator[list[Term]]:
        """Yield each concatenation of factor lists of the two operands."""
        for left in self.args[0].flattened():
            for right in self.args[1].flattened():
                yield left + right

    @cached_property
    def _takes_products(self) -> bool:
        """Return True if a factor is matched by its reading: its value may be a product itself, like x · Φ(x)."""
        return any(head.startswith("reading:") for each in self.args for head in each.heads())

    @cached_property
    def _in_order(self) -> list[list[Term]]:
        """The lists of factors, each sorted by rank: the order in which they are matched."""
        return [sorted(terms, key=lambda term: term.rank) for terms in self.flattened()]


def _assign(terms: Sequence[Term], factors: list[Value], bound: Bindings, cx: Context) -> Iterator[Bindings]:
    if not terms and not factors:
        yield bound
    if not terms or not factors:
        return
    term, rest = terms[0], terms[1:]
    if term in bound:
        left = _without(factors, bound[term])
        if left is not None:
            yield from _assign(rest, left, bound, cx)
        return
    if not rest and len(factors) > 1:
        remainder = _multiply(factors, cx)
        if remainder is not None:
            yield from term.match(remainder, bound, cx)
        return
    for position, factor in enumerate(factors):
        for bindings in term.match(factor, bound, cx):
            yield from _assign(rest, factors[:position] + factors[position + 1 :], bindings, cx)


@proof
def _without(factors: list[Value], taken: Value) -> list[Value] | None:
    left = list(factors)
    for factor in [taken] if taken in factors else taken.factors():
        must(factor in left)
        left.remove(factor)
    return left


@proof
def _multiply(factors: Sequence[Value], cx: Context) -> Value:
    return reduce(lambda x, y: proven(cx.graph.algebra.mul(x, y)), factors)
