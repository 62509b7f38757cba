"""Terms: the small expression language in which patterns are written and matched against canonical values.

A pattern is traced once, at import of its rule; matching walks the values below a root and never traces anything. One
term object stands for one value: used twice in a pattern, it must be the same value in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Protocol

from fusion.graph import Graph, Reading, Value
from fusion.graph.proof import must, proof, proven

Bindings = Mapping[Any, Any]
"""Term → value; "D" → size of a named dim; `RELIES` of meanings → names of inputs."""


class Context(Protocol):
    """What matching may ask."""

    @property
    def graph(self) -> Graph:
        """The canonical graph."""
        ...

    def readings(self, value: Value, op: str) -> Sequence[Reading]:
        """Meanings that were found for `value` so far."""
        ...


class Term:
    """One place in a pattern. Arithmetic on terms builds terms."""

    rank = 0  # products try terms of low rank first: the more a term says, the earlier

    def heads(self) -> frozenset[str]:
        """Canonical ops that a value may have for this term to match at all."""
        raise NotImplementedError

    def below(self) -> tuple[Any, ...]:
        """The terms, and other things, of which this one consists."""
        return ()

    def parts(self) -> tuple[Term, ...]:
        """Those below that stand for arguments of its value, or for that itself: nothing is seen otherwise between."""
        return ()

    def follows(self, bound: Bindings) -> bool:
        """Whether this term is computed from a term that is bound already."""
        return False

    def flattened(self) -> Iterator[list[Term]]:
        """The factors that it can have where it stands in a product."""
        yield [self]

    def match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        """Every way in which `value` can be this term, given what is bound already."""
        if self in bound:
            if bound[self] is value:
                yield bound
            return
        for found in self._match(value, bound, cx):
            yield {**found, self: value}

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
    """A tensor that the rule takes: named dims, `*B` for any number of leading ones.

    A meaning may lack an optional one. One that is not needed is None to lowerings where nothing gives its value.
    """

    name: str
    dims: tuple[str, ...]
    optional: bool = False
    needed: bool = True
    rank = 3

    def heads(self) -> frozenset[str]:
        """A capture matches anything."""
        return frozenset()

    def match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        """As for every term; what is bound has lost the leading dims of size 1 that its dims do not name."""
        value = self.fit(value, cx)
        if self in bound:
            if bound[self] is value:
                yield bound
            return
        sizes: dict[Any, Any] = {**bound, self: value}
        if self._have_sizes(value, sizes):
            yield sizes

    def _have_sizes(self, value: Value, sizes: dict[Any, Any]) -> bool:
        """Whether its dims have the sizes that they are known to have, or are given here."""
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
        """Whether the first of its dims stands for any number of them."""
        return any(name.startswith("*") for name in self.dims)

    def fit(self, value: Value, cx: Context) -> Value:
        """Drop leading dims of size 1 beyond the declared ones."""
        extra = value.rank - len(self.dims)
        if self._starred or extra <= 0 or any(size != 1 for size in value.shape[:extra]):
            return value
        return cx.graph.algebra.reshape(value, value.shape[extra:])


@dataclass(frozen=True, eq=False)
class Parameter:
    """Something that the rule takes and that is not a tensor: a number, an order, dims; one `among` some, if any."""

    name: str
    among: tuple[Any, ...] = ()

    def takes(self, have: Any, bound: Bindings) -> bool:
        """Whether it may be `have`, given what is bound already."""
        return (not self.among or have in self.among) and bound.get(self, have) == have


@dataclass(frozen=True, eq=False)
class Operation(Term):
    """What one of the canonical ops `ops` gives for its arguments."""

    args: tuple[Term, ...]
    ops: tuple[str, ...]

    def below(self) -> tuple[Any, ...]:
        """Its arguments."""
        return self.args

    parts = below

    def heads(self) -> frozenset[str]:
        """Its own ops."""
        return frozenset(self.ops)


@dataclass(frozen=True, eq=False)
class Apply(Operation):
    """A canonical op with its attributes; one may be a `Parameter`; None for any attributes."""

    attrs: tuple[Any, ...] | None = ()

    def follows(self, bound: Bindings) -> bool:
        """Whether an argument is bound already."""
        return any(arg in bound for arg in self.args)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op not in self.ops or len(value.args) != len(self.args):
            return
        known = bound if self.attrs is None else attributes(self.attrs, value.attrs, bound)
        if known is not None:
            yield from matched(self.args, value.args, known, cx)


def attributes(wanted: Sequence[Any], real: Sequence[Any], bound: Bindings) -> Bindings | None:
    """What is bound where the attributes are as wanted, of which a `Parameter` takes one, or all; else None."""
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
    """What is bound where each term matches the value at its place."""
    if not terms:
        yield bound
        return
    for found in terms[0].match(values[0], bound, cx):
        yield from matched(terms[1:], values[1:], found, cx)


@dataclass(frozen=True, eq=False)
class Sum(Operation):
    """x + y in either order."""

    ops: tuple[str, ...] = ("add",)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op == "add":
            yield from matched(self.args, value.args, bound, cx)
            yield from matched(self.args, value.args[::-1], bound, cx)


@dataclass(frozen=True, eq=False)
class Product(Operation):
    """A product of any association and order; the last capture without a value takes all factors that are left."""

    ops: tuple[str, ...] = ("mul",)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op != "mul":
            return
        factors = _factors(value)
        for terms in self._in_order:
            yield from _assign(terms, factors, bound, cx)
            if self._takes_products and len(terms) == len(value.args) < len(factors):
                yield from _assign(terms, list(value.args), bound, cx)

    def flattened(self) -> Iterator[list[Term]]:
        """Those of both sides."""
        for left in self.args[0].flattened():
            for right in self.args[1].flattened():
                yield left + right

    @cached_property
    def _takes_products(self) -> bool:
        """Whether a factor is what a value means, which may be a product itself, as x · Φ(x) written out is."""
        return any(head.startswith("reading:") for each in self.args for head in each.heads())

    @cached_property
    def _in_order(self) -> list[list[Term]]:
        """The factors that it can have, in the order in which they are looked for."""
        return [sorted(terms, key=lambda term: term.rank) for terms in self.flattened()]


def _factors(value: Value) -> list[Value]:
    return [each for arg in value.args for each in _factors(arg)] if value.op == "mul" else [value]


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
        whole = _multiply(factors, cx)
        if whole is not None:
            yield from term.match(whole, bound, cx)
        return
    for position, factor in enumerate(factors):
        for found in term.match(factor, bound, cx):
            yield from _assign(rest, factors[:position] + factors[position + 1 :], found, cx)


@proof
def _without(factors: list[Value], taken: Value) -> list[Value] | None:
    left = list(factors)
    for factor in [taken] if taken in factors else _factors(taken):
        must(factor in left)
        left.remove(factor)
    return left


@proof
def _multiply(factors: Sequence[Value], cx: Context) -> Value:
    return reduce(lambda x, y: proven(cx.graph.algebra.mul(x, y)), factors)
