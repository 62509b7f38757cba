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
from fusion.analysis.infinities import may_be_infinite_beside_numbers
from fusion.analysis.rounding import exact, is_float
from fusion.analysis.row_layout import Step, arranged, broadcast_arranged, row_step
from fusion.graph import Algebra, Value, logic
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof import must, proof, proven
from patterns.attention.addends import addends_of, computed_from, product_in
from patterns.attention.blame import passed_in
from patterns.attention.hiding import MASKED
from patterns.attention.mask_terms import Term, mask_on

PLAIN = ("cast", "scale", "reshape", "permute")
"""What scores go through that nothing has hidden or capped yet."""
_UNEVEN = "the scores are scaled by a tensor that is not the same for all keys"
_OF_FLOATS = "; a mask of floats that is passed in is not known to hold 0 and 1 alone, as one of booleans is"
BIASED = "what is added to the scores is computed from them, and no mask"


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
            return scores_of(a, replace(found, sink=z.args[1]), z.arg)
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


def _kept_by_factor(a: Algebra, z: Value) -> Value | None:
    """s where b is 1, else a number, for s · b + number · (1 - b), as GPT-2 has it; None for others.

    Nor for scores that were hidden before: 0 times -inf is no number.
    """
    for kept, other in (z.args, z.args[::-1]) if z.op == "add" else ():
        for scores, factor in (kept.args, kept.args[::-1]) if kept.op == "mul" else ():
            seen, number, rest = _truth_of(a, factor), 1.0, other
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


def _truth_of(a: Algebra, x: Value) -> Value | None:
    """Where a tensor of 0 and 1 is 1."""
    if x.op in ("reshape", "permute", "expand", "slice"):
        seen = _truth_of(a, x.arg)
        return None if seen is None else a.seen_as(seen, x)
    if x.op == "cast":
        return x.arg if x.arg.dtype is torch.bool else _truth_of(a, x.arg)
    if x.op == "mul":
        both = [each if each.dtype is torch.bool else _truth_of(a, each) for each in x.args]
        return logic.pointwise(a, "and", [proven(each) for each in both], (), torch.bool) if None not in both else None
    chosen = x.op == "where" and x.arg.shape == x.shape and [each.op for each in x.args[1:]] == ["full", "full"]
    return x.arg if chosen and [each.attrs[0] for each in x.args[1:]] == [1, 0] else None


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
