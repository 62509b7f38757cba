"""Softmax attention that is normalised after the product with values: (exp(z) v) / Σ exp(z)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from fusion.analysis.row_layout import Step, row_step
from fusion.analysis.softmax_weights import row_shares
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import proven

Finish = tuple[Step, ...]
"""Reshapes, permutes and casts of a product of weights and values, innermost first."""


def stripped(root: Value) -> tuple[Value, Finish]:
    """Strip from `root` a cast, and the reshapes and permutes below the cast.

    Returns:
        The value below them, and the reshapes and permutes, innermost first.
    """
    finish: list[tuple[str, tuple[Any, ...]]] = []
    value = root.arg if root.op == "cast" else root
    while value.op in ("reshape", "permute"):
        finish.append((value.op, value.shape if value.op == "reshape" else value.attrs))
        value = value.arg
    return value, tuple(reversed(finish))


def divided_late(a: Algebra, root: Value) -> tuple[Value, Finish] | None:
    """Rewrite `root` = (exp(z) v) · w, for a number w of each row, to (exp(z) · w) v.

    exp(z) may be softmax(z) if `row_shares` recognises softmax(z) · w, as with a sink.

    Returns:
        The product (exp(z) · w) v and the steps from it to `root`; None for any other `root`.
    """
    value, finish = stripped(root)
    for product, inverse in value.operands("mul"):
        sum_of, divided, steps = _below_views(a, product, inverse)
        exp = sum_of.arg.below("cast", "reshape") if sum_of.op == "matmul" else sum_of
        if exp.op not in ("exp", "softmax") or exp is sum_of or prod(exp.shape[:-1]) != prod(divided.shape):
            continue
        share = a.mul(exp, _wide(a, _moved(a, divided, "reshape", (*exp.shape[:-1], 1)), exp.dtype))
        if share is not None and (exp.op == "exp" or row_shares(a, share) is not None):
            weights = _replaced(a, sum_of.arg, exp, share)
            moved = a.make("matmul", (weights, sum_of.args[1]), sum_of.attrs, sum_of.shape, sum_of.dtype)
            widened = (("cast", (root.dtype,)),) if root is value else ()
            return moved, (*steps, *finish, *widened)
    return None


def _below_views(a: Algebra, product: Value, inverse: Value) -> tuple[Value, Value, Finish]:
    """Strip from `product` [.., E] its casts and the views of its rows, and undo these views in `inverse` [.., 1].

    Returns:
        The product below, the rearranged `inverse`, and the stripped views, innermost first.
    """
    steps: list[Step] = []
    wanted = (*product.shape[:-1], 1)
    while inverse.shape == wanted and (product.op == "cast" or row_step(product) is not None):
        if product.op == "permute":
            back = [product.attrs.index(axis) for axis in range(product.rank)]
            inverse = _moved(a, inverse, "permute", back)
        elif product.op == "reshape":
            inverse = _moved(a, inverse, "reshape", (*product.arg.shape[:-1], 1))
        if product.op != "cast":
            steps.append((product.op, product.shape if product.op == "reshape" else product.attrs))
        product = product.arg
        wanted = (*product.shape[:-1], 1)
    return product, inverse, tuple(reversed(steps))


def _moved(a: Algebra, x: Value, op: str, how: Sequence[Any]) -> Value:
    """Return `x` behind `op`, a permute or reshape by `how`, moved below elementwise ops to their arguments."""
    if x.op in ("permute", "reshape"):
        below = _moved(a, x.arg, x.op, x.attrs or x.shape)
        if below is not x:
            return _moved(a, below, op, how)
    if x.op not in _ELEMENTWISE:
        return a.permute(x, how) if op == "permute" else a.reshape(x, tuple(how))
    args = [_moved(a, each if each.shape == x.shape else a.expand(each, x.shape), op, how) for each in x.args]
    if x.op in _BUILT:
        return proven(_BUILT[x.op](a, *args, *x.attrs, *([x.dtype] if x.op == "cast" else [])))
    return a.make(x.op, args, x.attrs, args[0].shape, x.dtype)


_ELEMENTWISE = ("power", "scale", "shift", "cast", "add", "mul", "exp", "log", "sigmoid", "aten.logaddexp.default")
_BUILT: Mapping[str, Callable[..., Value | None]] = {
    "power": Algebra.power, "scale": Algebra.scale, "shift": Algebra.shift, "cast": Algebra.cast, "add": Algebra.add,
    "mul": Algebra.mul,
}  # fmt: skip


def _wide(a: Algebra, inverse: Value, dtype: Any) -> Value:
    """Return `inverse` = cast(sum) ** n without the cast, if the sum has `dtype`; any other `inverse` as it is."""
    below = inverse.arg if inverse.op == "power" else inverse
    rounded = below is not inverse and below.op == "cast" and below.arg.dtype == dtype
    return a.power(below.arg, inverse.attrs[0]) if rounded else inverse


def _replaced(a: Algebra, x: Value, old: Value, new: Value) -> Value:
    """Rebuild the casts and reshapes by which `x` is computed from `old`, on `new` in the place of `old`."""
    if x is old:
        return new
    below = _replaced(a, x.arg, old, new)
    return a.cast(below, x.dtype) if x.op == "cast" else a.reshape(below, x.shape)
