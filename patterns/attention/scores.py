"""Scores and weights: from what multiplies the values down to the product of queries and keys.

The weights may be grouped by key heads, permuted, cast or cut from a softmax with a sink; factors may stand on the
scores; masks may be added, chosen or filled in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from fusion.analysis import factored_products
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.infinities import may_be_infinite_beside_numbers
from fusion.analysis.logarithms import differences
from fusion.analysis.rounding import exact, is_float
from fusion.analysis.row_layout import Arrangement, Step, arranged, arrangement, broadcast_arranged, row_step
from fusion.graph import Algebra, Value, logic
from fusion.graph.contractions import matmul, swapped
from patterns.attention.addends import addends_of, computed_from, product_in
from patterns.attention.masks import MASKED, Empty, Term, mask_on

_SPLIT = "something is added to the scores while their keys stand in several dims, as rows and columns do"
BIASED = "what is added to the scores is computed from them, and no mask"


@dataclass(frozen=True)
class Weights:
    """softmax(..), how its rows are arranged where they multiply v, and whether a sink is cut off."""

    softmax: Value
    rows: Arrangement
    cut: bool


@dataclass(frozen=True)
class Scores:
    """scale · factors · product, arranged by `steps`, masked by `terms`, with a sink; `odd` says what else was met.

    `factors` [*rows, 1] are as the rows stand in the softmax, or of one number. `shifted`: something was taken from
    whole rows, which a softmax does not see; `safe`: the greatest of each was. `at`: what is odd. `biases`: products
    that are added to that of queries and keys, as a bias of pairs is. `floor`: behind the masks lower scores are raised
    to it. `overflow`: from it on, lower scores that are met below are -inf in a dtype to which they are cast.
    """

    product: Value | None = None
    scale: float = 1.0
    factors: tuple[Value, ...] = ()
    steps: tuple[Step, ...] = ()
    terms: tuple[Term, ...] = ()
    sink: Value | None = None
    odd: str = ""
    at: tuple[Value, ...] = ()
    shifted: bool = False
    safe: bool = False
    biases: frozenset[Value] = frozenset()
    floor: float = -math.inf
    overflow: float = -math.inf


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
        elif p.op == "slice" and p.attrs[0] == p.rank - 1 and p.attrs[1] == 0 and p.attrs[3] == 1:
            cut = True
        elif p.op in ("permute", "mul"):
            whole = _of_columns(a, p) if p.op == "permute" else _beside_sink(a, p)
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
    p = turned.arg
    while is_rounding(p):
        p = p.arg
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


def _less_the_same(z: Value, sink: Value) -> tuple[Value, Value]:
    """Both before the same number of each row was subtracted from them; themselves where none was."""
    for whole, less in differences(z):
        minus = [each for each in sink.args if each.op == "scale" and each.attrs == (-1.0,) and each.arg is less]
        if sink.op == "add" and minus and not may_be_infinite_beside_numbers(less):
            return whole, sink.args[1] if sink.args[0] is minus[0] else sink.args[0]
    return z, sink


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


# scores ------------------------------------------------------------------------------------------------------------


def scores_of(a: Algebra, found: Scores, z: Value) -> Scores:
    """Walk down from the argument of the softmax to the product of queries and keys."""
    match z.op:
        case "matmul":
            return replace(found, product=z)
        case "cast" if is_rounding(z):
            overflow = max(found.overflow, _overflow(z.dtype) * abs(found.scale))
            return scores_of(a, replace(found, overflow=overflow), z.arg)
        case "cast" if product_in(z, found.biases) is not None:
            said = f"the scores are cast from {z.arg.dtype} to {z.dtype}, which are not both floats"
            return replace(found, odd=said, at=(z,))
        case "reshape" | "permute":
            step = row_step(z)
            if step is None:
                turned = _of_keys_first(a, z)
                return _of_split_keys(found, z) if turned is None else scores_of(a, found, turned)
            return scores_of(a, replace(found, steps=(step, *found.steps)), z.arg)
        case "scale":
            return scores_of(a, replace(found, scale=found.scale * z.attrs[0]), z.arg)
        case "cat" if z.attrs == (z.rank - 1,) and len(z.args) == 2 and z.args[1].shape[-1] == 1:
            if found.scale != 1 or found.factors or found.terms or found.steps or found.sink is not None:
                return replace(found, odd="a sink is scaled or masked like a score", at=(z,))
            return scores_of(a, replace(found, sink=z.args[1]), z.arg)
        case "add" | "where":
            return _masked(a, found, z)
        case "clip" if product_in(z.arg, found.biases) is not None:
            return _clamped(a, found, z)
        case "tanh":
            return replace(found, odd="the scores are capped softly by tanh, which the operator does not do", at=(z,))
        case "mul" if _number(z.args[0]) or _number(z.args[1]):
            scores, factor = z.args if _number(z.args[1]) else z.args[::-1]
            return scores_of(a, replace(found, scale=found.scale * _number(factor)), scores)
        case "mul" if (whole := factored_products.scaled_sum(a, z)) is not None:
            return scores_of(a, found, whole)
        case "mul":
            return _multiplied(a, found, z)
        case _:
            return found


def _overflow(dtype: torch.dtype | None) -> float:
    """The negative number from which on lower ones are rounded to -inf."""
    held = torch.finfo(dtype or torch.float64)
    return -(held.max + math.ldexp(held.eps, math.frexp(held.max)[1] - 2))


def _of_keys_first(a: Algebra, z: Value) -> Value | None:
    """q kᵀ for the transpose of k qᵀ; None for others."""
    last = z.rank - 1
    if z.op != "permute" or z.arg.op != "matmul" or z.attrs[-1] != last - 1:
        return None
    product = matmul(a, *(swapped(a, each) for each in z.arg.args[::-1]))
    exchanged = (*range(last - 1), last, last - 1)
    return product and a.permute(product, [exchanged[axis] for axis in z.attrs])


def _of_split_keys(found: Scores, z: Value) -> Scores:
    """Why scores are none whose keys stood in several dims, as rows and columns, while something was added to them."""
    product = product_in(z, found.biases)
    if z.op != "reshape" or product is None or (product.shape[-1], prod(product.shape)) != (z.shape[-1], prod(z.shape)):
        return found
    return replace(found, odd=_SPLIT, at=(z,))


def _number(x: Value) -> float:
    """The number of which a tensor consists, 0 where it has others."""
    if x.op == "full":
        return float(x.attrs[0])
    if x.op in ("expand", "reshape") or (x.op == "cast" and is_float(x)):
        return _number(x.arg)
    return _number(x.arg) ** x.attrs[0] if x.op == "power" and _number(x.arg) > 0 else 0.0


def _multiplied(a: Algebra, found: Scores, z: Value) -> Scores:
    """Below a factor that is the same for all keys: queries may be multiplied by it instead."""
    for scores, factor in (z.args, z.args[::-1]):
        product = product_in(scores, found.biases)
        if product is None:
            continue
        if factor.shape[-1:] not in ((), (1,)):
            return replace(found, odd="the scores are scaled by a tensor that is not the same for all keys", at=(z,))
        if computed_from(factor, product):
            return replace(found, odd="the scores are scaled by what is computed from them", at=(z,))
        if found.steps and prod(factor.shape) != 1:
            factor = arranged(a, a.expand(factor, (*z.shape[:-1], 1)), found.steps)
        return scores_of(a, replace(found, factors=(*found.factors, factor)), scores)
    return found


def _masked(a: Algebra, found: Scores, z: Value) -> Scores:
    """Below a mask that is added or filled in, or a number of each row; or a sum of products, as one product."""
    addends = [each for each in addends_of(z, found.biases) if each[1] is not None]
    whole = factored_products.joined(a, *z.args) if z.op == "add" and len(addends) == 2 else None
    if whole is not None:
        return scores_of(a, found, whole)
    scores, product = addends[0] if addends else (z, None)
    if product is None:
        return found
    term = mask_on(z, scores, found.scale, found.overflow)
    if isinstance(term, Term) and term.how == "add":
        of_rows = term.mask.shape[-1:] == (1,) and z.shape[-1] != 1
        own = computed_from(term.mask, product) and not may_be_infinite_beside_numbers(term.mask)
        if of_rows and own and found.sink is None and not found.terms:
            safe = found.safe or _is_greatest(term.mask, scores)
            return scores_of(a, replace(found, shifted=True, safe=safe), scores)  # the same for a whole row
    if isinstance(term, Term) and computed_from(term.mask, product):
        term = BIASED if term.how == "add" else "which keys are seen depends on the scores themselves"
    elif found.factors:
        term = "the scores are scaled by a tensor after they are masked: what it makes of a hidden one is not known"
    elif found.steps and isinstance(term, Term):
        term = replace(term, mask=broadcast_arranged(a, term.mask, z.shape, found.steps))
    if isinstance(term, str):
        return replace(found, odd=term, at=(z,))
    return scores_of(a, replace(found, terms=(*found.terms, term)), scores)


def _is_greatest(less: Value, scores: Value) -> bool:
    """Whether what is taken from each row is computed from the greatest of these scores."""
    return any(each.op in ("greatest", "largest") and exact(each.arg) is exact(scores) for each in less.sources())


def _clamped(a: Algebra, found: Scores, z: Value) -> Scores:
    """Below a clamp at the least number of the dtype, or lower: of numbers it leaves all but -inf as they are."""
    low, high = z.attrs
    if z.dtype is None or high != math.inf or low > torch.finfo(z.dtype).min:
        return replace(found, odd="the scores are clamped, which the operator does not do", at=(z,))
    below = scores_of(a, found, z.arg)
    if len(below.terms) == len(found.terms):
        return below
    if found.terms or found.factors or not found.scale > 0 or low * found.scale > MASKED:
        return replace(found, odd="masked scores are clamped, and then masked once more or made small again", at=(z,))
    return replace(below, floor=low * found.scale)
