"""Weights: the walk from P in P v, the factor of the values, down to the softmax, with rows in the order of q kᵀ.

Weights may be grouped by key heads, permuted, cast, sliced from a softmax with a sink, or multiplied by 0 for hidden
keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from fusion.analysis.dtypes import is_rounding, unrounded
from fusion.analysis.equal_rows import counted, share
from fusion.analysis.row_layout import Arrangement, arrangement, row_step
from fusion.graph import Algebra, Value, comparisons
from patterns.attention.core.empty_rows import Empty
from patterns.attention.core.exponential_weights import shared
from patterns.attention.core.scores import PLAIN, Scores, scores_of, truth_of
from patterns.attention.masks.mask_terms import Term
from patterns.attention.masks.visible import MASKED


@dataclass(frozen=True)
class Weights:
    """The weights of an attention.

    Attributes:
        softmax: the softmax over keys, and over a sink as the last one.
        rows: the layout of rows from the softmax to the product with values.
        cut: True if the last weights, those of a sink, are sliced off.
    """

    softmax: Value
    rows: Arrangement
    cut: bool


def empty_rows(weights: Weights, scores: Scores) -> Empty:
    """Return the behaviour of the softmax of `weights` over `scores` on rows without a key."""
    return Empty(weights.softmax, scores.shifts, scores.sink is not None)


def dropped(p: Value) -> bool:
    """Return True if `p`, the factor of the values, is a softmax after dropout."""
    while p.op in ("cast", "reshape", "permute", "getitem") or (p.op.endswith("getitem>") and p.args):
        p = p.arg
    return "dropout" in p.op and any(each.op == "softmax" for each in p.args)


def weights_of(a: Algebra, p: Value, walk: Scores = Scores()) -> Weights | None:
    """Read `p`, the left factor of the product with values, as weights of a softmax; None if it is anything else.

    `walk` holds the products that are not to be taken for q kᵀ.
    """
    steps, cut = (), False
    while p.op != "softmax":
        step = row_step(p)
        if step is not None:
            steps = (step, *steps)
        elif p.op in ("slice", "narrow") and p.attrs[:2] == (p.rank - 1, 0) and p.attrs[3:] in ((), (1,)):
            cut = True
        elif p.op in _REWRITTEN:
            rewritten = _REWRITTEN[p.op](a, p, walk)
            if rewritten is None:
                return None
            p = rewritten
            continue
        elif not is_rounding(p):
            return None
        p = p.arg
    p, order = _in_product_order(a, p, walk)
    steps = (("permute", order), *steps) if order else steps
    rows = arrangement(p.shape[:-1], steps)
    return None if rows is None else Weights(p, rows, cut)


def _transposed_softmax(a: Algebra, permuted: Value, walk: Scores) -> Value | None:
    """Rewrite `permuted`, the transpose of softmax(z) over columns, to softmax(zᵀ) over rows; None for others."""
    p = unrounded(permuted.arg)
    if p.op != "softmax" or permuted.attrs[-1] - p.rank != p.attrs[0]:
        return None
    z = _permuted(a, p.arg, permuted.attrs)
    return a.softmax(z, -1, *p.attrs[1:])


def _multiplied(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite `p`, weights times one number for each row, or times a mask of 0 and 1, to a softmax; None for others."""
    for weights, factor in p.operands():
        seen = truth_of(a, factor)
        if seen is not None:
            hidden = _hidden_below(a, comparisons.negated(a, seen), weights, walk)
            return hidden and a.cast(a.softmax(hidden.scores, -1, hidden.times_zero, hidden.less), p.dtype)
    return shared(a, p, walk)


