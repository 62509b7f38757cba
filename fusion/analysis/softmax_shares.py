"""Softmax-like weights over a few parts, in normal form: softmax, sigmoid, exp(x - log Σ exp) become equal shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from fusion.analysis.exp_monomials import ONE, Powers, Share, divides, generator, moved, total
from fusion.analysis.logarithms import decomposed
from fusion.analysis.rounding import is_float
from fusion.analysis.stacked_entries import Pick, arranged_pick, cut, pick_on, stacked, without
from fusion.graph import Algebra, Dim, Value, but_ones
from fusion.graph.algebra import widens
from fusion.graph.proof_steps import must, proof, proven


@dataclass
class Exponentials:
    """Memoised conversion of values to shares, and an index of values by the share of their exponential.

    Attributes:
        a: the algebra of the graph.
        known: ("is" | "exp", x, pick) -> share of x or exp(x); None while it is computed.
        logs: (factor, powers) -> values x with the share exp(x), if that has no sums.
    """

    a: Algebra
    known: dict[tuple[str, Value, Pick], Share | None] = field(
        default_factory=dict[tuple[str, Value, Pick], Share | None]
    )
    logs: dict[tuple[float, Powers], list[Value]] = field(default_factory=dict[tuple[float, Powers], list[Value]])

    def value(self, x: Value, pick: Pick = None) -> Share | None:
        """Return `x`, or its entry `pick`, as a share; memoised.

        None while the same share is being computed further up the stack.
        """
        return self._memoised("is", x, pick)

    def power(self, x: Value, pick: Pick = None) -> Share | None:
        """Return exp(`x`), or exp of the entry `pick` of `x`, as a share; memoised.

        None while the same share is being computed further up the stack.
        """
        return self._memoised("exp", x, pick)

    def logarithms(self, shares: Sequence[Share], shape: tuple[Dim, ...]) -> list[Value] | None:
        """Return values x₁, x₂, … of the graph of `shape` with exp(xᵢ) = c · sharesᵢ, for one c that is the same for
        all.

        `shares` are without sums. Of several solutions, the one that was created first in the graph; None if there is
        none.
        """
        best: list[Value] | None = None
        for factor, powers in list(self.logs):
            shift = Share(factor, powers) * Share(shares[0].factor, shares[0].powers).inverse()
            values: list[Value] = []
            for share in shares:
                wanted = Share(share.factor, share.powers) * shift
                named = self.logs.get((wanted.factor, wanted.powers), ())
                values += [each for each in named if each.shape == shape][:1]
            if len(values) == len(shares) and (best is None or _age(values) < _age(best)):
                best = values
        return best

    def _memoised(self, kind: str, x: Value, pick: Pick) -> Share | None:
        key = (kind, x, pick)
        if key in self.known:
            return self.known[key]
        part = cut(self.a, x, pick)
        part = self.a.reshape(part, but_ones(part.shape))
        self.known[key] = None  # ends the recursion: an entry is analysed by its tensor, and a tensor by its entries
        share = self._power(x, pick) if kind == "exp" else self._value(x, pick)
        share = generator(kind, part) if share is None else share
        self.known[key] = share
        if kind == "exp" and not share.sums:
            self.logs.setdefault((share.factor, share.powers), []).append(part)
        return share

    def _operands(self, kind: str, x: Value, pick: Pick) -> list[Share]:
        """Return the shares of the operands of the elementwise op `x`, or of their entries for the entry `pick` of `x`.

        `kind` is "is" for the operands themselves, "exp" for their exponentials. Unproven if an operand is broadcast.
        """
        below = [(each, pick_on(each, pick)) for each in x.args]
        must(all(but_ones(without(*each)) == but_ones(without(x, pick)) for each in below))
        return self._each(kind, below)

    def _parts(self, kind: str, x: Value) -> list[Share]:
        """Return the shares of the entries along the dim in which `x` is a reduction or a softmax.

        `kind` is "is" for the entries themselves, "exp" for their exponentials. Unproven if `stacked` lists no entries.
        """
        return self._each(kind, [(x.arg, each) for each in proven(stacked(x))])

    def _each(self, kind: str, below: Sequence[tuple[Value, Pick]]) -> list[Share]:
        shares = [self._memoised(kind, *each) for each in below]
        return [proven(each) for each in shares]

    @proof
    def _power(self, x: Value, pick: Pick) -> Share | None:
        match x.op:
            case "add":
                return prod(self._operands("exp", x, pick), start=ONE)
            case "scale" if x.attrs[0] == -1:
                return proven(self.power(x.arg, pick)).inverse()
            case "log":
                return self.value(x.arg, pick)
            case "log_sum_exp":
                must(pick is None)
                return total(self._parts("exp", x))
            case "aten.logaddexp.default":
                return total(self._operands("exp", x, pick))
            case "where":
                parts = decomposed(x)
                must(len({but_ones(each.shape) for each in parts}) == 1)
                return total(self._each("exp", [(each, pick_on(each, pick)) for each in parts]))
            case _:
                return self._arranged("exp", x, pick)

    @proof
    def _value(self, x: Value, pick: Pick) -> Share | None:
        match x.op:
            case "exp":
                return self.power(x.arg, pick)
            case "mul":
                return prod(self._operands("is", x, pick), start=ONE)
            case "add":
                return total(self._operands("is", x, pick))
            case "scale" if divides(x.attrs[0]):
                return proven(self.value(x.arg, pick)).scaled(x.attrs[0])
            case "shift":
                must(divides(x.attrs[0]))
                return total([proven(self.value(x.arg, pick)), ONE.scaled(x.attrs[0])])
            case "power" if x.attrs[0] == -1:
                return proven(self.value(x.arg, pick)).inverse()
            case "sigmoid":
                inner = proven(self.power(x.arg, pick))
                return inner * proven(total([ONE, inner])).inverse()
            case "softmax" if pick is not None and x.attrs[0] == pick[0]:
                inner = proven(self.power(x.arg, pick))
                return inner * proven(total(self._parts("exp", x))).inverse()
            case "mean":
                must(pick is None)
                parts = self._parts("is", x)
                return proven(total(parts)).scaled(1 / len(parts))
            case _:
                return self._arranged("is", x, pick)

    def _arranged(self, kind: str, x: Value, pick: Pick) -> Share | None:
        """Return the share of `x`, or of its entry `pick`, by that of its argument, if `x` only moves or casts
        elements.

        With `kind` "is", the share is a weight, which the fused operator takes unrounded: `x` may be a cast that
        rounds. With "exp" it is that of exp(x), and may not. None while the share is being computed further up the
        stack.
        """
        if x.op == "cast" and (widens(x.arg.dtype, x.dtype) or (kind == "is" and is_float(x.arg))):
            return self._memoised(kind, x.arg, pick)
        if x.op in ("reshape", "permute"):
            inner = arranged_pick(x, pick)
            if inner is not None:
                return self._memoised(kind, x.arg, inner.pick)
        if x.op == "permute" and pick is None:
            return self._permuted(kind, x)
        if pick is None and x.op == "slice" and x.attrs[2] - x.attrs[1] == 1:
            return self._memoised(kind, x.arg, (x.attrs[0] - x.rank, x.attrs[1]))
        return self._memoised(kind, cut(self.a, x, pick), None)

    def _permuted(self, kind: str, x: Value) -> Share | None:
        """Return the share of the permute `x` by that of its argument, with every value in it permuted; None if a sum
        becomes 0.

        `kind` is as in `_arranged`. The permuted values are added to `logs` too, so that `logarithms` finds them.
        """
        inner = proven(self._memoised(kind, x.arg, None))
        axes = [axis for axis in x.attrs if x.arg.shape[axis] != 1]
        order = [sorted(axes).index(axis) for axis in axes]

        def move(value: Value) -> Value:
            return self.a.permute(value, order)

        below = inner.generators
        for (factor, powers), values in list(self.logs.items()):
            if all(each in below for each, _ in powers):
                known = self.logs.setdefault((factor, moved(powers, move)), [])
                known.extend(each for each in map(move, values) if each not in known)
        return inner.moved(move)


def _age(values: Sequence[Value]) -> int:
    return sum(each.id for each in values)
