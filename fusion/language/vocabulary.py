"""The `p` of a pattern: functions that build the terms that patterns are written in."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from fusion.errors import RuleError
from fusion.language.meanings import Meaning
from fusion.language.steps import Cast, Scaled, Typed
from fusion.language.terms import Apply, Capture, Parameter, Term
from fusion.language.views import HeadsFirst, Joined, Lanes, Packed, Permuted, PerToken, Repeated, Reshaped


class Vocabulary:
    """The `p` of a pattern: functions that build terms. Unknown names are semantic ops (`p.rms_norm(x=...)`)."""

    in_order = Permuted
    maybe_packed = Packed
    maybe_repeated = Repeated
    maybe_scaled = Scaled
    typed = Typed
    per_token = PerToken
    reshaped = Reshaped

    def mean(self, x: Term, dims: Any = -1) -> Term:
        """Average over one dim, or over those that the parameter takes; they stay with size 1."""
        return Apply((x,), ("mean",), (dims,))

    def power(self, x: Term, exponent: Any) -> Term:
        """x ** exponent."""
        return Apply((x,), ("power",), (exponent,))

    def square(self, x: Term) -> Term:
        """x²."""
        return self.power(x, 2.0)

    def rsqrt(self, x: Term) -> Term:
        """1 / sqrt(x)."""
        return self.power(x, -0.5)

    def sigmoid(self, x: Term) -> Term:
        """1 / (1 + exp(-x))."""
        return Apply((x,), ("sigmoid",))

    def silu(self, x: Term) -> Term:
        """x · sigmoid(x)."""
        return x * self.sigmoid(x)

    def clip(self, x: Term, low: Any, high: Any) -> Term:
        """x between two numbers, infinite where there is no bound."""
        return Apply((x,), ("clip",), (low, high))

    def softmax(self, x: Term) -> Term:
        """exp(x) / Σ exp(x) over the last dim."""
        return Apply((x,), ("softmax",), (-1, "nan", Parameter("less")))

    def largest(self, x: Term, count: Any) -> Term:
        """The largest of the last dim, as many as the parameter takes, in descending order."""
        return Apply((x,), ("largest",), (count,))

    def largest_index(self, x: Term, count: Any) -> Term:
        """Where they are."""
        return Apply((x,), ("largest_index",), (count,))

    def scale(self, x: Term, factor: Any) -> Term:
        """x · a number that the parameter takes."""
        return Apply((x,), ("scale",), (factor,))

    def shift(self, x: Term, offset: Any) -> Term:
        """x + a number that the parameter takes."""
        return Apply((x,), ("shift",), (offset,))

    def gelu(self, x: Term, approximate: Any) -> Term:
        """x · Φ(x), of which the parameter takes how Φ is computed: "none" or "tanh"."""
        return Apply((x,), ("gelu",), (approximate,))

    def lanes(self, x: Term, start: Any, stop: Any) -> Term:
        """Lanes start … stop of the last dim, numbers or parameters."""
        return Lanes((x,), start=start, stop=stop)

    def joined(self, *parts: Term) -> Term:
        """Tensors one behind the other along the last dim."""
        return Joined(parts)

    def permuted(self, x: Term, order: tuple[int, ...]) -> Term:
        """`x` with its dims in another order."""
        return Apply((x,), ("permute",), order)

    def whatever(self, dims: str) -> Term:
        """A tensor of these dims that the rule does not take: it may be computed of what the rule gives."""
        return Capture("", tuple(dims.split()))

    def heads_first(self, x: Term, told: Any) -> Term:
        """Heads [B, N, S, D] that are `x` where this attribute is True, else `x` [B, S, N, D] with heads put first."""
        return HeadsFirst(x, told=told)

    def op(self, names: str | tuple[str, ...], *args: Term) -> Term:
        """An aten op without canonical form, by the name it has in a graph, whatever its other arguments."""
        return Apply(args, (names,) if isinstance(names, str) else names, None)

    def maybe_cast(self, x: Term, to: torch.dtype | Capture | Parameter) -> Term:
        """`x`, or `x` cast to exactly this dtype (or the dtype of this capture, or what this attribute is)."""
        return Cast(x, to, always=False)

    def cast(self, x: Term, to: torch.dtype | Capture) -> Term:
        """`x` cast to exactly this dtype (or the dtype of this capture)."""
        return Cast(x, to, always=True, seen=True)

    def as_dtype(self, x: Term, like: Capture | Parameter) -> Term:
        """`x` in the dtype of `like`, or in that which it is, cast if it was not computed in it."""
        return Cast(x, like, always=True)

    def __getattr__(self, op: str) -> Callable[..., Term]:
        return partial(_meaning, op)


FUNCTIONS = frozenset(name for name in vars(Vocabulary) if not name.startswith("_"))
"""Names of `p` that are no semantic ops."""


def _meaning(op: str, /, *terms: Any, **captures: Any) -> Term:
    if terms:
        near = get_close_matches(op, sorted(FUNCTIONS), 1)
        hint = f"; did you mean p.{near[0]}?" if near else "."
        raise RuleError(
            f"p.{op} is no function of forms{hint} If it is a rule or what a reader gives, name what it is applied to, "
            f"as p.{op}(x=x)"
        )
    return Meaning(op, captures)
