"""Weights: from what multiplies the values down to the softmax, whose rows stand in the order of the scores' product.

They may be grouped by key heads, permuted, cast, cut from a softmax with a sink, or 0 where the scores are hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.infinities import may_be_infinite_beside_numbers
from fusion.analysis.logarithms import differences
from fusion.analysis.row_layout import Arrangement, arrangement, row_step
from fusion.graph import Algebra, Value, logic
from patterns.attention.hiding import MASKED
from patterns.attention.mask_terms import Empty, Term
from patterns.attention.scores import PLAIN, Scores, scores_of


@dataclass(frozen=True)
class Weights:
    """softmax(..), how its rows are arranged where they multiply v, and whether a sink is cut off."""

    softmax: Value
    rows: Arrangement
    cut: bool


def empty_rows(weights: Weights, scores: Scores) -> Empty:
    """What the softmax makes of a row without a key."""
    _, of_infinite, safe = weights.softmax.attrs
    return Empty(of_infinite, False if safe or scores.safe else None if scores.shifted else True)


def dropped(p: Value) -> bool:
    """Whether what multiplies the values went through dropout."""
    while p.op in ("cast", "reshape", "permute", "getitem") or (p.op.endswith("getitem>") and p.args):
        p = p.arg
    return "dropout" in p.op and any(each.op == "softmax" for each in p.args)


def weights_of(a: Algebra, p: Value, walk: Scores = Scores()) -> Weights | None:
    """The softmax that `p`, which multiplies the values, is computed from; None where it is something else."""
    steps, cut = (), False
    while p.op != "softmax":
        step = row_step(p)
        if step is not None:
            steps = (step, *steps)
        elif p.op in ("slice", "narrow") and p.attrs[:2] == (p.rank - 1, 0) and p.attrs[3:] in ((), (1,)):
            cut = True
        elif p.op in _REWRITTEN:
            whole = _REWRITTEN[p.op](a, p)
            if whole is None:
                return None
            p = whole
            continue
        elif not is_rounding(p):
            return None
        p = p.arg
    p, order = _turned(a, p, walk)
    steps = (("permute", order), *steps) if order else steps
    rows = arrangement(p.shape[:-1], steps)
    return None if rows is None else Weights(p, rows, cut)


def _of_columns(a: Algebra, turned: Value) -> Value | None:
    """softmax(zᵀ) over rows for the transpose of a softmax over columns; None for others."""
    p = _unrounded(turned.arg)
    if p.op != "softmax" or turned.attrs[-1] - p.rank != p.attrs[0]:
        return None
    z = _permuted(a, p.arg, turned.attrs)
    return logic.softmax(a, z, -1, *p.attrs[1:])


def _beside_sink(a: Algebra, p: Value) -> Value | None:
    """The first of softmax([z, sink]) for exp(z) / (Σ exp(z) + exp(sink)), all less one number for each row or not."""
    for exp, inverse in (p.args, p.args[::-1]):
        total = inverse.arg if inverse.op == "power" and inverse.attrs == (-1.0,) else inverse
        if exp.op != "exp" or total is inverse or total.op != "add" or not isinstance(exp.shape[-1], int):
            continue
        for summed, other in (total.args, total.args[::-1]):
            if summed is a.sum(exp, (-1,)) and other.op == "exp" and other.shape[-1:] == (1,):
                z, sink = _less_the_same(exp.arg, other.arg)
                joined = a.cat([z, a.expand(sink, (*z.shape[:-1], 1))], -1)
                weights = logic.softmax(a, joined, -1, "nan", safe=False)
                return a.cut(weights, -1, 0, exp.shape[-1])
    return None


def _hidden_twice(a: Algebra, p: Value) -> Value | None:
    """Softmax of scores that are -inf where a key is hidden, 0 for rows of them, for weights that are 0 there as well.

    None where something else may hide a key: of a row in which all are hidden by one or the other, plain attention
    shares the weights among them before those of one are made 0.
    """
    condition, *sides = p.args
    zero = [each.op == "full" and each.attrs[0] == 0 for each in sides]
    weights = _unrounded(sides[zero.index(False)]) if zero.count(True) == 1 else p
    scores = _unrounded(weights.arg) if weights.op == "softmax" and weights.attrs[0] == -1 else p
    if scores.op != "where" or scores is p or scores.args[0] is not condition:
        return None
    fill, plain = scores.args[1:] if zero[0] else scores.args[:0:-1]
    if fill.op != "full" or not fill.attrs[0] <= MASKED or not all(map(_hides_no_key, plain.sources(_of_scores))):
        return None
    lowest = logic.constant(a, -math.inf, fill.shape, fill.dtype)
    chosen = (condition, lowest, plain) if zero[0] else (condition, plain, lowest)
    hidden = a.cast(a.make("where", chosen, (), scores.shape, scores.dtype), weights.dtype)
    return a.cast(logic.softmax(a, hidden, -1, "zero", weights.attrs[2]), p.dtype)


def _of_scores(x: Value) -> Sequence[Value]:
    """What scores are made of, down to products: not where they are taken, nor a number by which all are multiplied."""
    if x.op == "mul":
        return [each for each in x.args if each.shape != ()]
    return () if x.op == "matmul" else x.args[:1] if x.op in _TAKING else x.args


def _hides_no_key(x: Value) -> bool:
    """Whether a step of scores, or a number in them, leaves every key to be seen."""
    return x.attrs[0] > MASKED if x.op == "full" else x.op in _SEEING


def _unrounded(x: Value) -> Value:
    """What is rounded to another dtype of floats, before it is."""
    while is_rounding(x):
        x = x.arg
    return x


def _less_the_same(z: Value, sink: Value) -> tuple[Value, Value]:
    """Both before the same number of each row was subtracted from them; themselves where none was."""
    for whole, less in differences(z):
        minus = [each for each in sink.args if each.op == "scale" and each.attrs == (-1.0,) and each.arg is less]
        if sink.op == "add" and minus and not may_be_infinite_beside_numbers(less):
            return whole, sink.args[1] if sink.args[0] is minus[0] else sink.args[0]
    return z, sink


_TAKING = ("take", "index")
_SEEING = ("matmul", *PLAIN, *_TAKING, "mul", "add", "slice", "narrow", "cat", "expand")
"""Ops of scores, and of a bias that is computed from the queries, which hide no key."""

_REWRITTEN = {"permute": _of_columns, "mul": _beside_sink, "where": _hidden_twice}
"""Of weights, ops that are read as another value."""


def _turned(a: Algebra, softmax: Value, walk: Scores) -> tuple[Value, tuple[int, ...]]:
    """The softmax of scores whose rows stand in the order of the product, and the order in which they stood."""
    scores = scores_of(a, walk, softmax.arg)
    if scores.product is None:
        return softmax, ()
    rows = arrangement(scores.product.shape[:-1], scores.steps)
    behind = _heads_behind(softmax, scores.product, scores.terms)
    back = _HEADS_FIRST[softmax.rank] if behind else rows and _places(rows, scores.product)
    if back is None or back == tuple(range(len(back))):
        return softmax, ()
    z = _permuted(a, softmax.arg, (*back, softmax.rank - 1))
    order = tuple(back.index(place) for place in range(len(back)))
    return logic.softmax(a, z, *softmax.attrs), order


_HEADS_FIRST = {4: (0, 2, 1), 3: (1, 0)}
"""How rows [B, S, N], or [S, N] of one sequence, are arranged with heads before positions, by the rank of scores."""


def _heads_behind(softmax: Value, product: Value, terms: Sequence[Term]) -> bool:
    """Whether rows have heads behind positions: all share the keys, and masks depend on positions alone."""
    rank = softmax.rank
    if rank not in _HEADS_FIRST or prod(product.args[1].shape[rank - 3 : -2]) != 1:
        return False
    masks = [(1,) * (rank - each.mask.rank) + each.mask.shape for each in terms]
    alike = bool(masks) and softmax.shape[-2] != 1 and all(shape[-2] == 1 for shape in masks)
    moving = any(shape[-3] != 1 for shape in masks)
    return alike and (moving or (rank == 4 and softmax.shape[-3] == 1))


def _places(rows: Arrangement, product: Value) -> tuple[int, ...] | None:
    """Where the dims of a product stand among the rows of its softmax, those of size 1 in their order.

    Rows that a reshape alone has moved stay where they are, unless queries and the heads of keys have changed places.
    """
    before, after = (
        [tuple(e for e in run if rows.sizes[e] != 1) for run in runs] for runs in (rows.before, rows.after)
    )
    if sorted(before) != sorted(after):
        return None
    free = list(range(len(after)))
    places = tuple(free.pop(next(n for n, place in enumerate(free) if after[place] == run)) for run in before)
    keys = (*(1,) * (len(before) + 1 - product.args[1].rank), *product.args[1].shape[:-2])
    last = places.index(len(before) - 1)
    moved = sorted(rows.before) == sorted(rows.after) or any(size != 1 for size in keys[last : last + 1])
    return places if moved else None


def _permuted(a: Algebra, z: Value, order: Sequence[int]) -> Value:
    """`z` permuted, below all that is done to single scores."""
    if z.op in ("cast", "scale", "add", "where", "cat", "mul", "clip"):
        whole = [a.reshape(each, (*(1,) * (len(order) - each.rank), *each.shape)) for each in z.args]
        args = [each if not each.shape else _permuted(a, x, order) for each, x in zip(z.args, whole, strict=True)]
        return a.make(z.op, args, z.attrs, tuple(z.shape[axis] for axis in order), z.dtype)
    return a.permute(z, order)
