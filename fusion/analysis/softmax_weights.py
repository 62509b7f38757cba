"""Recognition of softmax weights of rows in any spelling: exp(z - log Σ exp(z)), exp(z) / (Σ exp(z) + exp(sink)), ...

Every value with one number for each row becomes a share, in which the subtracted maxima cancel. Σ exp(z) over a row is
represented as exp(log Σ exp(x)), with x = z without the number that is subtracted from each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fusion.analysis.exp_monomials import ONE, Share, generator, total
from fusion.analysis.logarithms import bare, differences
from fusion.analysis.rounding import exact
from fusion.analysis.softmax_shares import Exponentials
from fusion.analysis.stacked_entries import Pick
from fusion.graph import Algebra, Value, but_ones
from fusion.graph.comparisons import constant
from fusion.graph.proof_steps import must, proof, proven

_ABSORBED = 2.0**-54
"""An addend that changes no number of at least 1 in float64."""
_LOW = -1e4
"""A bound below the maximum of every row with a visible key: clipping a maximum there changes masked rows alone."""
_ELEMENTWISE = ("exp", "scale", "mul", "add", "power")


class RowShares(NamedTuple):
    """The weights exp(x) / (Σ exp(x) + exp(sink)) over the last dim of scores x.

    Attributes:
        z: the argument of exp or softmax in the model [*rows, T]: x, or x - less.
        x: the scores [*rows, T].
        less: the number [*rows, 1] that the model subtracts from each row; None for none.
        sink: the score of a sink [*rows, 1]; None for exp(sink) = 0.
    """

    z: Value
    x: Value
    less: Value | None
    sink: Value | None


@proof
def row_shares(a: Algebra, p: Value) -> RowShares | None:
    """Recognise `p` [*rows, T] = exp(z) · w, for a number w of each row, as softmax weights; None for other values."""
    exps, factors = proven(_factors(p))
    sums, z = RowSums(a), exps.arg
    x, less = next(iter(differences(z)), (z, None))
    relative = ONE if exps.op == "softmax" else proven(sums.sum_of(z))  # Σ exp(x) / (Σ exp(x) + exp(sink))
    for each in factors:
        relative *= proven(sums.value(each))
    if not relative.powers and not relative.sums:
        must(math.isclose(relative.factor, 1, rel_tol=1e-9))
        return RowShares(z, x, less, None)
    sink = proven(total([relative.inverse(), ONE.scaled(-1)])) * sums.exp_sum(x)
    return RowShares(z, x, less, _logarithm(a, sink, p))


def _logarithm(a: Algebra, share: Share, like: Value) -> Value:
    """Return the logarithm [*rows, 1] of `share`, a positive number or one exponential; unproven for any other share.

    The rows and the dtype are those of `like` [*rows, T].
    """
    must(not share.sums and share.factor > 0)
    shape = (*like.shape[:-1], 1)
    if not share.powers:
        return constant(a, math.log(share.factor), shape, like.dtype)
    must(math.isclose(share.factor, 1, rel_tol=1e-9) and len(share.powers) == 1)
    (((kind, value), count),) = share.powers
    must(kind == "exp" and count == 1)
    value = bare(value)
    if value.op != "expand":
        return a.reshape(value, shape)
    own = iter([size for size, full in zip(value.arg.shape, value.shape, strict=True) if full != 1])
    return a.expand(a.reshape(value.arg, [next(own) if size != 1 else 1 for size in shape]), shape)


@proof
def _factors(p: Value) -> tuple[Value, list[Value]] | None:
    """Split the product `p` into its one factor [*rows, T], an exp or a softmax, and the factors [.., 1] of rows.

    Unproven for other products.
    """
    waiting, factors, exps = [p], list[Value](), list[Value]()
    while waiting:
        x = waiting.pop()
        below = x.below("cast")
        if x.op == "mul":
            waiting.extend(x.args)
        elif x.shape[-1:] in ((), (1,)):
            factors.append(x)
        else:
            must(not exps and below.shape == p.shape and below.op in ("exp", "softmax"))
            exps.append(below)
    must(exps and (exps[0].op == "exp" or exps[0].attrs[0] == -1))
    return exps[0], factors


@dataclass
class RowSums(Exponentials):
    """Memoised conversion to shares that, in addition to its base class, covers sums over the last dim."""

    def exp_sum(self, x: Value) -> Share:
        """Return Σ exp(x) over the last dim as the share exp(log Σ exp(x))."""
        lse = self.a.reduce("log_sum_exp", x, (-1,))
        return generator("exp", self.a.reshape(lse, but_ones(lse.shape)))

    @proof
    def sum_of(self, z: Value) -> Share | None:
        """Return Σ exp(z) over the last dim as a share; None if there is none.

        It is exp(-r) · Σ exp(x) for z = x - r, with one r for each row, and the sum over the pieces of a concatenation.
        """
        if z.op == "cat" and z.attrs == (z.rank - 1,):
            return total([proven(self.power(each) if each.shape[-1] == 1 else self.sum_of(each)) for each in z.args])
        x, less = next(iter(differences(z)), (z, None))
        return self.exp_sum(x) if less is None else self.exp_sum(x) * proven(self.power(less)).inverse()

    def _operands(self, kind: str, x: Value, pick: Pick) -> list[Share]:
        return self._each(kind, [(self.a.expand(each, x.shape), pick) for each in x.args])

    def _arranged(self, kind: str, x: Value, pick: Pick) -> Share | None:
        # expand(f(y)) is analysed as f(expand(y)), as `_operands` expands the arguments of f
        if x.op != "expand":  # inputs, which have no argument, among others
            return super()._arranged(kind, x, pick)
        below = x.arg.arg if x.arg.op == "reshape" else x.arg
        alike = below is x.arg or all(each.shape == below.shape for each in below.args)
        if below.op not in _ELEMENTWISE or not alike:
            return super()._arranged(kind, x, pick)
        args = [
            self.a.expand(each if below is x.arg else self.a.reshape(each, x.arg.shape), x.shape) for each in below.args
        ]
        return self._memoised(kind, self.a.make(below.op, args, below.attrs, x.shape, x.dtype), pick)

    @proof
    def _power(self, x: Value, pick: Pick) -> Share | None:
        if x.op == "log_sum_exp" and x.attrs == (-1,):
            return self.sum_of(x.arg)
        return super()._power(x, pick)

    @proof
    def _value(self, x: Value, pick: Pick) -> Share | None:
        match x.op:
            case "mean" if x.attrs == (-1,) and exact(x.arg).op == "exp":
                size = x.arg.shape[-1]
                return proven(self.sum_of(exact(x.arg).arg)).scaled(1 / size) if isinstance(size, int) else None
            case "shift" if 0 < x.attrs[0] < _ABSORBED and _is_one_at_least(x.arg):
                return self.value(x.arg)
            case "clip" if x.attrs[0] <= 1 and x.attrs[1] == math.inf and _is_one_at_least(x.arg):
                return self.value(x.arg)
            case "where" if _is_replaced_below_one(x):
                return self.value(x.args[2])
            case _:
                return super()._value(x, pick)


def _is_replaced_below_one(x: Value) -> bool:
    """Return True if `x` is where(sum == c, .., sum), or one with <= or <, for a c < 1 and a sum that is at least 1.

    The condition then never holds, so that `x` is the sum.
    """
    condition, _, row_sum = x.args
    tested = condition.args[:1] == (row_sum,) and condition.op == "compare" and condition.attrs[0] != "ne"
    bounded = tested and condition.args[1].op == "full" and condition.args[1].attrs[0] < 1
    return bounded and _is_one_at_least(row_sum)


def _is_one_at_least(total: Value) -> bool:
    """Return True if `total` is Σ exp(x - max x) over the last dim, which is at least 1 for rows with a visible key."""
    total = total.below("reshape")
    mean = total.arg if total.op == "scale" else total
    exps = exact(mean.arg) if (mean.op, mean.attrs) == ("mean", (-1,)) else mean
    if exps.op != "exp" or exps is mean or total.attrs[:1] != mean.arg.shape[-1:]:
        return False
    return any(_is_greatest(less, x) for x, less in differences(exps.arg))


def _is_greatest(top: Value, x: Value) -> bool:
    """Return True if `top` is max x over the last dim, for rows with a visible key; others may have -inf replaced."""
    top = top.below("reshape")
    if top.op == "where" and top.arg.op == "compare" and top.arg.attrs == ("eq",):
        tested, bound = top.arg.args
        replaced = tested is top.args[2] and (bound.op, bound.attrs) == ("full", (-math.inf,))
        return replaced and _is_greatest(top.args[2], x)
    if top.op == "clip" and top.attrs[0] <= _LOW and top.attrs[1] == math.inf:
        return _is_greatest(top.arg, x)
    return (top.op, top.attrs) == ("greatest", (-1,)) and exact(top.arg) is exact(x)
