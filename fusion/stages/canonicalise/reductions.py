"""Reductions and the normalisations that aten already names, all written out in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.stages.canonicalise.translate import Out, Translated, translates


def _keep(a: Algebra, out: Out, reduced: Value | None) -> Translated:
    """Drop the reduced dims again where the user's result has not kept them."""
    return None if reduced is None else a.reshape(reduced, out.shape)


def _axes(x: Value, dim: Any) -> Sequence[int]:
    if dim is None or dim == ():
        return range(x.rank)
    return [dim] if isinstance(dim, int) else dim


@translates("aten.mean.dim", "aten.mean.default")
def mean(
    a: Algebra, out: Out, x: Value, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Translated:
    """Average over some dims."""
    return _keep(a, out, a.mean(a.cast(x, out.dtype), _axes(x, dim)))


@translates("aten.sum.dim_IntList", "aten.sum.default")
def total(
    a: Algebra, out: Out, x: Value, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Translated:
    """Sum over some dims."""
    return _keep(a, out, a.sum(a.cast(x, out.dtype), _axes(x, dim)))


def _variance(a: Algebra, x: Value, dim: Any, correction: Any) -> tuple[Value, Value] | None:
    axes = _axes(x, dim)
    average = a.mean(x, axes)
    centred = a.add(x, a.scale(average, -1))
    count = 1
    for axis in axes:
        size = x.shape[axis]
        if not isinstance(size, int):
            return None
        count *= size
    if centred is None or not isinstance(correction, (int, float)) or correction >= count:
        return None
    spread = a.scale(a.mean(a.power(centred, 2), axes), count / (count - correction))
    return spread, average


@translates("aten.var.correction")
def var(a: Algebra, out: Out, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Translated:
    """Variance about the mean, over (count - correction)."""
    both = _variance(a, x, dim, 1 if correction is None else correction)
    return None if both is None else _keep(a, out, both[0])


@translates("aten.std.correction")
def std(a: Algebra, out: Out, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Translated:
    """Root of the variance."""
    both = _variance(a, x, dim, 1 if correction is None else correction)
    return None if both is None else _keep(a, out, a.power(both[0], 0.5))


@translates("aten.var_mean.correction")
def var_mean(
    a: Algebra, out: Out, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Translated:
    """Variance and mean."""
    both = _variance(a, x, dim, 1 if correction is None else correction)
    return None if both is None or not keepdim else both


@translates("aten.linalg_vector_norm.default")
def vector_norm(
    a: Algebra, out: Out, x: Value, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Translated:
    """sqrt(Σ x²) for order 2."""
    if order != 2:
        return None
    squares = a.sum(a.power(a.cast(x, out.dtype), 2), _axes(x, dim))
    return None if squares is None else _keep(a, out, a.power(squares, 0.5))


@translates("aten.norm.ScalarOpt_dim")
def norm(a: Algebra, out: Out, x: Value, order: Any, dim: Any, keepdim: bool = False) -> Translated:
    """The older name of the vector norm."""
    return vector_norm(a, out, x, 2 if order is None else order, dim, keepdim)


def _compute_dtype(x: Value) -> torch.dtype | None:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _affine(a: Algebra, y: Value, weight: Value | None, bias: Value | None) -> Value | None:
    if weight is not None:
        scaled = a.mul(y, a.cast(weight, y.dtype))
        if scaled is None:
            return None
        y = scaled
    return y if bias is None else a.add(y, a.cast(bias, y.dtype))


def _normalise(a: Algebra, h: Value, axes: Sequence[int], eps: float) -> Value | None:
    spread = a.mean(a.power(h, 2), axes)
    return a.mul(h, a.power(a.shift(spread, eps), -0.5))


@translates("aten.rms_norm.default")
def rms_norm(
    a: Algebra, out: Out, x: Value, shape: Sequence[Any], weight: Value | None = None, eps: float | None = None
) -> Translated:
    """The composite, written out as its decomposition does: float32 throughout, one rounding at the end."""
    h = a.cast(x, _compute_dtype(x))
    if eps is None and h.dtype is not None:
        eps = torch.finfo(h.dtype).eps
    y = _normalise(a, h, range(-len(shape), 0), float(eps or 0))
    y = None if y is None else _affine(a, y, weight, None)
    return None if y is None else a.cast(y, out.dtype)


@translates("aten._fused_rms_norm.default")
def fused_rms_norm(
    a: Algebra, out: Out, x: Value, shape: Sequence[Any], weight: Value | None, eps: float | None
) -> Translated:
    """The same with the reciprocal root as a second result."""
    y = rms_norm(a, Out(x.shape, x.dtype), x, shape, weight, eps)
    return (y, None) if isinstance(y, Value) else None


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
) -> Translated:
    """(x - mean) · rsqrt(var + eps) · weight + bias, in float32."""
    h = a.cast(x, _compute_dtype(x))
    axes = range(-len(shape), 0)
    centred = a.add(h, a.scale(a.mean(h, axes), -1))
    y = None if centred is None else _normalise(a, centred, axes, eps)
    y = None if y is None else _affine(a, y, weight, bias)
    return None if y is None else a.cast(y, out.dtype)


@translates("aten.native_layer_norm.default")
def native_layer_norm(
    a: Algebra,
    out: Out,
    x: Value,
    shape: Sequence[Any],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> Translated:
    """The same with mean and reciprocal root as further results."""
    y = layer_norm(a, Out(x.shape, x.dtype), x, shape, weight, bias, eps)
    return (y, None, None) if isinstance(y, Value) else None