def _zeroed(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite `p` = where(gone, 0, weights) to a softmax over scores that are -inf where `gone`; None for others."""
    condition, *sides = p.args
    zero = [each.op == "full" and each.attrs[0] == 0 for each in sides]
    if zero.count(True) != 1:
        return None
    gone = condition if zero[0] else comparisons.negated(a, condition)
    hidden = _hidden_below(a, gone, sides[zero.index(False)], walk)
    return hidden and a.cast(a.softmax(hidden.scores, -1, "zero", hidden.less), p.dtype)


def _after_first_sink(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite softmax([sink, scores])[.., 1:] to softmax([scores, sink])[.., :-1]; None for other slices."""
    weights = unrounded(p.arg)
    pieces = weights.arg.args if weights.op == "softmax" and weights.arg.op == "cat" else ()
    last = p.rank - 1
    alone = len(pieces) == 2 and pieces[0].shape[-1] == 1 and (weights.attrs[0], weights.arg.attrs) == (-1, (last,))
    if not alone or p.attrs != (last, 1, p.arg.shape[-1], 1):
        return None
    keys: Any = p.shape[-1]
    return a.cast(a.cut(a.softmax(a.cat(pieces[::-1], -1), *weights.attrs), -1, 0, keys), p.dtype)


class _Hidden(NamedTuple):
    """Scores of a softmax whose weights are set to 0 for hidden keys.

    Attributes:
        scores: the scores with -inf for hidden keys.
        less: what the softmax subtracts from each row, such as "greatest".
        times_zero: the result, "zero" or "nan", of the weights of a row without keys times 0.
    """

    scores: Value
    less: str
    times_zero: str


def _hidden_below(a: Algebra, gone: Value, p: Value, walk: Scores) -> _Hidden | None:
    """Read weights `p`, which are set to 0 where `gone`, as a softmax over scores = where(hidden, low number, ..).

    `gone` must hold only at hidden scores, or in rows that are hidden as a whole. None if it does not, or if an op
    below may hide another key: in a row where each key is hidden by one of the two, the model gives all keys a weight
    before those of `gone` become 0, and masked scores would not.
    """
    softmax = _softmax_below(a, p, walk)
    scores = None if softmax is None else unrounded(softmax.arg)
    if softmax is None or scores is None or scores.op != "where" or not comparisons.hides(a, gone, scores, MASKED):
        return None
    place = next(place for place in (1, 2) if scores.args[place].op == "full" and scores.args[place].attrs[0] <= MASKED)
    if not all(map(_hides_no_key, scores.args[3 - place].sources(_score_arguments))):
        return None
    fill, infinite = scores.args[place].attrs[0], comparisons.constant(a, -math.inf, (), scores.dtype)
    args = [infinite if at == place else each for at, each in enumerate(scores.args)]
    hidden = a.cast(a.make("where", args, (), scores.shape, scores.dtype), softmax.dtype)
    finite = math.isfinite(share(softmax, fill, counted(softmax.shape[-1])))
    return _Hidden(hidden, softmax.attrs[2], "zero" if finite else "nan")


def _softmax_below(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Return the softmax over keys of which `p` is a cast, or another spelling that `shared` knows; None for others."""
    p = unrounded(p)
    softmax = p if p.op == "softmax" else shared(a, p, walk) if p.op in ("mul", "exp") else None
    return softmax if softmax is not None and softmax.op == "softmax" and softmax.attrs[0] == -1 else None


def _score_arguments(x: Value) -> Sequence[Value]:
    """Return the arguments of `x` that contain scores, down to matmuls: no indices, and no factors of one number."""
    if x.op == "mul":
        return [each for each in x.args if each.shape != ()]
    return () if x.op == "matmul" else x.args[:1] if x.op in _TAKING else x.args


def _hides_no_key(x: Value) -> bool:
    """Return True if `x`, an op on scores or a constant among them, hides no key."""
    return x.attrs[0] > MASKED if x.op == "full" else x.op in _SEEING


_TAKING = ("take", "index")
_SEEING = ("matmul", *PLAIN, *_TAKING, "mul", "add", "slice", "narrow", "cat", "expand")
"""Ops of scores, and of a bias that is computed from the queries, which hide no key."""

_REWRITTEN = {
    "permute": _transposed_softmax, "mul": _multiplied, "exp": shared, "where": _zeroed, "slice": _after_first_sink,
}  # fmt: skip
"""Op -> rewriting of weights with this op to other weights."""


def _in_product_order(a: Algebra, softmax: Value, walk: Scores) -> tuple[Value, tuple[int, ...]]:
    """Permute the rows of `softmax` to the order that they have in q kᵀ.

    Returns:
        The permuted softmax, and the permutation of rows that restores `softmax`. `softmax` and () if the order is the
        same, or if q kᵀ is not found or is broadcast.
    """
    scores = scores_of(a, walk, softmax.arg)
    if scores.product is None:
        return softmax, ()
    rows = arrangement(scores.product.shape[:-1], scores.steps)
    behind = _heads_behind(softmax, scores.product, scores.terms)
    back = _HEADS_FIRST[softmax.rank] if behind else rows and _places(rows, scores.product)
    if back is None or len(back) != softmax.rank - 1 or back == tuple(range(len(back))):
        return softmax, ()
    z = _permuted(a, softmax.arg, (*back, softmax.rank - 1))
    order = tuple(back.index(place) for place in range(len(back)))
    return a.softmax(z, *softmax.attrs), order


_HEADS_FIRST = {4: (0, 2, 1), 3: (1, 0)}
"""Rank of the scores -> permutation of rows [B, S, N], or [S, N] of one sequence, to heads before positions."""


def _heads_behind(softmax: Value, product: Value, terms: Sequence[Term]) -> bool:
    """Return True if the rows of `softmax` are [.., S, N], queries before heads, rather than [.., N, S].

    That is so if all of these dims share the keys, and the masks `terms` differ along the first, not along the second.
    """
    rank = softmax.rank
    if rank not in _HEADS_FIRST or prod(product.args[1].shape[rank - 3 : -2]) != 1:
        return False
    masks = [(1,) * (rank - each.mask.rank) + each.mask.shape for each in terms]
    alike = bool(masks) and softmax.shape[-2] != 1 and all(shape[-2] == 1 for shape in masks)
    moving = any(shape[-3] != 1 for shape in masks)
    return alike and (moving or (rank == 4 and softmax.shape[-3] == 1))


def _places(rows: Arrangement, product: Value) -> tuple[int, ...] | None:
    """Return for each dim of rows of q kᵀ its index among the dims of rows of the softmax.

    None if `rows`, the layout between the two, joins or splits dims; or if only dims of size 1 moved, unless the
    queries are at an index at which keys have several heads.
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
    """Permute scores `z` by `order`, moving the permute below elementwise ops and concatenations."""
    if z.op in ("cast", "scale", "add", "where", "cat", "mul", "clip"):
        padded = [a.reshape(each, (*(1,) * (len(order) - each.rank), *each.shape)) for each in z.args]
        args = [each if not each.shape else _permuted(a, x, order) for each, x in zip(z.args, padded, strict=True)]
        return a.make(z.op, args, z.attrs, tuple(z.shape[axis] for axis in order), z.dtype)
    return a.permute(z, order)
