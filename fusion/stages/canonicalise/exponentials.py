"""Shares that a model computes from exponentials of one number for each row: softmax, sigmoid, exp(x - log Σ exp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusion.graph import Algebra, Dim, Value
from fusion.graph.algebra import widens
from fusion.stages.canonicalise.quantisation import is_float
from fusion.stages.canonicalise.shares import ONE, Powers, Share, divides, generator, moved, total
from fusion.stages.canonicalise.translate import Out, Translated, translates

MOST = 16  # entries of a dim that are told apart
Pick = tuple[int, int] | None
"""One entry of a dim, which is counted from the end; None for all."""


class Picked(NamedTuple):
    """A pick below a reshape or a permute."""

    pick: Pick


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


def differences(x: Value) -> list[tuple[Value, Value]]:
    """The z and r of which `x` is z - r, with one number r [.., 1] for each row of z."""
    pairs = (x.args, x.args[::-1]) if x.op == "add" and len(x.args) == 2 else ()
    less = [(z, minus) for z, minus in pairs if minus.op == "scale" and minus.attrs == (-1.0,)]
    return [(z, minus.arg) for z, minus in less if z.shape == x.shape and _of_rows(minus, z)]


def _of_rows(value: Value, z: Value) -> bool:
    return (1,) * (z.rank - value.rank) + value.shape == (*z.shape[:-1], 1)


def summed(value: Value) -> Value | None:
    """The x of which `value` is log Σ exp(x) over its last dim, for x or for x less a number for each row."""
    value = bare(value)
    if value.op == "log_sum_exp":
        return value.arg if value.attrs == (-1,) else None
    if value.op == "log":
        return _exponents(value)
    for top, log in (value.args, value.args[::-1]) if value.op == "add" and len(value.args) == 2 else ():
        z = _exponents(bare(log))
        for x, less in differences(z) if z is not None else ():
            if bare(less) is bare(top):
                return x
    return None


def _exponents(log: Value) -> Value | None:
    """The z of log Σ exp(z) over the last dim."""
    if log.op != "log":
        return None
    inner = bare(log.arg)
    mean = bare(inner.arg) if inner.op == "scale" else inner
    exp = bare(mean.arg) if mean.op == "mean" else mean
    whole = mean.op == "mean" and mean.attrs == (-1,) and inner.attrs[:1] == mean.arg.shape[-1:] == exp.shape[-1:]
    return exp.arg if whole and exp.op == "exp" else None


def bare(x: Value) -> Value:
    """What is below dims of size 1 that were added or taken away."""
    while x.op == "reshape" and but_ones(x.shape) == but_ones(x.arg.shape):
        x = x.arg
    return x


@dataclass
class Exponentials:
    """Values as shares, and the values whose exponentials they are."""

    a: Algebra
    known: dict[tuple[str, Value, Pick], Share | None] = field(
        default_factory=dict[tuple[str, Value, Pick], Share | None]
    )
    logs: dict[tuple[float, Powers], list[Value]] = field(default_factory=dict[tuple[float, Powers], list[Value]])

    def value(self, x: Value, pick: Pick = None) -> Share | None:
        """`x`, or one entry of a dim of it, as a share; None where it has no such form."""
        return self._kept("is", x, pick)

    def power(self, x: Value, pick: Pick = None) -> Share | None:
        """exp(x)."""
        return self._kept("exp", x, pick)

    def logarithms(self, shares: Sequence[Share], shape: tuple[Dim, ...]) -> list[Value] | None:
        """Values of a shape whose exponentials are to each other as the shares are; the earliest there are."""
        best: list[Value] | None = None
        for (factor, powers), _ in list(self.logs.items()):
            shift = Share(factor, powers) * Share(shares[0].factor, shares[0].powers).inverse()
            found: list[Value] = []
            for share in shares:
                wanted = Share(share.factor, share.powers) * shift
                found += [each for each in self.logs.get((wanted.factor, wanted.powers), ()) if each.shape == shape][:1]
            if len(found) == len(shares) and (best is None or _age(found) < _age(best)):
                best = found
        return best

    def _kept(self, kind: str, x: Value, pick: Pick) -> Share | None:
        key = (kind, x, pick)
        if key in self.known:
            return self.known[key]
        part = cut(self.a, x, pick)
        if part is None:
            return None
        whole = self.a.reshape(part, but_ones(part.shape))
        self.known[key] = None  # a cut is told by what it is cut from, unless that is told by the cut
        found = self._power(x, pick) if kind == "exp" else self._value(x, pick)
        found = generator(kind, whole) if found is None else found
        self.known[key] = found
        if kind == "exp" and not found.sums:
            self.logs.setdefault((found.factor, found.powers), []).append(whole)
        return found

    def _below(self, x: Value, pick: Pick) -> list[tuple[Value, Pick]] | None:
        """The operands of a function of single elements; None where one is repeated for others."""
        shape = but_ones(_without(x, pick))
        below = [(each, _on(each, pick)) for each in x.args]
        return below if all(but_ones(_without(*each)) == shape for each in below) else None

    def _power(self, x: Value, pick: Pick) -> Share | None:
        match x.op:
            case "add":
                terms = [self.power(*each) for each in self._below(x, pick) or ()]
                return _product(terms)
            case "scale" if x.attrs[0] == -1:
                inner = self.power(x.arg, pick)
                return None if inner is None else inner.inverse()
            case "log":
                return self.value(x.arg, pick)
            case "log_sum_exp":
                parts = None if pick is not None else stacked(x)
                return None if parts is None else _total([self.power(x.arg, each) for each in parts])
            case "aten.logaddexp.default":
                return _total([self.power(*each) for each in self._below(x, pick) or ()])
            case "where":
                parts = _decomposed(x)
                shapes = {but_ones(each.shape) for each in parts}
                return _total([self.power(each, _on(each, pick)) for each in parts]) if len(shapes) == 1 else None
            case _:
                return self._arranged("exp", x, pick)

    def _value(self, x: Value, pick: Pick) -> Share | None:
        match x.op:
            case "exp":
                return self.power(x.arg, pick)
            case "mul":
                return _product([self.value(*each) for each in self._below(x, pick) or ()])
            case "add":
                return _total([self.value(*each) for each in self._below(x, pick) or ()])
            case "scale" if divides(x.attrs[0]):
                inner = self.value(x.arg, pick)
                return None if inner is None else inner.scaled(x.attrs[0])
            case "shift":
                return _total([self.value(x.arg, pick), ONE.scaled(x.attrs[0])]) if divides(x.attrs[0]) else None
            case "power" if x.attrs[0] == -1:
                inner = self.value(x.arg, pick)
                return None if inner is None else inner.inverse()
            case "sigmoid":
                inner = self.power(x.arg, pick)
                below = _total([ONE, inner])
                return None if inner is None or below is None else inner * below.inverse()
            case "softmax" if pick is not None and x.attrs[0] == pick[0]:
                parts = stacked(x)
                below = None if parts is None else _total([self.power(x.arg, each) for each in parts])
                inner = self.power(x.arg, pick)
                return None if inner is None or below is None else inner * below.inverse()
            case "mean":
                parts = None if pick is not None else stacked(x)
                added = None if parts is None else _total([self.value(x.arg, each) for each in parts])
                return None if added is None or parts is None else added.scaled(1 / len(parts))
            case _:
                return self._arranged("is", x, pick)

    def _arranged(self, kind: str, x: Value, pick: Pick) -> Share | None:
        """Dims of size 1 come and go, dims change places, numbers are rounded; an entry of what was joined is a piece.

        A weight may be rounded: the operator keeps it as it is. What stands in an exponential may not.
        """
        if x.op == "cast" and (widens(x.arg.dtype, x.dtype) or (kind == "is" and is_float(x.arg))):
            return self._kept(kind, x.arg, pick)
        if x.op in ("reshape", "permute"):
            inner = arranged_pick(x, pick)
            if inner is not None:
                return self._kept(kind, x.arg, inner.pick)
        if x.op == "permute" and pick is None:
            return self._permuted(kind, x)
        if pick is None and x.op == "slice" and x.attrs[2] - x.attrs[1] == 1:
            return self._kept(kind, x.arg, (x.attrs[0] - x.rank, x.attrs[1]))
        part = None if pick is None else cut(self.a, x, pick)
        return None if part is None else self._kept(kind, part, None)

    def _permuted(self, kind: str, x: Value) -> Share | None:
        """The same of values of which the dims have changed places, and those that have its exponentials."""
        inner = self._kept(kind, x.arg, None)
        if inner is None:
            return None
        kept = [axis for axis in x.attrs if x.arg.shape[axis] != 1]
        order = [sorted(kept).index(axis) for axis in kept]

        def move(value: Value) -> Value:
            return self.a.permute(value, order)

        below = inner.generators
        for (factor, powers), values in list(self.logs.items()):
            if all(each in below for each, _ in powers):
                known = self.logs.setdefault((factor, moved(powers, move)), [])
                known.extend(each for each in map(move, values) if each not in known)
        return inner.moved(move)


def but_ones(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """A shape without its dims of size 1."""
    return tuple(size for size in shape if size != 1)


def stacked(reduced: Value) -> list[Pick] | None:
    """The entries of the one dim that a reduction, or a softmax, goes over, where they are parts: the first dim of all,
    or one along which single entries were joined.
    """
    axes, x = (reduced.attrs[:1] if reduced.op == "softmax" else reduced.attrs), reduced.arg
    if len(axes) != 1:
        return None
    axis = axes[0]
    size = x.shape[axis]
    first = all(each == 1 for each in x.shape[:axis])
    joined = x.op == "cat" and x.attrs[0] == axis + x.rank and len(x.args) == size
    known = isinstance(size, int) and 1 < size <= MOST
    return [(axis, entry) for entry in range(size)] if known and ((first and x.rank > 1) or joined) else None


def cut(a: Algebra, x: Value, pick: Pick) -> Value | None:
    """One entry of a dim, without the dim; None where it cannot be told."""
    if pick is None:
        return x
    axis, entry = pick[0] + x.rank, pick[1]
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    rows, size = (x.arg if x.op == "reshape" else x), x.shape[axis]
    whole = all(isinstance(each, int) for each in (size, *rows.shape[:1])) and all(each == 1 for each in x.shape[:axis])
    if x is not rows and whole and rows.rank and rows.shape[0] % size == 0:
        run: Any = rows.shape[0] // size
        part = a.slice(rows, 0, entry * run, (entry + 1) * run)
    else:
        part = a.slice(x, axis, entry, entry + 1)
    return None if part is None else a.reshape(part, shape)


def arranged_pick(x: Value, pick: Pick) -> Picked | None:
    """The same entry in what `x` arranges otherwise, if the entry itself stays as it is but for dims of size 1."""
    if x.op == "permute":
        rest = x.attrs if pick is None else tuple(axis for p, axis in enumerate(x.attrs) if p - x.rank != pick[0])
        kept = [axis for axis in rest if x.arg.shape[axis] != 1]
        inner = None if pick is None else (x.attrs[pick[0]] - x.rank, pick[1])
        return Picked(inner) if kept == sorted(kept) else None
    if but_ones(x.shape) != but_ones(x.arg.shape):
        return None
    if pick is None:
        return Picked(None)
    behind = len(but_ones(x.shape[pick[0] :]))
    places = [place - x.arg.rank for place, size in enumerate(x.arg.shape) if size != 1]
    return Picked((places[-behind], pick[1]))


def _on(x: Value, pick: Pick) -> Pick:
    return None if pick is None or x.rank < -pick[0] or x.shape[pick[0]] == 1 else pick


def _without(x: Value, pick: Pick) -> tuple[Dim, ...]:
    return x.shape if pick is None else tuple(s for p, s in enumerate(x.shape) if p - x.rank != pick[0])


def _product(factors: Sequence[Share | None]) -> Share | None:
    product = ONE
    for each in factors:
        if each is None:
            return None
        product = product * each
    return product if factors else None


def _total(terms: Sequence[Share | None]) -> Share | None:
    whole = [each for each in terms if each is not None]
    return total(whole) if whole and len(whole) == len(terms) else None


def _age(values: Sequence[Value]) -> int:
    return sum(each.id for each in values)


def _decomposed(x: Value) -> tuple[Value, ...]:
    """The x and y of a log(exp(x) + exp(y)) that was decomposed; none of anything else.

    where(x and y are the same infinity, x, max + log1p(exp(min - max)))
    """
    same, one, added = x.args
    if same.op != "and" or added.op != "add":
        return ()
    for top, log in (added.args, added.args[::-1]):
        z = log.arg.arg if log.op == "aten.log1p.default" and log.arg.op == "exp" else None
        if z is None or z.op != "add" or top.op != "where":
            continue
        for least, minus in (z.args, z.args[::-1]):
            lower = minus.op == "scale" and minus.attrs[0] == -1 and minus.arg is top and least.op == "where"
            if lower and _are_ordered(top, least) and one in top.args[1:] and _is_same_infinity(same, top.args[1:]):
                return tuple(top.args[1:])
    return ()


def _are_ordered(top: Value, least: Value) -> bool:
    """where(y <= x, x, y) and where(y <= x, y, x)."""
    order, x, y = top.args
    ordered = order.op == "compare" and order.attrs[0] in ("le", "lt") and order.args == (y, x)
    return ordered and least.args == (order, y, x)


def _is_same_infinity(condition: Value, both: Sequence[Value]) -> bool:
    """Whether a condition holds only where two values are equal and not finite."""
    equal = any(
        each.op == "compare" and each.attrs == ("eq",) and set(each.args) == set(both) for each in condition.args
    )
    return equal and any(each.op == "not" and _is_finite(each.arg, both) for each in condition.args)


def _is_finite(condition: Value, both: Sequence[Value]) -> bool:
    """|x| != inf and x == x."""
    if condition.op != "mul" or len(condition.args) != 2:
        return False
    for other, own in (condition.args, condition.args[::-1]):
        x = own.arg if own.op == "compare" and own.attrs == ("eq",) and own.args[0] is own.args[1] else None
        size = other.args if other.op == "compare" and other.attrs == ("ne",) else ()
        infinite = any(each.op == "full" and each.attrs == (float("inf"),) for each in size)
        if x in both and infinite and any(each.op == "abs" and each.arg is x for each in size):
            return True
    return False
