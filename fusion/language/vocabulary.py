"""The parameter `p` of forms: functions that build terms."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from fusion.errors import RuleError
from fusion.language.optional_steps import Cast, Scaled, Typed
from fusion.language.table_terms import PerToken, Repeated
from fusion.language.terms import Apply, Capture, Parameter, Term
from fusion.language.view_terms import HeadsFirst, Joined, Lanes, Packed, Permuted, Reshaped
from fusion.language.word_terms import Meaning


class Vocabulary:
    """The functions of `p`. Any other name is a semantic op with captures: `p.rms_norm(x=..., gamma=...)`."""

    in_order = Permuted
    maybe_packed = Packed
    maybe_repeated = Repeated
    maybe_scaled = Scaled
    typed = Typed
    per_token = PerToken
    reshaped = Reshaped

    def mean(self, x: Term, dims: Any = -1) -> Term:
        """Build the mean of `x` over one dim, or over the dims that a parameter captures; they remain with size 1."""
        return Apply((x,), ("mean",), (dims,))

    def power(self, x: Term, exponent: Any) -> Term:
        """Build x ** `exponent`."""
        return Apply((x,), ("power",), (exponent,))

    def square(self, x: Term) -> Term:
        """Build x²."""
        return self.power(x, 2.0)

    def rsqrt(self, x: Term) -> Term:
        """Build 1 / sqrt(x)."""
        return self.power(x, -0.5)

    def sigmoid(self, x: Term) -> Term:
        """Build 1 / (1 + exp(-x))."""
        return Apply((x,), ("sigmoid",))

    def silu(self, x: Term) -> Term:
        """Build x · sigmoid(x)."""
        return x * self.sigmoid(x)

    def clip(self, x: Term, low: Any, high: Any) -> Term:
        """Build min(max(x, low), high); an absent bound is infinite."""
        return Apply((x,), ("clip",), (low, high))

    def softmax(self, x: Term) -> Term:
        """Build exp(x) / Σ exp(x) over the last dim."""
        return Apply((x,), ("softmax",), (-1, "nan", Parameter("less")))

    def largest(self, x: Term, count: Any) -> Term:
        """Build the `count` largest elements of the last dim, in descending order."""
        return Apply((x,), ("largest",), (count,))

    def largest_index(self, x: Term, count: Any) -> Term:
        """Build the indices of the `count` largest elements of the last dim, in descending order of the elements."""
        return Apply((x,), ("largest_index",), (count,))

    def scale(self, x: Term, factor: Any) -> Term:
        """Build x · `factor`, a number or the parameter that captures it."""
        return Apply((x,), ("scale",), (factor,))

    def shift(self, x: Term, offset: Any) -> Term:
        """Build x + `offset`, a number or the parameter that captures it."""
        return Apply((x,), ("shift",), (offset,))

    def gelu(self, x: Term, approximate: Any) -> Term:
        """Build x · Φ(x); `approximate` is "none" or "tanh", or the parameter that captures it."""
        return Apply((x,), ("gelu",), (approximate,))

    def group_norm(self, x: Term, *affine: Term, groups: Any, eps: Any) -> Term:
        """Build the group norm of x, with gamma and beta, gamma alone or neither as `affine`."""
        return Apply((x, *affine), ("group_norm",), (groups, eps))

    def lanes(self, x: Term, start: Any, stop: Any) -> Term:
        """Build x[.., start:stop]; the bounds are numbers or parameters."""
        return Lanes((x,), start=start, stop=stop)

    def joined(self, *parts: Term) -> Term:
        """Build the concatenation of `parts` along the last dim."""
        return Joined(parts)

    def permuted(self, x: Term, order: tuple[int, ...]) -> Term:
        """Build x.permute(order)."""
        return Apply((x,), ("permute",), order)

    def whatever(self, dims: str) -> Term:
        """Build a term for any tensor of these dims that is no capture: it may depend on the rule's own results."""
        return Capture("", tuple(dims.split()))

    def heads_first(self, x: Term, flag: Any) -> Term:
        """Build heads [B, N, S, D]: `x` if its match binds `flag` to True, else the permute of `x` [B, S, N, D]."""
        return HeadsFirst(x, flag=flag)

    def op(self, names: str | tuple[str, ...], *args: Term) -> Term:
        """Build a call of one of the ops `names` that have no canonical form, e.g. "aten.log1p.default", on `args`.

        Arguments that are no tensors may have any value.
        """
        return Apply(args, (names,) if isinstance(names, str) else names, None)

    def maybe_cast(self, x: Term, to: torch.dtype | Capture | Parameter) -> Term:
        """Build `x`, or its cast to exactly the dtype `to`, the dtype of the capture `to`, or that bound to `to`."""
        return Cast(x, to, always=False)

    def cast(self, x: Term, to: torch.dtype | Capture) -> Term:
        """Build the cast of `x` to exactly the dtype `to`, or the dtype of the capture `to`; there must be a cast."""
        return Cast(x, to, always=True, required=True)

    def as_dtype(self, x: Term, like: Capture | Parameter) -> Term:
        """Build `x` in the dtype of the capture `like`, or that bound to `like`, with or without a cast to it."""
        return Cast(x, like, always=True)

    def __getattr__(self, op: str) -> Callable[..., Term]:
        return partial(_meaning, op)


FUNCTIONS = frozenset(name for name in vars(Vocabulary) if not name.startswith("_"))
"""The names of `p` that are functions, not semantic ops."""


def _meaning(op: str, /, *terms: Any, **captures: Any) -> Term:
    if terms:
        near = get_close_matches(op, sorted(FUNCTIONS), 1)
        hint = f"; did you mean p.{near[0]}?" if near else "."
        raise RuleError(
            f"p.{op} is no function of forms{hint} If it is a rule or what a reader gives, name what it is applied to, "
            f"as p.{op}(x=x)"
        )
    return Meaning(op, captures)
