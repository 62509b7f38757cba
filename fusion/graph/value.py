"""value = op(arguments; attributes): one immutable result of the canonical graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion.graph.dims import Dim


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One SSA result in canonical form.

    Values are hash-consed by `Algebra`: within one graph two values are equal exactly when they are the same object,
    so identity is the equality of expressions.

    Attributes:
        id: position in the order of creation; arguments come before their users.
        op: canonical op, e.g. "mul", "permute", "input", or the name of an aten op that has no canonical form.
        args: the values that it is computed from.
        attrs: everything else that defines it (dims, exponents, dtypes); hashable.
        shape: sizes, symbolic ones as sympy expressions.
        dtype: element type; None for a tuple of results and for non-tensors.
    """

    id: int
    op: str
    args: tuple[Value, ...]
    attrs: tuple[Any, ...]
    shape: tuple[Dim, ...]
    dtype: torch.dtype | None = field(default=None)

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def arg(self) -> Value:
        """The first argument."""
        return self.args[0]

    def below(self, *ops: str) -> Value:
        """Follow first arguments from `self` while the op is one of `ops`, and return the value reached."""
        value = self
        while value.op in ops:
            value = value.arg
        return value

    def operands(self, *ops: str) -> tuple[tuple[Value, ...], ...]:
        """Return the arguments of a commutative `self` in both orders, to be matched in either; () if its op is none of
        `ops`. Without `ops` any op will do.
        """
        return (self.args, self.args[::-1]) if not ops or self.op in ops else ()

    def factors(self, *passed: str) -> list[Value]:
        """List the factors of the product `self`, nested in any way, each below the ops named in `passed`; [self] if
        `self` is no product.
        """
        x = self.below(*passed)
        return [factor for each in x.args for factor in each.factors(*passed)] if x.op == "mul" else [x]

    def sources(self, into: Callable[[Value], Iterable[Value]] = lambda value: value.args) -> Iterator[Value]:
        """Yield `self` and every value reachable from it through `into` (by default its arguments), each once."""
        waiting, seen = list[Value]([self]), set[Value]((self,))
        while waiting:
            value = waiting.pop()
            yield value
            fresh = [each for each in dict.fromkeys(into(value)) if each not in seen]
            waiting.extend(reversed(fresh))
            seen.update(fresh)

    def __str__(self) -> str:
        """Render as `v12:mul f32[2,3,64]`."""
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype else "-"
        return f"v{self.id}:{self.op} {dtype}{list(self.shape)}"
