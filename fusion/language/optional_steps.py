"""Terms that match their inner term with or without one more operation: a cast, a factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fusion.graph import Value
from fusion.language.terms import Bindings, Capture, Context, Parameter, Product, Term


@dataclass(frozen=True, eq=False)
class Above(Term):
    """A term that matches `inner`, or one operation of the canonical op `step` on it; "" for no particular op."""

    inner: Term
    step: ClassVar[str] = ""

    def below(self) -> tuple[Any, ...]:
        """Return the inner term."""
        return (self.inner,)

    def heads(self) -> frozenset[str]:
        """Return the ops of `inner` and `step`; the empty set, for any op, if `step` is "" or `inner` takes any."""
        inner = self.inner.heads()
        return inner | {self.step} if inner and self.step else frozenset()

    def follows(self, bound: Bindings) -> bool:
        """Return True if `inner`, or a term nested in it at any depth, is bound."""
        return self.inner in bound or self.inner.follows(bound)


@dataclass(frozen=True, eq=False)
class Cast(Above):
    """An optional cast of `inner` to exactly one dtype, so that a cast of the user's to another dtype is never lost.

    Attributes:
        inner: the operand of the cast.
        dtype: the target dtype; or the capture that has it; or the parameter that is bound to it.
        always: True if the value must have the target dtype even where there is no cast.
        required: True if there must be a cast.
    """

    dtype: torch.dtype | Capture | Parameter
    always: bool
    required: bool = False
    step = "cast"

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of `inner`."""
        return self.inner.rank

    parts = Above.below

    def heads(self) -> frozenset[str]:
        """Return "cast" and the ops of `inner`; "cast" alone if there must be a cast."""
        return frozenset({self.step}) if self.required else super().heads()

    def flattened(self) -> Iterator[list[Term]]:
        """Yield the cast as one factor; and, for the case without a cast, the factors of `inner` if it is a product."""
        yield [self]
        if isinstance(self.inner, Product):
            yield from self.inner.flattened()

    def pinned(self, bound: Bindings) -> torch.dtype | None:
        """Return the target dtype, given the bindings of the capture or parameter that has it."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return bound[self.dtype].dtype if isinstance(self.dtype, Capture) else bound[self.dtype]

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op == "cast":
            for bindings in self.inner.match(value.arg, bound, cx):
                if value.dtype == self.pinned(bindings):
                    yield bindings
        if self.required:
            return
        for bindings in self.inner.match(value, bound, cx):
            if not self.always or value.dtype == self.pinned(bindings):
                yield bindings


@dataclass(frozen=True, eq=False)
class Typed(Above):
    """A term that matches `inner`, and binds the parameter `dtype` to the dtype of its value."""

    dtype: Parameter
    parts = Above.below

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of `inner`."""
        return self.inner.rank

    def heads(self) -> frozenset[str]:
        """Return the heads of `inner`: a dtype is no operation."""
        return self.inner.heads()

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if self.dtype.takes(value.dtype, bound):
            yield from self.inner.match(value, {**bound, self.dtype: value.dtype}, cx)


@dataclass(frozen=True, eq=False)
class Scaled(Above):
    """A term that matches `inner` times a constant, to which the parameter `factor` is bound; 1 for `inner` itself."""

    factor: Parameter
    step = "scale"
    parts = Above.below

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        forms = ((value.arg, value.attrs[0]), (value, 1.0)) if value.op == "scale" else ((value, 1.0),)
        for each, factor in forms:
            if self.factor.takes(factor, bound):
                yield from self.inner.match(each, {**bound, self.factor: factor}, cx)
