"""Weights: from what multiplies the values down to the softmax, whose rows stand in the order of the scores' product.

They may be grouped by key heads, permuted, cast, cut from a softmax with a sink, or 0 where the scores are hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.equal_rows import counted, share
from fusion.analysis.row_layout import Arrangement, arrangement, row_step
from fusion.graph import Algebra, Value, logic
from patterns.attention.core.empty_rows import Empty
from patterns.attention.core.scores import PLAIN, Scores, scores_of, truth_of
from patterns.attention.core.shares import shared
from patterns.attention.masks.mask_terms import Term
from patterns.attention.masks.visible import MASKED


@dataclass(frozen=True)
class Weights:
    """softmax(..), how its rows are arranged where they multiply v, and whether a sink is cut off."""

    softmax: Value
    rows: Arrangement
    cut: bool


def empty_rows(weights: Weights, scores: Scores) -> Empty:
    """Read what the softmax makes of a row without a key."""
    return Empty(weights.softmax, scores.shifts, scores.sink is not None)


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
            whole = _REWRITTEN[p.op](a, p, walk)
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


def _of_columns(a: Algebra, turned: Value, walk: Scores) -> Value | None:
    """softmax(zᵀ) over rows for the transpose of a softmax over columns; None for others."""
    p = _unrounded(turned.arg)
    if p.op != "softmax" or turned.attrs[-1] - p.rank != p.attrs[0]:
        return None
    z = _permuted(a, p.arg, turned.attrs)
    return a.softmax(z, -1, *p.attrs[1:])


def _of_product(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite weights times numbers of each row, or times 0 where a key is hidden and 1 elsewhere."""
    for weights, factor in (p.args, p.args[::-1]):
        seen = truth_of(a, factor)
        if seen is not None:
            hidden = _hidden_below(a, logic.negated(a, seen), weights, walk)
            return hidden and a.cast(a.softmax(hidden.scores, -1, hidden.times_zero, hidden.less), p.dtype)
    return shared(a, p, walk)


def _hidden_twice(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite weights that are replaced by 0 where a key, or each key of a query, is hidden."""
    condition, *sides = p.args
    zero = [each.op == "full" and each.attrs[0] == 0 for each in sides]
    if zero.count(True) != 1:
        return None
    gone = condition if zero[0] else logic.negated(a, condition)
    hidden = _hidden_below(a, gone, sides[zero.index(False)], walk)
    return hidden and a.cast(a.softmax(hidden.scores, -1, "zero", hidden.less), p.dtype)


def _behind_first(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite weights behind that of a sink which stands first as those before one that stands last."""
    whole = _unrounded(p.arg)
    pieces = whole.arg.args if whole.op == "softmax" and whole.arg.op == "cat" else ()
    last = p.rank - 1
    alone = len(pieces) == 2 and pieces[0].shape[-1] == 1 and (whole.attrs[0], whole.arg.attrs) == (-1, (last,))
    if not alone or p.attrs != (last, 1, p.arg.shape[-1], 1):
        return None
    keys: Any = p.shape[-1]
    return a.cast(a.cut(a.softmax(a.cat(pieces[::-1], -1), *whole.attrs), -1, 0, keys), p.dtype)


class _Hidden(NamedTuple):
    """Scores that are -inf where a key is hidden, what a softmax subtracts from them, and its weights times 0."""

    scores: Value
    less: str
    times_zero: str


def _hidden_below(a: Algebra, gone: Value, p: Value, walk: Scores) -> _Hidden | None:
    """Read weights of scores that are replaced by a low number where `gone` holds, or in whole rows of it.

    None where something else may hide a key: of a row in which all are hidden by one or the other, plain attention
    shares the weights among them before those of one are made 0.
    """
    softmax = _softmax_below(a, p, walk)
    scores = None if softmax is None else _unrounded(softmax.arg)
    if softmax is None or scores is None or scores.op != "where" or not logic.hides(a, gone, scores, MASKED):
        return None
    place = next(place for place in (1, 2) if scores.args[place].op == "full" and scores.args[place].attrs[0] <= MASKED)
    if not all(map(_hides_no_key, scores.args[3 - place].sources(_of_scores))):
        return None
    fill, infinite = scores.args[place].attrs[0], logic.constant(a, -math.inf, (), scores.dtype)
    args = [infinite if at == place else each for at, each in enumerate(scores.args)]
    hidden = a.cast(a.make("where", args, (), scores.shape, scores.dtype), softmax.dtype)
    finite = math.isfinite(share(softmax, fill, counted(softmax.shape[-1])))
    return _Hidden(hidden, softmax.attrs[2], "zero" if finite else "nan")


def _softmax_below(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Return the softmax over keys that weights are, perhaps rounded; None for any other."""
    p = _unrounded(p)
    found = p if p.op == "softmax" else shared(a, p, walk) if p.op in ("mul", "exp") else None
    return found if found is not None and found.op == "softmax" and found.attrs[0] == -1 else None


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


_TAKING = ("take", "index")
_SEEING = ("matmul", *PLAIN, *_TAKING, "mul", "add", "slice", "narrow", "cat", "expand")
"""Ops of scores, and of a bias that is computed from the queries, which hide no key."""

_REWRITTEN = {"permute": _of_columns, "mul": _of_product, "exp": shared, "where": _hidden_twice, "slice": _behind_first}
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
    return a.softmax(z, *softmax.attrs), order


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
