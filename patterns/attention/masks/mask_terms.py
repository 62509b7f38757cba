"""One mask of the scores: how it is put on them, where it lets a score through, the numbers by which it hides one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.analysis.affine import Formula, conjunction, disjunction, negation
from fusion.analysis.predicates import Positions
from fusion.graph import Algebra, Value
from fusion.graph.logic import constant, where
from fusion.graph.proof import must, proof, proven
from patterns.attention.core.empty_rows import Empty
from patterns.attention.masks.visible import MASKED, by_list, hidden, negated
from patterns.attention.reasons.blame import unproven

LOST = -1e30  # a finite number that swallows any score it is added to
REPLACED = "scores are replaced by something else than a number of at most -1e4"
UNDEFINED = (
    "a bias is NaN at some of the scores, as infinity times 0 is: fill the infinity in with torch.where or masked_fill"
)


@dataclass(frozen=True)
class Term:
    """One mask of the scores.

    Attributes:
        how: "add" (to the scores), "keep" (booleans, true where a key is seen) or "drop" (the contrary).
        mask: the mask.
        factor: what the scores are multiplied by after it.
        fill: what a hidden score is replaced by, for "keep" and "drop"; `factor` is in it.
        scores: the scores that it is put on, as they are then.
        overflow: the number from which on lower scores are -inf in a dtype to which they are cast later.
    """

    how: str
    mask: Value
    factor: float = 1.0
    fill: float = 0.0
    scores: Value | None = None
    overflow: float = -math.inf

    @property
    def at(self) -> tuple[Value, ...]:
        """Where it is made, and where it is put on the scores."""
        return (self.mask,) if self.scores is None else (self.mask, self.scores)


def unexpanded(x: Value) -> Value:
    """What is repeated along dims of size 1, before it is."""
    return x.arg if x.op == "expand" else x


def mask_on(z: Value, scores: Value, factor: float = 1.0, overflow: float = -math.inf) -> Term | str:
    """The mask that an addition or a choice puts on scores, which are multiplied by a factor after it; or why none."""
    if z.op == "add":
        return Term("add", z.args[1] if z.args[0] is scores else z.args[0], factor, scores=z, overflow=overflow)
    condition, yes, no = z.args
    how, fill = ("keep", no) if yes is scores else ("drop", yes)
    if fill.op != "full" or not fill.attrs[0] * factor <= MASKED:  # NaN is not, either
        return REPLACED
    number = fill.attrs[0] * factor
    return Term(how, condition, fill=number if number > overflow else -torch.inf, scores=z, overflow=overflow)


def visible(positions: Positions, terms: Sequence[Term]) -> Formula | str:
    """Where all masks of one score let it through, or why it cannot be said."""
    parts: list[Formula] = []
    for each in terms:
        if each.how != "add":
            seen = positions.truth(each.mask, positions.of(each.mask))
            parts.append(seen if each.how == "keep" else negation(seen))
            continue
        constants = _added(positions, each)
        if constants is None:
            return unproven(each.mask, hides_by_truths(positions, each))
        odd = [value for value in constants if not (value == 0 or value <= MASKED)]
        if odd:
            return UNDEFINED if math.isnan(odd[0]) else f"a bias of {odd[0]} is added to some of the scores"
        parts.append(constants.get(0.0, False))
    return conjunction(*parts)


def _added(positions: Positions, term: Term) -> dict[float, Formula] | None:
    """What a mask adds to the scores that the softmax sees; None where it is not known, or turned round."""
    constants = positions.constants(term.mask, positions.of(term.mask)) if term.factor > 0 else None
    if constants is None:
        return None
    found: dict[float, Formula] = {}
    for value, formula in constants.items():
        number = value * term.factor if value else 0.0
        number = -torch.inf if number <= term.overflow else number
        found[number] = disjunction(found.get(number, False), formula)
    return found


def hides_by_truths(positions: Positions, term: Term) -> bool:
    """Whether a mask that is added would be known if whole numbers that are passed in were 0 or 1."""
    constants = _added(positions.supposing(), term)
    return constants is not None and all(value == 0 or value <= MASKED for value in constants)


def hides_below(positions: Positions, term: Term) -> bool:
    """Whether no score that a mask hides can be above one that it lets through."""
    numbers = (term.fill,) if term.how != "add" else _added(positions, term) or ()
    return all(number <= LOST for number in numbers if number != 0)


def unseen(
    positions: Positions, terms: Sequence[Term], softmax: Empty, over: bool = False, floor: float = -math.inf
) -> str:
    """Return what a query gives that sees no key: "mean" (of all values), "zero", "nan", or "" where that is not known.

    A number that only hides a key beside others hides none where it is added to all of them, unless their exponentials
    are 0. One that swallows scores is what they become, until the same number replaces them.

    Args:
        positions: those of the scores.
        terms: the masks, the outermost first.
        softmax: what the softmax makes of a row that holds one number.
        over: whether a bias is added to scores that a mask has replaced.
        floor: the number to which lower scores are raised behind the masks.
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
    """What hides a key: numbers that scores are replaced by, or that are added to them."""
    return [
        number
        for each in terms
        for number in ((each.fill,) if each.how != "add" else _added(positions, each) or ())
        if number != 0
    ]


def addends(term: Term) -> Iterator[Term]:
    """Masks of which one that is added is the sum."""
    if term.how != "add" or term.mask.op != "add":
        yield term
        return
    for each in term.mask.args:
        yield from addends(replace(term, mask=each))


def is_finite(positions: Positions, term: Term) -> bool:
    """Whether no key is hidden by -inf."""
    return -torch.inf not in numbers_of(positions, (term,))


@proof
def lowered(a: Algebra, terms: Sequence[Term]) -> Value | None:
    """What all masks make of a score of 0, the innermost first, as the model rounds it.

    None where what they make is scaled, or rounded to a dtype that does not hold it.
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


def hidden_by(a: Algebra, terms: Sequence[Term]) -> Iterator[Value]:
    """Where each mask hides a key, as booleans."""
    for each in terms:
        if each.how == "add":
            yield hidden(a, each.mask, each.factor)
            continue
        turned = each.mask.op == "not"
        mask = each.mask.arg if turned else each.mask
        shows = (each.how == "keep") != turned
        listed = by_list(a, mask, lambda number, shows=shows: bool(number) != shows)
        yield listed or (negated(a, mask) if shows else mask)
