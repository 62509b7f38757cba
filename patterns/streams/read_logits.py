"""Logits of gates: a linear layer of the normalised streams of a token, scaled and shifted by the gate.

    f = flatten(x)   w = f Φᵀ · rsqrt(mean(f²) + eps)   logits_k = α_k w_k + b_k

The norm stands before or behind the linear layer, which is one for all gates, or one for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusion.graph import Algebra, Graph, Value, but_ones
from fusion.graph.dims import Dim
from patterns.kit.linear_layers import linear
from patterns.streams.sums import exact, unrounded


@dataclass(frozen=True)
class Source:
    """Rows of streams that are normalised.

    Attributes:
        rows: the streams of each token as one row [T, L].
        norm_eps: the number added to the mean square.
        gamma: the gain [L] of the norm; None without one.
    """

    rows: Value
    norm_eps: float
    gamma: Value | None = None


@dataclass(frozen=True)
class Logits:
    """Logits of a gate: `scale` · (normalised rows of `source`) `weight`ᵀ + `bias`, with weight [M, L] and bias [M]."""

    source: Source
    weight: Value
    scale: Value
    bias: Value


class _Rms(NamedTuple):
    """1 / sqrt(mean(rows²) + eps), one number for each of `rows` [T, L]."""

    rows: Value
    eps: float


def logits_of(graph: Graph, value: Value, count: int) -> Logits | None:
    """Read `value`, which has `count` numbers for each token, as the logits of a gate; None for others."""
    a = graph.algebra
    value = _cut_inside(a, unrounded(a, value).below("reshape"))
    if value.op != "add":
        return None
    for product, bias in (value.args, value.args[::-1]):
        product, bias = _cut_inside(a, unrounded(a, product).below("reshape")), exact(a, bias)
        if math.prod(bias.shape) != count or product.op != "mul":
            continue
        for weighed, factor in (product.args, product.args[::-1]):
            scale = exact(a, factor).below("expand")
            read = _layer(graph, weighed, count) if math.prod(scale.shape) == 1 else None
            if read is not None:
                return Logits(*read, a.reshape(scale, (1,)), a.reshape(bias, (count,)))
    return None


def _cut_inside(a: Algebra, value: Value) -> Value:
    """Move a slice of lanes of a sum, or of a product, to its operands: gates may be scaled before they are split."""
    elementwise = value.arg if value.op == "slice" and value.attrs[0] == value.rank - 1 else value
    if elementwise is value or elementwise.op not in ("add", "mul"):
        return value
    bounds = value.attrs[1:]
    args = [each if each.shape[-1:] in ((), (1,)) else a.cut(each, -1, *bounds) for each in elementwise.args]
    return (a.add if elementwise.op == "add" else a.mul)(*args) or value


def _layer(graph: Graph, value: Value, count: int) -> tuple[Source, Value] | None:
    """Read `value` as `count` outputs of a linear layer of normalised rows: the rows, and the weight [`count`, L]."""
    a, first, last, inverse = graph.algebra, 0, None, None
    value = unrounded(a, value)
    if value.op == "reshape":
        value = a.reshape(value, (_rows(value, count), count))
    while True:
        value = unrounded(a, value)
        if value.op == "slice" and value.attrs[0] == value.rank - 1 and value.attrs[3] == 1:
            first, last = first + value.attrs[1], last or value.shape[-1]
            value = value.arg
        elif value.op == "reshape" and value.shape[-1:] == value.arg.shape[-1:]:
            value = value.arg
        elif value.op == "mul" and inverse is None and (split := _normalised(a, value)):
            value, inverse = split
        else:
            break
    parts = linear(a, graph.places, value)
    if parts is None or parts[2] is not None or (last or value.shape[-1]) != count:
        return None
    source = _source(a, parts[0], inverse)
    weight = a.cut(parts[1], 0, first, first + count)
    return None if source is None else (source, exact(a, weight))


def _rows(value: Value, count: int) -> Dim:
    """Return how many tokens there are if `value` has `count` numbers for each."""
    return math.prod(value.shape[: -1 if value.shape[-1] == count else -2])


def _normalised(a: Algebra, value: Value) -> tuple[Value, _Rms] | None:
    """Split a product into a factor and the reciprocal root mean square of rows, one for each row of the factor."""
    for x, by in (value.args, value.args[::-1]):
        rms = _rms(a, by) if _is_per_row(x, by) else None
        if rms is not None:
            return x, rms
    return None


def _is_per_row(x: Value, by: Value) -> bool:
    """Return True if `by` has one number for each row of `x`, or for each pair of its last two dims."""
    return any(by.shape == (*x.shape[:-dims], *(1,) * dims) for dims in (1, 2))


def _rms(a: Algebra, value: Value) -> _Rms | None:
    """Read `value` as 1 / sqrt(mean(rows²) + eps) over the last dims; None for others."""
    root = unrounded(a, value).below("reshape")
    shifted = root.arg if root.op == "power" and root.attrs == (-0.5,) else root
    mean = unrounded(a, shifted.arg).below("reshape", "cast") if shifted.op == "shift" else shifted
    square = mean.arg.below("cast") if mean.op == "mean" else mean
    dims = len(mean.attrs)
    if square is mean or square.op != "power" or square.attrs != (2.0,) or mean.attrs != tuple(range(-dims, 0)):
        return None
    x = exact(a, square.arg)
    size: Any = math.prod(x.shape[-dims:])
    return _Rms(a.reshape(x, (math.prod(x.shape[:-dims]), size)), shifted.attrs[0])


def _source(a: Algebra, x: Value, behind: _Rms | None) -> Source | None:
    """Read the operand `x` [.., L] of a linear layer as rows, normalised before the layer, or after it by `behind`."""
    factors = list(_factors(a, x))
    roots = {} if behind else {each: root for each in factors if (root := _rms(a, each)) is not None}
    rms, length = behind or next(iter(roots.values()), None), x.shape[-1]
    if rms is None or len(roots) > 1 or rms.rows.shape[-1] != length:  # of each stream alone: no norm of the token
        return None
    others = [each for each in factors if each not in roots]
    # one row alone has as many numbers as a gain: the streams are known by their mean square
    rows = [each for each in others if _has_size(each, rms.rows) and a.reshape(each, rms.rows.shape) is rms.rows]
    gains = [each for each in others if each not in rows]
    if len(rows) != 1 or len(gains) > 1 or any(but_ones(each.shape) != (length,) for each in gains):
        return None
    return Source(rms.rows, rms.eps, *(a.reshape(each, (length,)) for each in gains))


def _has_size(x: Value, other: Value) -> bool:
    """Return True if `x` has as many elements as `other`."""
    return math.prod(x.shape) == math.prod(other.shape)


def _factors(a: Algebra, x: Value) -> Iterator[Value]:
    """Yield the factors of the product `x`, without casts and reshapes; `x` alone if it is none."""
    product = unrounded(a, x).below("reshape")
    if product.op != "mul":
        yield exact(a, x)
        return
    for arg, other in (product.args, product.args[::-1]):
        if _is_per_row(other, arg) or but_ones(arg.shape) == arg.shape[-1:] != other.shape:
            yield exact(a, arg)
        else:
            yield from _factors(a, arg)
