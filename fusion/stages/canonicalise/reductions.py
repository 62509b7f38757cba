"""Reductions, log Σ exp(x) among them, softmax written as exp, and the normalisations of aten, decomposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusion.analysis.list_masks import listed
from fusion.analysis.logarithms import differences, log_sum
from fusion.graph import Algebra, Value
from fusion.graph.comparisons import negated
from fusion.graph.dims import INDEX_DTYPES
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise import comparisons
from fusion.stages.canonicalise.translators import Out, Translated, translates, translations


def _axes(x: Value, dim: Any) -> Sequence[int]:
    if dim is None or dim in ((), []):
        return range(x.rank)
    return [dim] if isinstance(dim, int) else dim


def _reduction(
    op: str, a: Algebra, out: Out, x: Value, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Translated:
    """Translate a reduction over `dim`, all dims if None, with or without the reduced dims as the result has them."""
    axes = _axes(x, dim)
    selection = _reduce_list(a, op, a.cast(x, out.dtype), axes)
    if selection is not None:
        return a.reshape(selection, out.shape)
    reduce = {"sum": partial(_sum, a), "mean": a.mean}.get(op) or partial(a.reduce, op)
    return a.reshape(proven(reduce(a.cast(x, out.dtype), axes)), out.shape)


def _sum(a: Algebra, x: Value, axes: Sequence[int]) -> Value | None:
    """Normalise a sum to N · mean. An integer sum over a symbolic extent becomes `total`: N is no constant there."""
    return a.sum(x, axes) or (a.reduce("total", x, axes) if x.dtype in INDEX_DTYPES else None)


def _reduce_list(a: Algebra, op: str, x: Value, axes: Sequence[int]) -> Value | None:
    """Build the sum or maximum `op` over the list entries in `x` = (list == position), along `axes`, as the mask of
    listed positions.

    None for other values.
    """
    return listed(a, x, axes[0], op == "sum") if op in ("sum", "greatest") and len(axes) == 1 else None


def _reduce_dim(a: Algebra, op: str, x: Value, dim: int, keepdim: bool) -> Value:
    """Reduce `x` over `dim`, which is dropped unless `keepdim`."""
    reduced = _reduce_list(a, op, x, [dim]) or a.reduce(op, x, [dim])
    return a.reshape(reduced, [size for place, size in enumerate(reduced.shape) if keepdim or place != dim % x.rank])


@translates("aten.max.dim")
def _max_dim(a: Algebra, out: Out, x: Value, dim: int, keepdim: bool = False) -> Translated:
    """Translate the maximum of rows, and over the last dim its index, the first of equal ones."""
    best = _reduce_dim(a, "greatest", x, dim, keepdim)
    is_last = dim % x.rank == x.rank - 1
    return best, a.make("first_greatest", (x,), (), best.shape, torch.int64) if is_last else None


@translates("aten.argmax.default")
def _argmax(a: Algebra, out: Out, x: Value, dim: int | None = None, keepdim: bool = False) -> Translated:
    """Translate the first index of the greatest number."""
    axis = proven(dim) % x.rank
    return a.make("first_greatest", (x,), () if axis == x.rank - 1 else (axis,), out.shape, torch.int64)


@translates("aten.min.dim")
def _min_dim(a: Algebra, out: Out, x: Value, dim: int, keepdim: bool = False) -> Translated:
    return _reduce_dim(a, "least", x, dim, keepdim), None


@translates("aten.aminmax.default")
def _aminmax(a: Algebra, out: Out, x: Value, *, dim: int | None = None, keepdim: bool = False) -> Translated:
    return tuple(_reduce_dim(a, op, x, proven(dim), keepdim) for op in ("least", "greatest"))


@translates("aten.any.dim")
def _any(a: Algebra, out: Out, x: Value, dim: int, keepdim: bool = False) -> Translated:
    truths = a.cast(x, torch.bool)
    return a.reshape(listed(a, truths, dim) or a.reduce("any", truths, [dim]), out.shape)


@translates("aten.all.dim")
def _all(a: Algebra, out: Out, x: Value, dim: int, keepdim: bool = False) -> Translated:
    """Translate all(x) to not any(not x)."""
    others = negated(a, a.cast(x, torch.bool))
    return negated(a, a.reshape(a.reduce("any", others, [dim]), out.shape))


def _variance(a: Algebra, x: Value, dim: Any, correction: Any) -> tuple[Value, Value]:
    """Build the variance over `dim`, Σ (x - mean)² / (count - correction), and the mean."""
    axes, less = _axes(x, dim), 1 if correction is None else correction
    average = a.mean(x, axes)
    centred = proven(a.add(x, a.scale(average, -1)))
    count: Any = math.prod(x.shape[axis] for axis in axes)
    must(isinstance(count, int) and isinstance(less, (int, float)) and less < count)
    return a.scale(a.mean(a.power(centred, 2), axes), count / (count - less)), average


@translates("aten.var_mean.correction")
def _var_mean(
    a: Algebra, out: Out, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Translated:
    return _variance(a, x, dim, correction) if keepdim else None


def _deviation(
    exponent: float, a: Algebra, out: Out, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Translated:
    """Translate the variance to the power of `exponent`: 1, or 0.5 for the standard deviation."""
    spread, _ = _variance(a, x, dim, correction)
    return a.reshape(a.power(spread, exponent), out.shape)


def _vector_norm(
    a: Algebra, out: Out, x: Value, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Translated:
    """Translate Σ |x| for order 1, sqrt(Σ x²) for order 2, max |x| for order inf."""
    if order == math.inf:
        return _reduction("greatest", a, out, a.unary("abs", a.cast(x, out.dtype)), dim)
    if order == 1:
        return a.reshape(proven(a.sum(a.unary("abs", a.cast(x, out.dtype)), _axes(x, dim))), out.shape)
    must(order == 2)
    return a.reshape(a.power(proven(a.sum(a.power(a.cast(x, out.dtype), 2), _axes(x, dim))), 0.5), out.shape)


@translates("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    """Translate to z - log Σ exp(z) with z = x - max(x), as torch computes it.

    Without that shift a large `x` would absorb the logarithm.
    """
    x = a.cast(x, out.dtype)
    z = proven(a.add(x, a.scale(a.reduce("greatest", x, [dim]), -1)))
    return a.add(z, a.scale(a.reduce("log_sum_exp", z, [dim]), -1))


def _but_infinite(x: Value) -> Value | None:
    """Return the y of where(y == -inf, inf, y), perhaps reshaped; None for any other `x`."""
    below = x.below("reshape")
    condition, number, other = below.args if below.op == "where" else (below, below, below)
    lowest = condition.op == "compare" and condition.attrs == ("eq",) and condition.arg is other
    bounds = [(each.op, each.attrs) for each in (*condition.args[1:], number)]
    return other if lowest and bounds == [("full", (-math.inf,)), ("full", (math.inf,))] else None


@translates("aten.exp.default")
def exp(a: Algebra, out: Out, x: Value) -> Translated:
    """Translate exp(x) to a softmax over z, if x is z - log Σ exp(z).

    Where only the largest entries of z are exponentiated, these are the largest shares of that softmax.
    """
    x = a.cast(x, out.dtype)
    for z, less in differences(x):
        safe = _but_infinite(less)
        total, empty = log_sum(less if safe is None else safe), "nan" if safe is None else "zero"
        if total is None:
            continue
        how = empty, "log_sum" if total.guarded else "log_of_sum"
        if total.x is z:
            return a.softmax(z, -1, *how)
        count = z.shape[-1]
        if comparisons.top_k(a, total.x, count)[0] is z:
            shares = a.softmax(total.x, -1, *how)
            return a.make("largest", (shares,), (count,), x.shape, x.dtype)
    return a.unary("exp", x)


@translates("aten.exp2.default")
def _exp2(a: Algebra, out: Out, x: Value) -> Translated:
    """Translate 2^x to exp(x · log 2); the terms of a sum are multiplied one by one."""
    x = a.cast(x, out.dtype)
    parts = [_in_nats(a, each) for each in (x.args if x.op == "add" else (x,))]
    return exp(a, out, parts[0] if len(parts) == 1 else proven(a.add(*parts)))


def _in_nats(a: Algebra, x: Value) -> Value:
    """Build x · log 2, multiplying inside of a sum [.., 1] and of a row maximum, so that these equal those of x · log
    2.
    """
    match x.op:
        case "scale":
            return a.scale(_in_nats(a, x.arg), x.attrs[0])
        case "reshape":
            return a.reshape(_in_nats(a, x.arg), x.shape)
        case "greatest":
            return a.reduce("greatest", _in_nats(a, x.arg), x.attrs)
        case "add" if x.shape[-1:] == (1,):
            return proven(a.add(*(_in_nats(a, each) for each in x.args)))
        case _:
            return a.scale(x, math.log(2))


translations(
    {
        "aten.mean.dim aten.mean.default": partial(_reduction, "mean"),
        "aten.sum.dim_IntList aten.sum.default": partial(_reduction, "sum"),
        "aten.amax.default aten.max.default": partial(_reduction, "greatest"),
        "aten.amin.default aten.min.default": partial(_reduction, "least"),
        "aten.logsumexp.default": partial(_reduction, "log_sum_exp"),
        "aten.var.correction": partial(_deviation, 1),
        "aten.std.correction": partial(_deviation, 0.5),
        "aten.linalg_vector_norm.default": _vector_norm,
        "aten.norm.ScalarOpt_dim": lambda a, out, x, order, *args, **how: _vector_norm(
            a, out, x, 2 if order is None else order, *args, **how
        ),
    }
)


# normalisations ----------------------------------------------------------------------------------------------------


def _normalise(
    a: Algebra, h: Value, axes: Sequence[int], eps: float, weight: Value | None, bias: Value | None, out: Out
) -> Value:
    """Build h / sqrt(mean(h²) + eps) · weight + bias, cast to the dtype of `out` at the end."""
    y = proven(a.mul(h, a.power(a.shift(a.mean(a.power(h, 2), axes), eps), -0.5)))
    y = y if weight is None else proven(a.mul(y, a.cast(weight, y.dtype)))
    y = y if bias is None else proven(a.add(y, a.cast(bias, y.dtype)))
    return a.cast(y, out.dtype)


def _in_float32(a: Algebra, x: Value) -> Value:
    return a.cast(x, torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype)


@translates("aten.rms_norm.default")
def rms_norm(
    a: Algebra, out: Out, x: Value, shape: Sequence[Any], weight: Value | None = None, eps: float | None = None
) -> Value:
    """Decompose rms_norm as torch does: float32 throughout, one rounding at the end."""
    h = _in_float32(a, x)
    eps = torch.finfo(proven(h.dtype)).eps if eps is None else eps
    return _normalise(a, h, range(-len(shape), 0), float(eps), weight, None, out)


@translates("aten.layer_norm.default")
def layer_norm(
    a: Algebra,
    out: Out,
    x: Value,
    shape: Sequence[Any],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *args: Any,
) -> Value:
    """Decompose layer_norm to (x - mean) · rsqrt(var + eps) · weight + bias, in float32."""
    h, axes = _in_float32(a, x), range(-len(shape), 0)
    centred = proven(a.add(h, a.scale(a.mean(h, axes), -1)))
    return _normalise(a, centred, axes, eps, weight, bias, out)


@translates("aten.native_group_norm.default")
def group_norm(
    a: Algebra,
    out: Out,
    x: Value,
    gamma: Value | None,
    beta: Value | None,
    batch: Any,
    channels: Any,
    area: Any,
    groups: int,
    eps: float,
) -> Translated:
    """Keep group_norm as it is, unless it has beta without gamma; its statistics have no value."""
    affine = tuple(each for each in (gamma, beta) if each is not None)
    is_known = gamma is not None or beta is None
    known = a.make("group_norm", (x, *affine), (groups, eps), x.shape, x.dtype) if is_known else None
    return (known, None, None)


def _with_statistics(
    normalisation: Any, more: int, a: Algebra, out: Out, x: Value, *args: Any, **how: Any
) -> Translated:
    """Translate a normalisation with `more` results that have no value: the mean, the reciprocal deviation."""
    return (normalisation(a, Out(x.shape, x.dtype), x, *args, **how), *[None] * more)


translations(
    {
        "aten._fused_rms_norm.default": partial(_with_statistics, rms_norm, 1),
        "aten.native_layer_norm.default": partial(_with_statistics, layer_norm, 2),
    }
)
