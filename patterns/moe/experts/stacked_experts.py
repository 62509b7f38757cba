"""y = Σ_e w[:, e] · f(x; W[e]), all experts of every token in products of stacked matrices  (Llama 4, 2025).

    h [E, T, I] = x [T, H] · U [E, H, I]        y [T, H] = Σ_e w[T, e] · (h · D [E, I, H])[e]

The dim E is tracked from the sum back to the products, through reshapes, permutes and elementwise functions, and the
computation is rewritten for the chosen experts [T, K] alone.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from fusion.analysis.dtypes import elements_below, unrounded
from fusion.graph import Algebra, Dim, Graph, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof_steps import must, proven
from patterns.linear.read_gates import half_of_lanes
from patterns.moe.experts.chosen_rows import ChosenRows
from patterns.moe.experts.expert_lists import Active
from patterns.moe.experts.weighted_sums import total


class Stack(NamedTuple):
    """A value of which dim `experts` has size E, dim `lanes` holds the lanes of one row, and all others are tokens."""

    value: Value
    experts: int
    lanes: int


class Weighed(NamedTuple):
    """The operands of a sum over all experts: weights [T, E], and the outputs by which they are multiplied."""

    weights: Value
    outputs: Stack


def weighed_stack(a: Algebra, inner: Value, factor: float) -> Weighed | None:
    """Read `inner` · `factor` as a sum over one dim of outputs times weights: a sum of products, or a matmul; else
    None.
    """
    return _by_mean(a, inner, factor) or _by_product(a, inner, factor)


def _by_mean(a: Algebra, inner: Value, factor: float) -> Weighed | None:
    """Read `inner` · `factor`, a mean times the size of its dim, as a sum over experts of outputs [.., W] · weights
    [.., 1].

    None if it is no such sum.
    """
    product = unrounded(inner.arg) if inner.op == "mean" and len(inner.attrs) == 1 else inner
    if product.op != "mul" or product is inner or inner.attrs == (-1,):
        return None
    axis = inner.attrs[0] % product.rank
    for rows, weights in product.operands() if product.shape[axis] == factor else ():
        if rows.shape == product.shape and weights.shape == (*rows.shape[:-1], 1):
            axes = (*(each for each in range(rows.rank - 1) if each != axis), axis)
            lines = a.permute(a.reshape(weights, rows.shape[:-1]), axes)
            flat = a.reshape(lines, (prod(lines.shape[:-1]), lines.shape[-1]))
            return Weighed(flat, Stack(unrounded(rows), axis, rows.rank - 1))
    return None


def _by_product(a: Algebra, inner: Value, factor: float) -> Weighed | None:
    """Read `inner` · `factor` as a sum over the E experts of each token, written as a matmul or as another sum of
    weighted rows.

    None if it is no such sum, or if the rows are sorted.
    """
    weighted = total(a, inner, factor)
    if weighted is None or weighted.order is not None:
        return None
    rows = a.reshape(elements_below(weighted.rows), (*weighted.weights.shape, weighted.rows.shape[-1]))
    return Weighed(weighted.weights, Stack(rows, 1, 2))


class StackedRows(ChosenRows):
    """Rewriter to the chosen experts of a computation whose values stack all experts in one dim."""

    def __init__(self, graph: Graph, places: Value, active: Active) -> None:
        super().__init__(graph, places, active)
        self._stacks: dict[Stack, Value] = {}

    def rewrite_stack(self, stack: Stack) -> Value:
        """Build [T, K, W] whose row (t, k) is the row of token t and its k-th expert in `stack`; memoised."""
        must(stack.experts != stack.lanes)
        if stack not in self._stacks:
            self._stacks[stack] = self._rewrite_stack(*stack)
        return self._stacks[stack]

    def _rewrite_stack(self, x: Value, e: int, w: int) -> Value:
        """Build [T, K, W] for `x`, whose dim `e` is that of experts and whose dim `w` holds lanes, by the op that
        computes it.

        Unproven for an op that is not known.
        """
        shared = self._shared_tokens(x, e, w)
        if shared is not None:
            return self._tokens(shared)
        joined = self._joined(x, e, w)
        if joined is not None:
            return self.rewrite(joined)
        match x.op:
            case "permute":
                rest = [each for place, each in enumerate(x.attrs) if place not in (e, w) and x.shape[place] != 1]
                must(rest == sorted(rest))
                return self.rewrite_stack(Stack(x.arg, x.attrs[e], x.attrs[w]))
            case "reshape":
                return self._reshaped(x, e, w)
            case "matmul":
                return self._layer_of_stack(x, e, w)
            case "slice" if x.attrs[0] == w:
                return self._lanes(self.rewrite_stack(Stack(x.arg, e, w)), *x.attrs[1:])
            case "add" if x.args[0].shape != x.args[1].shape:
                return self._biased(x, e, w)
            case _:
                must(x.args and all(arg.shape == x.shape for arg in x.args))
                return self._rebuilt(x, [self.rewrite_stack(Stack(arg, e, w)) for arg in x.args])

    def _reshaped(self, x: Value, e: int, w: int) -> Value:
        """Rewrite a reshape that keeps dims `e` and `w`, or that splits lanes E · W of one joint layer into (E, W)."""
        moved = [_axis(x.arg, prod(x.shape[:each]), x.shape[each]) for each in (e, w)]
        if all(each is not None for each in moved):
            return self.rewrite_stack(Stack(x.arg, *map(proven, moved)))
        must(x.arg.op == "matmul" and (e, w) == (x.rank - 2, x.rank - 1))
        (tokens, weight), parts = x.arg.args, x.shape[-2:]
        must(prod(weight.shape[:-2]) == 1 and weight.shape[-1] == prod(parts))
        matrices = self.a.reshape(weight, (weight.shape[-2], *parts))
        return self._multiplied(self._tokens(tokens), self.a.permute(matrices, (1, 0, 2)))

    def _joined(self, x: Value, e: int, w: int) -> list[Value] | None:
        """Return the E operands [.., W] of a stack or concatenation `x`; None for any other `x`."""
        cat = x.arg if x.op == "reshape" else x
        if cat.op != "cat" or len(cat.args) != x.shape[e] or w != x.rank - 1:
            return None
        (axis,), one = cat.attrs, (*x.shape[:e], *x.shape[e + 1 :])
        parts = {prod(each.shape) == prod(one) for each in cat.args}
        is_stack = parts == {True} and prod(cat.shape[:axis]) == prod(x.shape[:e])
        return [unrounded(self.a.reshape(each, one)) for each in cat.args] if is_stack else None

    def _lanes(self, rows: Value, *lanes: int) -> Value:
        """Slice the last dim of `rows`; record a slice that is the gate or the up half of it."""
        part = self.a.cut(rows, rows.rank - 1, *lanes)
        half = half_of_lanes(self.a, part)
        if half is not None:
            self.readings[part] = half
        return part

    def _layer_of_stack(self, x: Value, e: int, w: int) -> Value:
        """Rewrite the matmul `x`, whose batch dim `e` runs over the matrices [E, H, W], as a product of chosen rows."""
        left, right = x.args
        inputs, matrices = (left, right) if w == x.rank - 1 else (right, swapped(self.a, left))
        lanes = inputs.rank - (1 if w == x.rank - 1 else 2)
        own, at = (e - x.rank + each.rank for each in (matrices, inputs))
        must(e < x.rank - 2 <= w and own >= 0 and prod(matrices.shape[:-2]) == matrices.shape[own] == x.shape[e])
        weight = self.a.reshape(matrices, (x.shape[e], *matrices.shape[-2:]))
        if at >= 0 and inputs.shape[at] != 1:
            return self._multiplied(self.rewrite_stack(Stack(inputs, at, lanes)), weight)
        return self._multiplied(self._tokens(inputs if lanes == inputs.rank - 1 else swapped(self.a, inputs)), weight)

    def _multiplied(self, rows: Value, matrices: Value, bias: Value | None = None) -> Value:
        """Build rows [T, K, H] @ matrices [E, H, W] of their experts + bias [E, W], with its expert_product reading."""
        operands = (rows, matrices) if bias is None else (rows, matrices, bias)
        product = self.a.make("row_product", operands, (), (*rows.shape[:-1], matrices.shape[-1]), rows.dtype)
        how: dict[str, Any] = {"x": rows, "weight": matrices, "experts": self.experts, "active": self.active}
        how |= {"is_sorted": False} if bias is None else {"is_sorted": False, "bias": bias}
        fixed = self.graph.is_fixed(matrices) and (bias is None or self.graph.is_fixed(bias))
        self.readings[product] = Reading("expert_product", {**how, "is_parameter_only": fixed})
        return product

    def _biased(self, x: Value, e: int, w: int) -> Value:
        """Rewrite the addition `x` of a bias, of size E in dim `e` and W in dim `w`, to a product that has the bias."""
        product, bias = x.args if x.args[0].shape == x.shape else x.args[::-1]
        places = range(-1, -1 - bias.rank, -1)
        must(product.shape == x.shape and all(bias.shape[p] in (1, x.shape[p]) for p in places))
        must({p % x.rank for p in places if bias.shape[p] != 1} == {e, w} and e < w)
        rows = self.rewrite_stack(Stack(product, e, w))
        captures = proven(self.readings.get(rows)).captures
        must("bias" not in captures)
        return self._multiplied(captures["x"], captures["weight"], self.a.reshape(bias, (x.shape[e], x.shape[w])))

    def _shared_tokens(self, x: Value, e: int, w: int) -> Value | None:
        """Return the tokens [1, .., W] that `x` expands along dim `e` to every expert; None for any other `x`."""
        if x.op != "expand" or x.arg.shape[e] != 1:
            return None
        one = x.arg
        must(all(size == one.shape[place] for place, size in enumerate(x.shape) if place != e))
        rest = [each for each in range(x.rank) if each not in (e, w)]
        return self.a.permute(one, (e, *rest, w))


def _axis(x: Value, before: Dim, size: Dim) -> int | None:
    """Return the dim of `x` that has size `size` and `before` elements in the dims before it; None if there is none."""
    axes = [axis for axis in range(x.rank) if x.shape[axis] == size and prod(x.shape[:axis]) == before]
    return axes[-1] if axes and size != 1 else None
