"""Scores: the walk from the argument of the softmax down to the product q kᵀ.

On the way are factors, views, masks that are added, filled in or applied by where, biases, sinks and clamps.
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
from fusion.graph import Algebra, Value, comparisons
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.core.addends import addends_of, computed_from, product_in
from patterns.attention.core.empty_rows import Shift
from patterns.attention.masks.mask_terms import Term, mask_on
from patterns.attention.masks.visible import MASKED
from patterns.attention.reasons.blame import passed_in

PLAIN = ("cast", "scale", "reshape", "permute")
"""Ops on scores that neither hide nor cap any of them."""
_UNEVEN = (
    "scores: they are multiplied by a tensor that differs among the keys; npu_fused_infer_attention_score "
    "requires a factor that all keys of a query share; multiply the keys by that tensor"
)
_OF_FLOATS = (
    "; where that tensor is a mask, pass booleans in and write torch.where(mask, scores, -inf), as floats are "
    "not known to be 0 or 1"
)
SWALLOWED = (
    "scores: what is subtracted from each row is computed from masked scores and may be the number that "
    "hides a key, beside which the others are lost; npu_fused_infer_attention_score subtracts the "
    "greatest; write scores - scores.amax(-1, keepdim=True)"
)
BIASED = (
    "bias: it is computed from the scores; npu_fused_infer_attention_score requires an addend that is known "
    "before the scores"
)


@dataclass(frozen=True)
class Scores:
    """Scores of an attention: scale · factors · product, arranged by `steps` and masked by `terms`.

    Attributes:
        product: q kᵀ; None if the walk has not reached a product.
        scale: the product of all factors that are numbers.
        factors: tensors that multiply the scores, [*rows of the softmax, 1] or of one element.
        steps: the reshapes and permutes of rows from the product to the softmax, innermost first.
        terms: the masks and biases, outermost first.
        sink: the score of a sink [*rows, 1] that is concatenated as the last key; None without one.
        reason: why the walk ended at another op than a product; "" if no reason is known.
        at: the values that `reason` is about.
        shifts: additions of one number to each row, which cancel in the softmax, outermost first.
        biases: products among the addends that are taken for biases, not for q kᵀ.
        floor: a lower bound to which masked scores are clamped.
        overflow: the threshold below which scores become -inf by a later cast to a narrower dtype.
    """

    product: Value | None = None
    scale: float = 1.0
    factors: tuple[Value, ...] = ()
    steps: tuple[Step, ...] = ()
    terms: tuple[Term, ...] = ()
    sink: Value | None = None
    reason: str = ""
    at: tuple[Value, ...] = ()
    shifts: tuple[Shift, ...] = ()
    biases: frozenset[Value] = frozenset()
    floor: float = -math.inf
    overflow: float = -math.inf


def scores_of(a: Algebra, walk: Scores, z: Value) -> Scores:
    """Walk from `z` down to q kᵀ; add each op on the way to `walk`, which describes the ops above `z`."""
    match z.op:
        case "matmul":
            return replace(walk, product=z)
        case "cast" if is_rounding(z):
            overflow = max(walk.overflow, _overflow(z.dtype) * abs(walk.scale))
            return scores_of(a, replace(walk, overflow=overflow), z.arg)
        case "cast" if product_in(z, walk.biases) is not None:
            reason = (
                f"scores: they are cast from {z.arg.dtype} to {z.dtype}; npu_fused_infer_attention_score "
                "requires scores in floats; multiply queries and keys as floats"
            )
            return replace(walk, reason=reason, at=(z,))
        case "reshape" | "permute":
            step = row_step(z)
            if step is None:
                rewritten = _queries_first(a, z) or _added_after_join(a, z, walk.biases)
                return _masked_before_join(walk, z) if rewritten is None else scores_of(a, walk, rewritten)
            return scores_of(a, replace(walk, steps=(step, *walk.steps)), z.arg)
        case "scale":
            return scores_of(a, replace(walk, scale=walk.scale * z.attrs[0]), z.arg)
        case "cat" if z.attrs == (z.rank - 1,) and len(z.args) == 2 and z.args[1].shape[-1] == 1:
            if walk.scale != 1 or walk.factors or walk.terms or walk.steps or walk.sink is not None:
                return replace(
                    walk,
                    reason=(
                        "sink: it is scaled or masked together with the scores; npu_fused_infer_attention_score_v2 "
                        "requires a sink as it is; scale and mask the scores before the sink is concatenated"
                    ),
                    at=(z,),
                )
            return _with_sink(a, walk, *z.args)
        case "add" | "where":
            return _masked(a, walk, z)
        case "clip" if product_in(z.arg, walk.biases) is not None:
            return _clamped(a, walk, z)
        case "mean" if (one := _product_of_one_row(a, z)) is not None:
            return scores_of(a, replace(walk, scale=walk.scale / z.arg.shape[-1]), one)
        case "tanh":
            return replace(
                walk,
                reason=(
                    "scores: they are capped by tanh (soft capping, logit_softcapping); "
                    "npu_fused_infer_attention_score requires scores without it, and no other operator here has it"
                ),
                at=(z,),
            )
        case "mul" if _number(z.args[0]) or _number(z.args[1]):
            scores, factor = z.args if _number(z.args[1]) else z.args[::-1]
            return scores_of(a, replace(walk, scale=walk.scale * _number(factor)), scores)
        case "mul" if (rewritten := factored_products.scaled_sum(a, z)) is not None:
            return scores_of(a, walk, rewritten)
        case "mul":
            return _multiplied(a, walk, z)
        case _:
            return walk


def _overflow(dtype: torch.dtype | None) -> float:
    """Return the negative number of which all lower ones are rounded to -inf in `dtype`."""
    limits = torch.finfo(dtype or torch.float64)
    return -(limits.max + math.ldexp(limits.eps, math.frexp(limits.max)[1] - 2))


def _queries_first(a: Algebra, z: Value) -> Value | None:
    """Rewrite `z`, a permute of k qᵀ that swaps its last dims, to a permute of q kᵀ; None for others."""
    last = z.rank - 1
    if z.op != "permute" or z.arg.op != "matmul" or z.attrs[-1] != last - 1:
        return None
    product = matmul(a, *(swapped(a, each) for each in z.arg.args[::-1]))
    exchanged = (*range(last - 1), last, last - 1)
    return product and a.permute(product, [exchanged[axis] for axis in z.attrs])


@proof
def _product_of_one_row(a: Algebra, z: Value) -> Value:
    """Rewrite `z` [.., 1, 1], the mean over lanes of the elementwise product of one query and one key, to q kᵀ.

    None if `z` is anything else. (A sum is canonicalised to a multiple of a mean.)
    """
    pairs = z.arg.below("reshape")
    must(z.attrs == (-1,) and z.shape[-2:] == (1, 1) and pairs.op == "mul")
    q, k = pairs.args if pairs is z.arg else (a.reshape(each, z.arg.shape) for each in _alike(pairs))
    must(q.shape[-2:] == k.shape[-2:] == z.arg.shape[-2:])
    return proven(matmul(a, q, swapped(a, k)))


def _alike(product: Value) -> Sequence[Value]:
    """Return the factors of the "mul" `product`; unproven if one of them is broadcast."""
    must(all(each.shape == product.shape for each in product.args))
    return product.args


def _joins_keys(z: Value, biases: Collection[Value]) -> bool:
    """Return True if `z` joins several dims of keys, such as rows and columns of an image, to the one dim of q kᵀ."""
    product = product_in(z, biases) if z.op == "reshape" else None
    return product is not None and (product.shape[-1], prod(product.shape)) == (z.shape[-1], prod(z.shape))


def _masked_before_join(walk: Scores, z: Value) -> Scores:
    """Return `walk` with a reason if `z` joins several dims of keys in which scores were masked; else `walk`."""
    reason = (
        "scores: they are masked while keys have several dims, as rows and columns of an image; "
        "npu_fused_infer_attention_score requires one dim of keys; flatten these dims before the mask"
    )
    return replace(walk, reason=reason, at=(z,)) if _joins_keys(z, walk.biases) else walk


@proof
def _added_after_join(a: Algebra, z: Value, biases: Collection[Value]) -> Value | None:
    """Move the addends of scores with several dims of keys behind `z`, which joins these dims; None for others."""
    must(_joins_keys(z, biases))
    scores, added = z.arg, list[Value]()
    while scores.op == "add":
        (scores, below), (other, _) = addends_of(scores, biases)
        must(below is not None and scores.shape == z.arg.shape)
        added.insert(0, other)
    must(added)
    total = reduce(lambda x, y: proven(a.add(x, y)), added)
    return a.add(a.reshape(scores, z.shape), a.reshape(a.expand(total, z.arg.shape), z.shape))


def _number(x: Value) -> float:
    """Return the constant that all elements of `x` are equal to; 0 if there is none."""
    if x.op == "full":
        return float(x.attrs[0])
    if x.op in ("expand", "reshape") or (x.op == "cast" and is_float(x)):
        return _number(x.arg)
    return _number(x.arg) ** x.attrs[0] if x.op == "power" and _number(x.arg) > 0 else 0.0


def _multiplied(a: Algebra, walk: Scores, z: Value) -> Scores:
    """Walk below `z`, scores times a factor that is the same for all keys, so that it can multiply the queries instead.

    Returns the walk below, or `walk` with a reason if the factor differs between keys or depends on the scores.
    """
    for scores, factor in z.operands():
        product = product_in(scores, walk.biases)
        if product is None:
            continue
        if factor.shape[-1:] not in ((), (1,)):
            return replace(walk, reason=_UNEVEN + (_OF_FLOATS if passed_in(factor) else ""), at=(z,))
        if computed_from(factor, product):
            return replace(
                walk,
                reason=(
                    "scores: they are multiplied by a tensor that is computed from them; "
                    "npu_fused_infer_attention_score requires a factor that is known before the scores"
                ),
                at=(z,),
            )
        if walk.steps and prod(factor.shape) != 1:
            factor = arranged(a, a.expand(factor, (*z.shape[:-1], 1)), walk.steps)
        return scores_of(a, replace(walk, factors=(*walk.factors, factor)), scores)
    return walk


def _masked(a: Algebra, walk: Scores, z: Value) -> Scores:
    """Walk below `z`, an add or where: a mask, a number added to each row, or a sum of two products that is one
    product.

    Returns `walk` with a reason if what is applied to the scores is none of these.
    """
    z = _masked_by_factor(a, z) or z
    addends = [each for each in addends_of(z, walk.biases) if each[1] is not None]
    joined = factored_products.joined(a, *z.args) if z.op == "add" and len(addends) == 2 else None
    if joined is not None:
        return scores_of(a, walk, joined)
    scores, product = addends[0] if addends else (z, None)
    if product is None:
        return walk
    term = mask_on(z, scores, walk.scale, walk.overflow)
    if isinstance(term, Term) and term.how == "add":
        by_row = term.mask.shape[-1:] == (1,) and z.shape[-1] != 1
        if by_row and computed_from(term.mask, product) and walk.sink is None and not walk.terms:
            return _shifted(a, walk, Shift(term.mask, scores, walk.scale))
    if isinstance(term, Term) and computed_from(term.mask, product):
        term = (
            BIASED
            if term.how == "add"
            else (
                "mask: it is computed from the scores; npu_fused_infer_attention_score requires a mask that is "
                "known before the scores"
            )
        )
    elif walk.factors:
        term = (
            "scores: they are multiplied by a tensor behind the mask, which may turn hidden ones; "
            "npu_fused_infer_attention_score requires the factor before the mask; multiply first, then mask"
        )
    elif walk.steps and isinstance(term, Term):
        term = replace(term, mask=broadcast_arranged(a, term.mask, z.shape, walk.steps))
    if isinstance(term, str):
        return replace(walk, reason=term, at=(z,))
    return scores_of(a, replace(walk, terms=(*walk.terms, term)), scores)


def _masked_by_factor(a: Algebra, z: Value) -> Value | None:
    """Rewrite `z` = s · b + number · (1 - b), as in GPT-2, to where(b, s, number); None for others.

    None as well for masked scores s, as 0 · -inf is NaN.
    """
    for masked, other in z.operands("add"):
        for scores, factor in masked.operands("mul"):
            seen, number, rest = truth_of(a, factor), 1.0, other
            inverse = a.shift(a.scale(factor, -1), 1)
            while rest.op == "scale" and rest is not inverse:
                rest, number = rest.arg, number * rest.attrs[0]
            if seen is not None and rest is inverse and _is_of_products(scores):
                return comparisons.where(a, seen, scores, comparisons.constant(a, number, (), z.dtype), z.dtype)
    return None


def _is_of_products(scores: Value) -> bool:
    """Return True if `scores` are a product, or a sum of products, without a mask."""
    below = scores.below(*PLAIN)
    return below.op == "matmul" or (below.op == "add" and all(map(_is_of_products, below.args)))


def truth_of(a: Algebra, x: Value) -> Value | None:
    """Return booleans that are True where `x` is 1 and False where it is 0; None unless `x` is made from booleans
    so.
    """
    if x.op in ("reshape", "permute", "expand", "slice"):
        seen = truth_of(a, x.arg)
        return None if seen is None else a.seen_as(seen, x)
    if x.op == "cast":
        return x.arg if x.arg.dtype is torch.bool else truth_of(a, x.arg)
    if x.op == "mul":
        both = [each if each.dtype is torch.bool else truth_of(a, each) for each in x.args]
        return (
            comparisons.pointwise(a, "and", [proven(each) for each in both], (), torch.bool)
            if None not in both
            else None
        )
    chosen = x.op == "where" and x.arg.shape == x.shape and [each.op for each in x.args[1:]] == ["full", "full"]
    return x.arg if chosen and [each.attrs[0] for each in x.args[1:]] == [1, 0] else None


def _with_sink(a: Algebra, walk: Scores, scores: Value, sink: Value) -> Scores:
    """Walk below `scores`, behind whose keys `sink` is concatenated.

    A number that is subtracted from scores and sink of each row, such as their maximum, is a shift of both.
    """
    for unshifted, less in differences(scores):
        minus = next(each for each in scores.args if each.op == "scale" and each.arg is less)
        if sink.op == "add" and minus in sink.args:
            own = sink.args[1] if sink.args[0] is minus else sink.args[0]
            return _shifted(a, replace(walk, sink=own), Shift(minus, unshifted, 1.0, own))
    return scores_of(a, replace(walk, sink=sink), scores)


def _shifted(a: Algebra, walk: Scores, shift: Shift) -> Scores:
    """Walk below `shift`, a number added to each row of scores, which cancels in the softmax.

    Returns `walk` with a reason if the scores may be lost in rounding beside the number: one that hides keys, such as
    -1e9, may be subtracted only if it is the greatest score of the row.
    """
    below = scores_of(a, replace(walk, shifts=(*walk.shifts, shift)), shift.scores)
    swallowed = swallows(shift.by, shift.scores, below)
    return replace(walk, reason=SWALLOWED, at=(shift.by,)) if swallowed else below


def swallows(by: Value, scores: Value, below: Scores) -> bool:
    """Return True if `by` [*rows, 1] may be a number that hides keys, though a key of the row is visible.

    Scores to which it is added are then lost in rounding. It may not be, if it is the maximum or log-sum-exp of
    `scores`.

    Args:
        by: the number that is added to each row.
        scores: the scores that it is added to.
        below: the walk from `scores` down to q kᵀ.
    """
    same = _unscaled(scores)
    read = list(by.sources(lambda x: _deciding(x, same)))
    low = any(each.op == "full" and abs(each.attrs[0]) >= -MASKED for each in read)
    return low or (bool(below.terms) and below.product in read)


def _unscaled(x: Value) -> Value:
    """Strip views, casts and positive factors from `x`, which leave its greatest element the greatest."""
    while x.op in PLAIN and (x.op != "scale" or x.attrs[0] > 0):
        x = x.arg
    return x


def _deciding(x: Value, scores: Value) -> Sequence[Value]:
    """Return the arguments of `x` that may make it large, for a search through `sources`.

    Left out are conditions, and `scores` themselves where `x` is their maximum, their log-sum-exp or their sum of exps:
    that is about as large as the greatest score.
    """
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


def _clamped(a: Algebra, walk: Scores, z: Value) -> Scores:
    """Walk below the clamp `z`, which may only raise scores that a mask makes -inf to the lowest number of the dtype.

    Returns `walk` with a reason if the clamp has another bound, or if ops behind the clamp mask once more.
    """
    low, high = z.attrs
    if z.dtype is None or high != math.inf or low > torch.finfo(z.dtype).min:
        return replace(
            walk,
            reason=(
                "scores: they are clamped; npu_fused_infer_attention_score requires scores as they are; leave the "
                "clamp out"
            ),
            at=(z,),
        )
    below = scores_of(a, walk, z.arg)
    if len(below.terms) == len(walk.terms):
        return below
    if walk.terms or walk.factors or not walk.scale > 0 or low * walk.scale > MASKED:
        return replace(
            walk,
            reason=(
                "scores: masked ones are clamped, and then masked or multiplied again; "
                "npu_fused_infer_attention_score requires a clamp of masked scores to be the last step before the "
                "softmax; clamp last, or leave it out"
            ),
            at=(z,),
        )
    return replace(below, floor=low * walk.scale)
