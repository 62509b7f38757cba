"""log Σ exp(x) as models write it, and what they take it from: exp(x - log Σ exp(x)) is a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion.analysis.logarithms import differences, summed
from fusion.graph import Algebra, Value
from fusion.stages.canonicalise.translate import Out, Translated, translates


@translates("aten.logsumexp.default")
def logsumexp(a: Algebra, out: Out, x: Value, dim: int | Sequence[int], keepdim: bool = False) -> Translated:
    """log Σ exp(x)."""
    return a.reshape(_log_sum_exp(a, a.cast(x, out.dtype), [dim] if isinstance(dim, int) else dim), out.shape)


def _log_sum_exp(a: Algebra, x: Value, dims: Sequence[int]) -> Value:
    """The same with dims of size 1 for those that are summed over."""
    axes = tuple(sorted(axis % x.rank - x.rank for axis in dims))
    shape = tuple(1 if position - x.rank in axes else size for position, size in enumerate(x.shape))
    return a.make("log_sum_exp", (x,), axes, shape, x.dtype)


@translates("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    """x - log Σ exp(x)."""
    x = a.cast(x, out.dtype)
    return a.add(x, a.scale(_log_sum_exp(a, x, [dim]), -1)) if x.rank else None


@translates("aten.exp.default")
def exp(a: Algebra, out: Out, x: Value) -> Translated:
    """exp(x), where exp(x - log Σ exp(x)) is a softmax."""
    x = a.cast(x, out.dtype)
    for z, less in differences(x):
        if summed(less) is z:
            return a.make("softmax", (z,), (-1, "nan"), x.shape, x.dtype)
    return a.unary("exp", x)
