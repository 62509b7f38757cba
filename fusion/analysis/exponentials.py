"""Shares that a model computes from exponentials of one number for each row: softmax, sigmoid, exp(x - log Σ exp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fusion.analysis.elements import Pick, arranged_pick, cut, pick_on, stacked, without
from fusion.analysis.exp_monomials import ONE, Powers, Share, divides, generator, moved, total
from fusion.analysis.logarithms import decomposed
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Dim, Value, but_ones
from fusion.graph.algebra import widens


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
        shape = but_ones(without(x, pick))
        below = [(each, pick_on(each, pick)) for each in x.args]
        return below if all(but_ones(without(*each)) == shape for each in below) else None

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
                parts = decomposed(x)
                shapes = {but_ones(each.shape) for each in parts}
                return _total([self.power(each, pick_on(each, pick)) for each in parts]) if len(shapes) == 1 else None
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
