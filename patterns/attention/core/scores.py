"""Scores: from the argument of the softmax down to the product of queries and keys.

Factors may stand on them; masks may be added, chosen or filled in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch

from fusion.analysis import factored_products
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.logarithms import differences, log_sum
from fusion.analysis.rounding import is_float
from fusion.analysis.row_layout import Step, arranged, broadcast_arranged, row_step
from fusion.graph import Algebra, Value, logic
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof import must, proof, proven
from patterns.attention.core.addends import addends_of, computed_from, product_in
from patterns.attention.core.empty_rows import Shift
from patterns.attention.masks.mask_terms import Term, mask_on
from patterns.attention.masks.visible import MASKED
from patterns.attention.reasons.blame import passed_in

PLAIN = ("cast", "scale", "reshape", "permute")
"""What scores go through that nothing has hidden or capped yet."""
_UNEVEN = "the scores are scaled by a tensor that is not the same for all keys"
_OF_FLOATS = "; a mask of floats that is passed in is not known to hold 0 and 1 alone, as one of booleans is"
SWALLOWED = (
    "scores: what is subtracted from each row is computed from masked scores and may be the number that hides a key, "
    "beside which the others are lost; npu_fused_infer_attention_score subtracts the greatest; write "
    "scores - scores.amax(-1, keepdim=True)"
)
BIASED = "what is added to the scores is computed from them, and no mask"


@dataclass(frozen=True)
class Scores:
    """scale · factors · product, arranged by `steps`, masked by `terms`, with a sink; `odd` says what else was met.

    `factors` [*rows, 1] are as the rows stand in the softmax, or of one number. `shifts` are added to rows, which a
    softmax does not see, the last one first. `at`: what is odd. `biases`: products that are added to that of queries
    and keys, as a bias of pairs is. `floor`: behind the masks lower scores are raised to it. `overflow`: from it on,
    lower scores that are met below are -inf in a dtype to which they are cast.
    """

    product: Value | None = None
    scale: float = 1.0
    factors: tuple[Value, ...] = ()
    steps: tuple[Step, ...] = ()
    terms: tuple[Term, ...] = ()
    sink: Value | None = None
    odd: str = ""
    at: tuple[Value, ...] = ()
    shifts: tuple[Shift, ...] = ()
    biases: frozenset[Value] = frozenset()
    floor: float = -math.inf
    overflow: float = -math.inf


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
                whole = _of_keys_first(a, z) or _of_split_keys(a, z, found.biases)
                return _split(found, z) if whole is None else scores_of(a, found, whole)
            return scores_of(a, replace(found, steps=(step, *found.steps)), z.arg)
        case "scale":
            return scores_of(a, replace(found, scale=found.scale * z.attrs[0]), z.arg)
        case "cat" if z.attrs == (z.rank - 1,) and len(z.args) == 2 and z.args[1].shape[-1] == 1:
            if found.scale != 1 or found.factors or found.terms or found.steps or found.sink is not None:
                return replace(found, odd="a sink is scaled or masked like a score", at=(z,))
            return _beside_sink(a, found, *z.args)
        case "add" | "where":
            return _masked(a, found, z)
        case "clip" if product_in(z.arg, found.biases) is not None:
            return _clamped(a, found, z)
        case "mean" if (one := _of_single_rows(a, z)) is not None:
            return scores_of(a, replace(found, scale=found.scale / z.arg.shape[-1]), one)
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


@proof
def _of_single_rows(a: Algebra, z: Value) -> Value:
    """q kᵀ of one query and one key, which is the sum of their elementwise product, for the mean of that."""
    pairs = z.arg.below("reshape")
    must(z.attrs == (-1,) and z.shape[-2:] == (1, 1) and pairs.op == "mul")
    q, k = pairs.args if pairs is z.arg else (a.reshape(each, z.arg.shape) for each in _alike(pairs))
    must(q.shape[-2:] == k.shape[-2:] == z.arg.shape[-2:])
    return proven(matmul(a, q, swapped(a, k)))


def _alike(product: Value) -> Sequence[Value]:
    """Its factors, of which none is broadcast."""
    must(all(each.shape == product.shape for each in product.args))
    return product.args


def _stood_split(z: Value, biases: Collection[Value]) -> bool:
    """Whether keys of scores stood in several dims, as rows and columns, before they were joined again."""
    product = product_in(z, biases) if z.op == "reshape" else None
    return product is not None and (product.shape[-1], prod(product.shape)) == (z.shape[-1], prod(z.shape))


def _split(found: Scores, z: Value) -> Scores:
    """Why such scores are none, where more was done to them than to add something."""
    said = "scores are masked while their keys stand in several dims, as rows and columns"
    return replace(found, odd=said, at=(z,)) if _stood_split(z, found.biases) else found


@proof
def _of_split_keys(a: Algebra, z: Value, biases: Collection[Value]) -> Value | None:
    """Scores with all that was added to them while keys stood in several dims, added behind that; None for others."""
    must(_stood_split(z, biases))
    scores, beside = z.arg, list[Value]()
    while scores.op == "add":
        (scores, below), (other, _) = addends_of(scores, biases)
        must(below is not None and scores.shape == z.arg.shape)
        beside.insert(0, other)
    must(beside)
    total = reduce(lambda x, y: proven(a.add(x, y)), beside)
    return a.add(a.reshape(scores, z.shape), a.reshape(a.expand(total, z.arg.shape), z.shape))


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
            return replace(found, odd=_UNEVEN + (_OF_FLOATS if passed_in(factor) else ""), at=(z,))
        if computed_from(factor, product):
            return replace(found, odd="the scores are scaled by what is computed from them", at=(z,))
        if found.steps and prod(factor.shape) != 1:
            factor = arranged(a, a.expand(factor, (*z.shape[:-1], 1)), found.steps)
        return scores_of(a, replace(found, factors=(*found.factors, factor)), scores)
    return found


def _masked(a: Algebra, found: Scores, z: Value) -> Scores:
    """Below a mask that is added or filled in, or a number of each row; or a sum of products, as one product."""
    z = _kept_by_factor(a, z) or z
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
        if of_rows and computed_from(term.mask, product) and found.sink is None and not found.terms:
            return _shifted(a, found, Shift(term.mask, scores, found.scale))
    if isinstance(term, Term) and computed_from(term.mask, product):
        term = BIASED if term.how == "add" else "which keys are seen depends on the scores themselves"
    elif found.factors:
        term = "the scores are scaled by a tensor after they are masked: what it makes of a hidden one is not known"
    elif found.steps and isinstance(term, Term):
        term = replace(term, mask=broadcast_arranged(a, term.mask, z.shape, found.steps))
    if isinstance(term, str):
        return replace(found, odd=term, at=(z,))
    return scores_of(a, replace(found, terms=(*found.terms, term)), scores)


def _kept_by_factor(a: Algebra, z: Value) -> Value | None:
    """s where b is 1, else a number, for s · b + number · (1 - b), as GPT-2 has it; None for others.

    Nor for scores that were hidden before: 0 times -inf is no number.
    """
    for kept, other in (z.args, z.args[::-1]) if z.op == "add" else ():
        for scores, factor in (kept.args, kept.args[::-1]) if kept.op == "mul" else ():
            seen, number, rest = truth_of(a, factor), 1.0, other
            inverse = a.shift(a.scale(factor, -1), 1)
            while rest.op == "scale" and rest is not inverse:
                rest, number = rest.arg, number * rest.attrs[0]
            if seen is not None and rest is inverse and _is_of_products(scores):
                return logic.where(a, seen, scores, logic.constant(a, number, (), z.dtype), z.dtype)
    return None


def _is_of_products(scores: Value) -> bool:
    """Whether scores are a product, or a sum of some, of which nothing is hidden yet."""
    below = scores.below(*PLAIN)
    return below.op == "matmul" or (below.op == "add" and all(map(_is_of_products, below.args)))


def truth_of(a: Algebra, x: Value) -> Value | None:
    """Return the booleans of which `x` holds 1 for True and 0 for False; None for any other."""
    if x.op in ("reshape", "permute", "expand", "slice"):
        seen = truth_of(a, x.arg)
        return None if seen is None else a.seen_as(seen, x)
    if x.op == "cast":
        return x.arg if x.arg.dtype is torch.bool else truth_of(a, x.arg)
    if x.op == "mul":
        both = [each if each.dtype is torch.bool else truth_of(a, each) for each in x.args]
        return logic.pointwise(a, "and", [proven(each) for each in both], (), torch.bool) if None not in both else None
    chosen = x.op == "where" and x.arg.shape == x.shape and [each.op for each in x.args[1:]] == ["full", "full"]
    return x.arg if chosen and [each.attrs[0] for each in x.args[1:]] == [1, 0] else None


def _beside_sink(a: Algebra, found: Scores, scores: Value, sink: Value) -> Scores:
    """Walk down beside a sink, below the same number of each row that is subtracted from scores and sink."""
    for whole, less in differences(scores):
        minus = next(each for each in scores.args if each.op == "scale" and each.arg is less)
        if sink.op == "add" and minus in sink.args:
            own = sink.args[1] if sink.args[0] is minus else sink.args[0]
            return _shifted(a, replace(found, sink=own), Shift(minus, whole, 1.0, own))
    return scores_of(a, replace(found, sink=sink), scores)


def _shifted(a: Algebra, found: Scores, shift: Shift) -> Scores:
    """Walk below a number of each row, of which a softmax sees nothing unless the number swallows the scores.

    One that hides a key does: -1e9 may be subtracted only where it is the greatest score of the row.
    """
    below = scores_of(a, replace(found, shifts=(*found.shifts, shift)), shift.scores)
    swallowed = swallows(shift.by, shift.scores, below)
    return replace(found, odd=SWALLOWED, at=(shift.by,)) if swallowed else below


def swallows(by: Value, scores: Value, below: Scores) -> bool:
    """True if `by`, a number for each row of `scores`, may be one that hides a key although others are seen."""
    same = _unscaled(scores)
    read = list(by.sources(lambda x: _decides(x, same)))
    low = any(each.op == "full" and abs(each.attrs[0]) >= -MASKED for each in read)
    return low or (bool(below.terms) and below.product in read)


def _unscaled(x: Value) -> Value:
    """Return `x` below views, casts and positive factors, which change no order."""
    while x.op in PLAIN and (x.op != "scale" or x.attrs[0] > 0):
        x = x.arg
    return x


def _decides(x: Value, scores: Value) -> Sequence[Value]:
    """Return what decides about the magnitude of `x`: nothing in `scores` where those that are seen outweigh others."""
    reduces = (x.op == "greatest" and -1 in x.attrs) or (x.op, x.attrs) == ("largest", (1,))
    total = log_sum(x)
    rows = x.arg if reduces else total and total.x
    pieces = () if rows is None else rows.args if rows.op == "cat" else (rows,)
    if any(_unscaled(each) is scores for each in pieces):
        return [each for each in pieces if _unscaled(each) is not scores]
    exps = x.arg.below("cast") if (x.op, x.attrs) == ("mean", (-1,)) else x
    if exps.op == "exp" and exps is not x:
        below = [(exps.arg, None), *differences(exps.arg)]
        return next((() if by is None else (by,) for z, by in below if _unscaled(z) is scores), x.args)
    return x.args[1:] if x.op == "where" else x.args


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
