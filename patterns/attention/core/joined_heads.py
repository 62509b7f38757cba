"""Concatenated products of single heads, rewritten to one product of all heads.

cat_h (x_h y_h)  →  x y with x = stack_h x_h, where the x_h are slices of one tensor or the same for all heads
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.core.products import VIEWS

_ON_SCORES = ("cast", "scale", "shift", "add", "where", "mul", "clip")
"""Elementwise ops between q kᵀ and the softmax."""


def with_all_heads(a: Algebra, root: Value) -> Value | None:
    """Rewrite attention `root` with a product for each head to one product of all heads; None if nothing is joined."""
    product = joined(a, root) if root.op == "cat" else root
    result = None if product is None else _attended(a, product)
    return None if result is root else result


@proof
def joined(a: Algebra, z: Value) -> Value:
    """Rewrite `z`, a concatenation of matmuls of one shape, to a view of one batched matmul; None for any other `z`."""
    pieces = list(z.args)
    must(z.op == "cat" and len(pieces) > 1 and len({each.shape for each in pieces}) == 1)
    products = [each.below("reshape") for each in pieces]
    must(all(each.op == "matmul" for each in products))
    stack = a.reshape(proven(_stacked(a, products)), (len(pieces), *pieces[0].shape))
    axis = z.attrs[0]
    return a.reshape(a.permute(stack, (*range(1, axis + 1), 0, *range(axis + 1, stack.rank))), z.shape)


@proof
def _stacked(a: Algebra, pieces: Sequence[Value]) -> Value:
    """Stack `pieces` along a new first dim, by stacking their arguments or undoing the slices that they are.

    None if they differ in op, shape or dtype, or if their op is no matmul, slice, reshape or permute.
    """
    first, count = pieces[0], len(pieces)
    shape = (count, *first.shape)
    must(all((each.op, each.shape, each.dtype) == (first.op, first.shape, first.dtype) for each in pieces))
    if all(each is first for each in pieces):
        return a.expand(a.reshape(first, (1, *first.shape)), shape)
    match first.op:
        case "matmul":
            x, y = (_operand(a, [each.args[side] for each in pieces], first.rank) for side in (0, 1))
            return a.reshape(proven(matmul(a, x, y)), shape)
        case "slice":
            return _uncut(a, pieces)
        case "reshape":
            return a.reshape(_stacked_args(a, pieces), shape)
        case "permute":
            must(all(each.attrs == first.attrs for each in pieces))
            return a.permute(_stacked_args(a, pieces), (0, *(axis + 1 for axis in first.attrs)))
        case _:
            return proven(None)


def _stacked_args(a: Algebra, pieces: Sequence[Value]) -> Value:
    return proven(_stacked(a, [each.arg for each in pieces]))


def _operand(a: Algebra, pieces: Sequence[Value], rank: int) -> Value:
    """Stack `pieces`, the left or right operands of several matmuls of rank `rank`, to [len(pieces), ..] of `rank` + 1
    dims.
    """
    stack = proven(_stacked(a, pieces))
    return a.reshape(stack, (len(pieces), *(1,) * (rank + 1 - stack.rank), *stack.shape[1:]))


def _uncut(a: Algebra, pieces: Sequence[Value]) -> Value:
    """Return adjacent slices `pieces` of one tensor as that tensor, reshaped to [len(pieces), *shape of a piece].

    Unproven if they are not slices of one width, each beginning where the last one ends.
    """
    source, (axis, start, stop, _) = pieces[0].arg, pieces[0].attrs
    must(isinstance(start, int) and isinstance(stop, int))
    width, count = stop - start, len(pieces)
    cuts = [(axis, start + n * width, stop + n * width, 1) for n in range(count)]
    must(all(each.arg is source for each in pieces) and [each.attrs for each in pieces] == cuts)
    part = a.cut(source, axis, start, start + count * width)
    opened = a.reshape(part, (*part.shape[:axis], count, width, *part.shape[axis + 1 :]))
    return a.permute(opened, (axis, *(place for place in range(opened.rank) if place != axis)))


def _attended(a: Algebra, x: Value) -> Value:
    """Rebuild `x`, a product of weights and values below views, with the scores of all heads joined to one product.

    `x` itself if it is anything else.
    """
    if x.op in ("cast", "reshape", "permute"):
        return _rebuilt(a, x, [_attended(a, x.arg)])
    if x.op != "matmul":
        return x
    return _rebuilt(a, x, [_weights(a, each) if each.below(*VIEWS).op == "softmax" else each for each in x.args])


def _weights(a: Algebra, x: Value) -> Value:
    return _rebuilt(a, x, [_scores(a, x.arg, {}) if x.op == "softmax" else _weights(a, x.arg)])


def _scores(a: Algebra, x: Value, known: dict[Value, Value]) -> Value:
    """Rebuild the scores `x` on one product of all heads, memoised in `known`; `x` itself if nothing is joined."""
    if x not in known:
        known[x] = _scores_of(a, x, known)
    return known[x]


def _scores_of(a: Algebra, x: Value, known: dict[Value, Value]) -> Value:
    if x.op == "cat":
        return joined(a, x) or x
    if x.op in ("reshape", "permute"):
        return _rebuilt(a, x, [_scores(a, x.arg, known)])
    if x.op not in _ON_SCORES:
        return x
    return _rebuilt(a, x, [_scores(a, each, known) if prod(each.shape) == prod(x.shape) else each for each in x.args])


def _rebuilt(a: Algebra, x: Value, args: Sequence[Value]) -> Value:
    """Rebuild `x` on `args`, which are equal to its own arguments."""
    if all(one is other for one, other in zip(args, x.args, strict=True)):
        return x
    if x.op in ("reshape", "permute"):
        return a.seen_as(args[0], x)
    if x.op == "slice":
        return a.cut(args[0], *x.attrs)
    return a.make(x.op, args, x.attrs, x.shape, x.dtype)
