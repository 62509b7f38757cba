"""Terms above which one step may stand in the graph: a cast that must not be the user's own, a factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fusion.graph import Value
from fusion.language.terms import Bindings, Capture, Context, Parameter, Product, Term


@dataclass(frozen=True, eq=False)
class Above(Term):
    """A term above which one step, of the canonical op `step`, may stand; "" for steps that are seen in any op."""

    inner: Term
    step: ClassVar[str] = ""

    def below(self) -> tuple[Any, ...]:
        """What is below the step."""
        return (self.inner,)

    def heads(self) -> frozenset[str]:
        """The step, or what is below."""
        inner = self.inner.heads()
        return inner | {self.step} if inner and self.step else frozenset()

    def follows(self, bound: Bindings) -> bool:
        """Whether what is below does, or is bound."""
        return self.inner in bound or self.inner.follows(bound)


@dataclass(frozen=True, eq=False)
class Cast(Above):
    """A cast that may be there or not. Its dtype is pinned, so that a cast of the user's own is never swallowed.

    Attributes:
        inner: what is cast.
        dtype: the dtype to which it is cast if it is, or the capture whose dtype that is, or the attribute that it is.
        always: whether the result must have that dtype, with or without a cast.
        seen: whether there must be a cast.
    """

    dtype: torch.dtype | Capture | Parameter
    always: bool
    seen: bool = False
    step = "cast"

    @property
    def rank(self) -> int:  # type: ignore[override]
        """As much as what is cast."""
        return self.inner.rank

    parts = Above.below

    def heads(self) -> frozenset[str]:
        """As of any step, or its own alone."""
        return frozenset({self.step}) if self.seen else super().heads()

    def flattened(self) -> Iterator[list[Term]]:
        """It keeps its product whole, or vanishes."""
        yield [self]
        if isinstance(self.inner, Product):
            yield from self.inner.flattened()

    def pinned(self, bound: Bindings) -> torch.dtype | None:
        """The dtype, once known."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return bound[self.dtype].dtype if isinstance(self.dtype, Capture) else bound[self.dtype]

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op == "cast":
            for found in self.inner.match(value.arg, bound, cx):
                if value.dtype == self.pinned(found):
                    yield found
        if self.seen:
            return
        for found in self.inner.match(value, bound, cx):
            if not self.always or value.dtype == self.pinned(found):
                yield found


@dataclass(frozen=True, eq=False)
class Typed(Above):
    """A term of whose value the parameter takes the dtype."""

    dtype: Parameter
    parts = Above.below

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of the inner term."""
        return self.inner.rank

    def heads(self) -> frozenset[str]:
        """The heads of the inner term: no step stands above it."""
        return self.inner.heads()

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if self.dtype.takes(value.dtype, bound):
            yield from self.inner.match(value, {**bound, self.dtype: value.dtype}, cx)


@dataclass(frozen=True, eq=False)
class Scaled(Above):
    """A value that is `inner` times a number, which the parameter takes; 1 where it is `inner` itself."""

    factor: Parameter
    step = "scale"
    parts = Above.below

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        forms = ((value.arg, value.attrs[0]), (value, 1.0)) if value.op == "scale" else ((value, 1.0),)
        for each, factor in forms:
            if self.factor.takes(factor, bound):
                yield from self.inner.match(each, {**bound, self.factor: factor}, cx)
