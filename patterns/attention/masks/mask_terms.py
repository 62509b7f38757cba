"""One mask of the scores: how it is applied, where it lets a score through, and the numbers by which it hides keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.analysis.affine import Formula, conjunction, disjunction, negation
from fusion.analysis.mask_formulas import Positions
from fusion.graph import Algebra, Value
from fusion.graph.comparisons import constant, where
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.core.empty_rows import Empty
from patterns.attention.masks.visible import MASKED, by_list, hidden, negated
from patterns.attention.reasons.blame import unproven

LOST = -1e30  # a finite number that absorbs any score to which it is added
REPLACED = (
    "mask: hidden scores are replaced by a number above -1e4, or by a tensor; npu_fused_infer_attention_score "
    "requires hidden scores of -1e4 at most; write masked_fill(mask, -inf)"
)
UNDEFINED = (
    "bias: it is NaN at some of the scores, as 0 * inf is; npu_fused_infer_attention_score requires "
    "numbers; write torch.where or masked_fill with -inf in place of the product"
)


@dataclass(frozen=True)
class Term:
    """One mask of the scores.

    Attributes:
        how: "add" (an additive mask), "keep" (booleans, true where a key is visible) or "drop" (true where hidden).
        mask: the mask.
        factor: the number by which masked scores are multiplied afterwards.
        fill: for "keep" and "drop", the number that replaces hidden scores, multiplied by `factor`.
        scores: the masked scores; None if unknown.
        overflow: the number from which on lower scores become -inf, in a dtype to which they are cast later.
    """

    how: str
    mask: Value
    factor: float = 1.0
    fill: float = 0.0
    scores: Value | None = None
    overflow: float = -math.inf

    @property
    def at(self) -> tuple[Value, ...]:
        """The mask and the masked scores, as the values at which a reason is reported."""
        return (self.mask,) if self.scores is None else (self.mask, self.scores)


def unexpanded(x: Value) -> Value:
    """Return the operand of an expand, any other `x` as it is."""
    return x.arg if x.op == "expand" else x


def mask_on(z: Value, scores: Value, factor: float = 1.0, overflow: float = -math.inf) -> Term | str:
    """Read the mask that `z` applies to `scores`, by an addition or a choice of a number; or return why it is none.

    Args:
        z: the masked scores, an "add" or a "where".
        scores: the operand of `z` that is masked.
        factor: the number by which `z` is multiplied afterwards.
        overflow: the number from which on lower scores become -inf.
    """
    if z.op == "add":
        return Term("add", z.args[1] if z.args[0] is scores else z.args[0], factor, scores=z, overflow=overflow)
    condition, yes, no = z.args
    how, fill = ("keep", no) if yes is scores else ("drop", yes)
    if fill.op != "full" or not fill.attrs[0] * factor <= MASKED:  # true for NaN as well
        return REPLACED
    number = fill.attrs[0] * factor
    return Term(how, condition, fill=number if number > overflow else -torch.inf, scores=z, overflow=overflow)


def visible(positions: Positions, terms: Sequence[Term]) -> Formula | str:
    """Return the formula of the positions that all masks `terms` show, or the reason why it is unknown."""
    parts: list[Formula] = []
    for each in terms:
        if each.how != "add":
            seen = positions.truth(each.mask, positions.of(each.mask))
            parts.append(seen if each.how == "keep" else negation(seen))
            continue
        constants = added_numbers(positions, each)
        if constants is None:
            return unproven(each.mask, hides_by_truths(positions, each))
        others = [value for value in constants if not (value == 0 or value <= MASKED)]
        if others:
            return (
                UNDEFINED
                if math.isnan(others[0])
                else (
                    f"bias: {others[0]} is added to some of the scores, which hides no key; a mask requires 0 where "
                    "a key is visible, else at most -1e4; write -inf where keys are hidden"
                )
            )
        parts.append(constants.get(0.0, False))
    return conjunction(*parts)


def added_numbers(positions: Positions, term: Term) -> dict[float, Formula] | None:
    """Return each number that the additive `term` adds at the softmax, with the formula of its positions.

    None where the numbers are unknown or the factor is not positive.
    """
    constants = positions.constants(term.mask, positions.of(term.mask)) if term.factor > 0 else None
    if constants is None:
        return None
    added: dict[float, Formula] = {}
    for value, formula in constants.items():
        number = value * term.factor if value else 0.0
        number = -torch.inf if number <= term.overflow else number
        added[number] = disjunction(added.get(number, False), formula)
    return added


def hides_by_truths(positions: Positions, term: Term) -> bool:
    """Return True if the additive `term` would add only 0 and numbers that hide keys, if all integer inputs were 0 or
    1.

    `positions` evaluates masks, at the positions of the scores.
    """
    constants = added_numbers(positions.supposing(), term)
    return constants is not None and all(value == 0 or value <= MASKED for value in constants)


def hides_below(positions: Positions, term: Term) -> bool:
    """Return True if every number by which `term` hides a key puts the score below all scores that `term` lets through.

    `positions` evaluates masks, at the positions of the scores.
    """
    numbers = (term.fill,) if term.how != "add" else added_numbers(positions, term) or ()
    return all(number <= LOST for number in numbers if number != 0)


def unseen(
    positions: Positions, terms: Sequence[Term], softmax: Empty, over: bool = False, floor: float = -math.inf
) -> str:
    """Name the result of a query that sees no key: "mean" (of all values), "zero" or "nan"; "" if it is not known.

    A finite number that masks add to all scores of a row does not change the softmax of the row, unless all
    exponentials become 0. A number below `LOST` absorbs the scores: all of them become that number, and the weights
    equal.

    Args:
        positions: the evaluation of masks at the positions of the scores.
        terms: the masks, the outermost first.
        softmax: the results of the softmax for rows of one number.
        over: True if a bias is added to scores that a mask has replaced.
        floor: the number to which lower scores are clamped after they are masked.
    """
    numbers = {max(number, floor) for number in numbers_of(positions, terms)}
    results = {softmax.of(number) for number in numbers or {-math.inf}}
    if results != {"mean"}:
        return results.pop() if len(results) == 1 else ""
    *outer, innermost = (each.how for each in terms)
    replaced = "add" not in outer and (innermost != "add" or max(numbers) <= LOST)
    swallows = not over or max(numbers) <= LOST
    alone = floor == max(numbers) and max(numbers) <= LOST
    return "mean" if (alone or (replaced and swallows)) and len(numbers) == 1 else ""


def numbers_of(positions: Positions, terms: Sequence[Term]) -> list[float]:
    """List the numbers by which `terms` hide keys: those that replace scores, and the nonzero addends.

    `positions` evaluates masks, at the positions of the scores.
    """
    return [
        number
        for each in terms
        for number in ((each.fill,) if each.how != "add" else added_numbers(positions, each) or ())
        if number != 0
    ]


def addends(term: Term) -> Iterator[Term]:
    """Yield one term for each addend of an additive `term`; any other term as it is."""
    if term.how != "add" or term.mask.op != "add":
        yield term
        return
    for each in term.mask.args:
        yield from addends(replace(term, mask=each))


def is_finite(positions: Positions, term: Term) -> bool:
    """Return True if `term`, evaluated by `positions`, hides no key by -inf."""
    return -torch.inf not in numbers_of(positions, (term,))


@proof
def lowered(a: Algebra, terms: Sequence[Term]) -> Value | None:
    """Apply `terms` to a score of 0, the innermost first, rounding as the model does.

    None where the masked scores are multiplied by a factor, or cast to a dtype in which they may become -inf.
    """
    total: Value | None = None
    for each in reversed(terms):
        dtype = proven(proven(each.scores).dtype)
        must(each.factor == 1 and each.overflow <= torch.finfo(dtype).min)
        before = total and a.cast(total, dtype)
        if each.how == "add":
            mask = a.cast(unexpanded(each.mask), dtype)
            total = mask if before is None else a.add(before, mask)
            continue
        (hides,) = hidden_by(a, (each,))
        total = where(a, hides, constant(a, each.fill, (), dtype), before or constant(a, 0.0, (), dtype), dtype)
    return total


def hidden_by(
    a: Algebra, terms: Sequence[Term], holds_ones: Callable[[Value], bool] = lambda x: False
) -> Iterator[Value]:
    """Yield for each of `terms` the booleans that are true where it hides a key; for `holds_ones` see `hidden`."""
    for each in terms:
        if each.how == "add":
            yield hidden(a, each.mask, each.factor, holds_ones)
            continue
        is_negated = each.mask.op == "not"
        mask = each.mask.arg if is_negated else each.mask
        shows = (each.how == "keep") != is_negated
        listed = by_list(a, mask, lambda number, shows=shows: bool(number) != shows)
        yield listed or (negated(a, mask) if shows else mask)
