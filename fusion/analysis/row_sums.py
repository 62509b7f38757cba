"""Shares of rows in whatever way they are normalised: exp(z - log Σ exp(z)), exp(z) / (Σ exp(z) + exp(sink)), ...

Each number of a row becomes a product of powers of exponentials and of sums of them, in which maxima cancel; Σ exp(z)
is the exponential of log Σ exp(z), whatever was subtracted from z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fusion.analysis.elements import Pick
from fusion.analysis.exp_monomials import ONE, Share, generator, total
from fusion.analysis.exponentials import Exponentials
from fusion.analysis.logarithms import bare, differences
from fusion.analysis.rounding import exact
from fusion.graph import Algebra, Value, but_ones
from fusion.graph.logic import constant
from fusion.graph.proof import must, proof, proven

_ABSORBED = 2.0**-54
"""A number that float64 loses beside 1."""
_LOW = -1e4
"""No greatest score of a row that sees a key is so low."""
_ELEMENTWISE = ("exp", "scale", "mul", "add", "power")


class RowShares(NamedTuple):
    """exp(x) / (Σ exp(x) + exp(sink)) over the last dim of x [*rows, T]; without a sink [*rows, 1] where that is None.

    `z` is x, or x less the number `less` of each row, as the model has it where it takes exponentials or a softmax.
    """

    z: Value
    x: Value
    less: Value | None
    sink: Value | None


@proof
def row_shares(a: Algebra, p: Value) -> RowShares | None:
    """Read `p` [*rows, T] = exp(z) · w, w being a number of each row, as shares; None for any other."""
    exps, factors = proven(_factors(p))
    sums, z = RowSums(a), exps.arg
    x, less = next(iter(differences(z)), (z, None))
    relative = ONE if exps.op == "softmax" else proven(sums.sum_of(z))  # Σ exp(x) / (Σ exp(x) + exp(sink))
    for each in factors:
        relative *= proven(sums.value(each))
    if not relative.powers and not relative.sums:
        must(math.isclose(relative.factor, 1, rel_tol=1e-9))
        return RowShares(z, x, less, None)
    beside = proven(total([relative.inverse(), ONE.scaled(-1)])) * sums.whole(x)
    return RowShares(z, x, less, _logarithm(a, beside, p))


def _logarithm(a: Algebra, share: Share, like: Value) -> Value:
    """Return the value [*rows, 1] of which `share` is the exponential; unproven for any other share."""
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
    """Return the exponentials, or the softmax, among the factors of `p`, and the factors that rows have one each of."""
    waiting, factors, found = [p], list[Value](), list[Value]()
    while waiting:
        x = waiting.pop()
        below = x.below("cast")
        if x.op == "mul":
            waiting.extend(x.args)
        elif x.shape[-1:] in ((), (1,)):
            factors.append(x)
        else:
            must(not found and below.shape == p.shape and below.op in ("exp", "softmax"))
            found.append(below)
    must(found and (found[0].op == "exp" or found[0].attrs[0] == -1))
    return found[0], factors


@dataclass
class RowSums(Exponentials):
    """Values with one number for each row as shares, with sums over the last dim among them."""

    def whole(self, x: Value) -> Share:
        """Return Σ exp(x) over the last dim as a share."""
        lse = self.a.reduce("log_sum_exp", x, (-1,))
        return generator("exp", self.a.reshape(lse, but_ones(lse.shape)))

    @proof
    def sum_of(self, z: Value) -> Share | None:
        """Return Σ exp(z) over the last dim as a share: exp(-r) Σ exp(x) for z = x - r, a sum of those of pieces."""
        if z.op == "cat" and z.attrs == (z.rank - 1,):
            return total([proven(self.power(each) if each.shape[-1] == 1 else self.sum_of(each)) for each in z.args])
        x, less = next(iter(differences(z)), (z, None))
        return self.whole(x) if less is None else self.whole(x) * proven(self.power(less)).inverse()

    def _operands(self, kind: str, x: Value, pick: Pick) -> list[Share]:
        """Return the operands of a function of single elements, repeated for all rows."""
        return self._each(kind, [(self.a.expand(each, x.shape), pick) for each in x.args])

    def _arranged(self, kind: str, x: Value, pick: Pick) -> Share | None:
        """Beside the base class: what is computed element by element and repeated, of repeated arguments."""
        below = x.arg.arg if x.op == "expand" and x.arg.op == "reshape" else x.arg
        alike = below is x.arg or all(each.shape == below.shape for each in below.args)
        if x.op != "expand" or below.op not in _ELEMENTWISE or not alike:
            return super()._arranged(kind, x, pick)
        args = [
            self.a.expand(each if below is x.arg else self.a.reshape(each, x.arg.shape), x.shape) for each in below.args
        ]
        return self._kept(kind, self.a.make(below.op, args, below.attrs, x.shape, x.dtype), pick)

    @proof
    def _power(self, x: Value, pick: Pick) -> Share | None:
        if x.op == "log_sum_exp" and x.attrs == (-1,):
            return self.sum_of(x.arg)
        return super()._power(x, pick)

    @proof
    def _value(self, x: Value, pick: Pick) -> Share | None:
        """Beside the base class: sums over keys, and what a sum of 1 at least leaves as it is."""
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
    """True if `x` is where(sum == c, .., sum) or where(sum <= c, .., sum) for a number c < 1 that no sum is."""
    condition, _, kept = x.args
    tested = condition.args[:1] == (kept,) and condition.op == "compare" and condition.attrs[0] != "ne"
    bounded = tested and condition.args[1].op == "full" and condition.args[1].attrs[0] < 1
    return bounded and _is_one_at_least(kept)


def _is_one_at_least(total: Value) -> bool:
    """True if `total` is Σ exp(x - max x) over the last dim, of rows that see a key."""
    total = total.below("reshape")
    mean = total.arg if total.op == "scale" else total
    exps = exact(mean.arg) if (mean.op, mean.attrs) == ("mean", (-1,)) else mean
    if exps.op != "exp" or exps is mean or total.attrs[:1] != mean.arg.shape[-1:]:
        return False
    return any(_is_greatest(less, x) for x, less in differences(exps.arg))


def _is_greatest(top: Value, x: Value) -> bool:
    """True if `top` is the greatest of each row of `x` that sees a key, whatever stands for -inf."""
    top = top.below("reshape")
    if top.op == "where" and top.arg.op == "compare" and top.arg.attrs == ("eq",):
        asked, bound = top.arg.args
        replaced = asked is top.args[2] and (bound.op, bound.attrs) == ("full", (-math.inf,))
        return replaced and _is_greatest(top.args[2], x)
    if top.op == "clip" and top.attrs[0] <= _LOW and top.attrs[1] == math.inf:
        return _is_greatest(top.arg, x)
    return (top.op, top.attrs) == ("greatest", (-1,)) and exact(top.arg) is exact(x)
