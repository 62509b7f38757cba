"""Biases of attention, added to scaled scores: softmax(scale · q kᵀ + bias [+ mask]) v  (T5, 2020; ALiBi, 2022).

An addend that is a sum of both is split into masks, of 0 and numbers that hide keys, and biases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fusion.analysis.dtypes import Array, is_integer, is_rounding, rounded_to
from fusion.analysis.mask_formulas import Positions
from fusion.analysis.rounding import exact, is_float
from fusion.analysis.row_layout import broadcast_arranged, row_step
from fusion.analysis.upper_bounds import largest
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.comparisons import constant, where
from fusion.graph.nonnegative import is_nonnegative
from fusion.graph.proof_steps import proven
from patterns.attention.core.frames import Frame
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import LOST, Term, added_numbers
from patterns.attention.masks.masks import Masks
from patterns.attention.masks.visible import MASKED

_VIEWS = ("reshape", "permute", "slice")
_CARRIES = (*_VIEWS, "expand", "cast", "abs", "scale", "shift", "index", "take", "add", "mul", "where", "cat")
"""Ops whose result is infinite only if an operand is."""
_CHOOSES = ("expand", "index", "take", "where")
"""Ops that copy entries, besides the views."""
_FINITE = ("matmul", "softmax", "sigmoid", "tanh", "sin", "cos", "arange", "number", "constant")
"""Ops whose results are taken as finite, as scores are."""

GUARDED = (
    "as a bias it may be -inf, which no page of npu_fused_infer_attention_score describes, and to "
    "replace that takes more calls than are saved; give it finite numbers"
)


@dataclass(frozen=True)
class Parted:
    """The masks of scores and the biases added to them.

    Attributes:
        masks: the masks.
        biases: the biases, each with the index of the term of the original masks from which it was split.
        over: true if a bias is added to scores that a mask has replaced before.
    """

    masks: Masks
    biases: tuple[tuple[int, Term], ...]
    over: bool = False


def parted(masks: Masks) -> Parted:
    """Split each additive term of `masks` into addends that hide keys, which stay masks, and all others, which are
    biases.
    """
    masking_terms: list[Term] = []
    biases: list[tuple[int, Term]] = []
    for place, term in enumerate(masks.terms):
        if term.how != "add" or _hides(masks.positions, term.mask, term.factor):
            masking_terms.append(term)
            continue
        pieces = [replace(term, mask=each) for each in _pieces(masks.a, masks.positions, term.mask)]
        masking = [each for each in pieces if _hides(masks.positions, each.mask, term.factor)]
        masking_terms += masking
        rest = [each for each in pieces if each not in masking]
        biases += ((place, each) for each in (rest if masking or len(rest) < 2 else [term]))
    replacing = max((place for place, each in enumerate(masks.terms) if each.how != "add"), default=-1)
    over = any(place < replacing for place, _ in biases)  # terms stand outermost first
    return Parted(replace(masks, terms=tuple(masking_terms)), tuple(biases), over)


def unparted(assumed: Assumed, masks: Masks, dtype: torch.dtype | None) -> Parted | None:
    """Take all terms of `masks` for biases in `dtype`, the dtype of the queries, which is None for int8.

    None where a term replaces scores, or where -inf, which the operator takes as the lowest number of `dtype`, could
    not be distinguished from other terms.
    """
    filled = any(each.how != "add" for each in masks.terms)
    if dtype is None or filled or _blurs(assumed, masks, torch.finfo(dtype).min):
        return None
    return Parted(replace(masks, terms=()), tuple(enumerate(masks.terms)))


def _blurs(assumed: Assumed, masks: Masks, least: float) -> bool:
    """Return True if the sum of `masks` in a dtype with lowest number `least` may be -inf for one key, and a number
    near `least` for another.

    If -inf were clamped to `least`, both keys would be hidden alike, and in the model they are not.
    """
    pieces = [
        (term, each) for term in masks.terms for each in _pieces(masks.a, masks.positions, term.mask, choices=False)
    ]
    near = least / (4 * max(len(pieces), 1))
    lows = list[list[float]]()
    for term, piece in pieces:
        numbers = added_numbers(masks.positions, replace(term, mask=piece))
        if numbers is not None:
            lows.append(list(numbers))
        elif len(pieces) > 1 and _may_reach(-near, piece, assumed.folder.fold(piece), assumed.weights):
            lows.append([-math.inf, near])  # any number, as far as is known
    overflow = sum(min(each, default=0.0) for each in lows) < least
    return overflow and any(least <= each <= near for some in lows for each in some)


def stays_finite(split: Parted) -> bool:
    """Return True if there is one bias in `split`, and it is proven to be no -inf, nor to make a sum -inf.

    It must be made by choices from finite constants and nonnegative values.
    """
    return len(split.biases) == 1 and all(_is_chosen(each.mask) for _, each in split.biases)


def _is_chosen(x: Value) -> bool:
    if x.op in ("expand", "cast", *_VIEWS):
        return _is_chosen(x.arg)
    if x.op == "where":
        return all(map(_is_chosen, x.args[1:]))
    return math.isfinite(x.attrs[0]) if x.op == "full" else is_nonnegative(x)


def _hides(positions: Positions, x: Value, factor: float) -> bool:
    """Return True if an addend `x`, multiplied by `factor` afterwards, is a mask: all its numbers are 0 or hide a key.

    Or one of them is +inf or NaN, which no bias has either.
    """
    numbers = positions.constants(x, positions.of(x)) if factor > 0 else None
    if numbers is None:
        return False
    return any(not number < math.inf for number in numbers) or all(n == 0 or n * factor <= MASKED for n in numbers)


def _pieces(a: Algebra, positions: Positions, x: Value, choices: bool = True) -> Iterator[Value]:
    """Yield values that add up to `x` when broadcast: the addends of sums, and with `choices` the mask and the rest of
    choices.

    `positions` evaluates masks, at the positions of the scores.
    """
    match x.op:
        case "full" if x.attrs[0] == 0:
            return
        case "add":
            for each in x.args:
                yield from _pieces(a, positions, each, choices)
        case "expand":
            yield from _pieces(a, positions, x.arg, choices)
        case "reshape" if x.shape == (*(1,) * (x.rank - x.arg.rank), *x.arg.shape):
            yield from _pieces(a, positions, x.arg, choices)
        case "cast" if is_rounding(x):
            yield from (a.cast(each, x.dtype) for each in _pieces(a, positions, x.arg, choices))
        case "reshape" | "permute":
            below, step = list(_pieces(a, positions, x.arg, choices)), row_step(x)
            if len(below) < 2:
                yield x
            elif step is None:
                yield from (a.seen_as(a.expand(each, x.arg.shape), x) for each in below)
            else:
                yield from (broadcast_arranged(a, each, x.arg.shape, (step,)) for each in below)
        case "where" if choices and (
            broadcast(x.shape, positions.shape) != positions.shape or not _hides(positions, x, 1.0)
        ):
            yield from _chosen(a, positions, x)
        case _:
            yield x


def _chosen(a: Algebra, positions: Positions, x: Value) -> Iterator[Value]:
    """Yield where(c, number, 0) and the pieces of y for the choice `x` = where(c, number, y) with a number that hides a
    key.

    `x` alone if none or both of its sides are such numbers. Where the key is hidden, y adds to the number.
    """
    condition, *sides = x.args
    hides = [each.op == "full" and each.attrs[0] <= MASKED for each in sides]
    zero = constant(a, 0, (), x.dtype)
    yes, no = (each if hidden else zero for each, hidden in zip(sides, hides, strict=True))
    mask = where(a, condition, yes, no, x.dtype) if hides.count(True) == 1 else None
    if mask is None:
        yield x
        return
    yield mask
    yield from _pieces(a, positions, sides[hides.index(False)])


# captures ----------------------------------------------------------------------------------------------------------


def bias_of(
    assumed: Assumed, split: Parted, frame: Frame, dtype: torch.dtype | None, empty: str, structured: bool, floor: float
) -> dict[str, Any] | str:
    """Return the captures of the bias [B or 1, N, S, T] in `dtype` and of rows that are all -inf; or a reason.

    Args:
        assumed: the facts about the graph.
        split: the masks and biases of the scores.
        frame: the dims of the scores.
        dtype: the dtype of the queries; None for int8.
        empty: the result of the softmax for a row of -inf.
        structured: True if the masks are captured by parameters alone, so that no tensor shows the hidden keys.
        floor: the number to which lower scores are clamped behind the bias.
    """
    a = assumed.algebra
    if dtype is None:
        return "as a bias it stands beside int8 keys, with which npu_fused_infer_attention_score takes none"
    value = _joined(a, [each for _, each in split.biases], len({place for place, _ in split.biases}) == 1, dtype)
    if isinstance(value, str):
        return value
    numbers = assumed.folder.fold(value)
    if value.dtype != dtype:
        if numbers is None or not _holds(numbers, dtype):
            return (
                f"as a bias it would be rounded from {_named(value.dtype)} to {_named(dtype)}; cast it to "
                f"{_named(dtype)}"
            )
        value = a.cast(value, dtype)
    wide = _per_head(a, value, frame, split.masks.sizes[-1])
    weakest = max(split.masks.weakest(), floor if split.masks.terms else -math.inf)
    if weakest > -math.inf and _may_reach(min(-LOST, -weakest / 4), value, numbers, assumed.weights):
        return (
            "as a bias it may hide keys beside a mask of finite numbers, where a query without keys would see "
            "some; mask with -inf"
        )
    if floor > LOST and _may_reach(-floor / 4, value, numbers, assumed.weights):
        return "as a bias it may come near the number at which scores are clamped; leave the clamp out"
    if _is_finite(split.masks.positions, value) or not _may_reach(math.inf, value, numbers, assumed.weights):
        return {"bias": wide}
    if floor > -math.inf:
        return {"bias": a.make("clamp", (wide,), (floor, math.inf), wide.shape, wide.dtype)}
    if structured:
        return "as a bias it may be -inf beside a mask without a tensor; give it finite numbers"
    return {"bias": wide, "empty_bias": empty}


def _is_finite(positions: Positions, x: Value) -> bool:
    """Return True if `positions` evaluates `x` to finite numbers alone, as it does a choice of constants."""
    numbers = positions.constants(x, positions.of(x))
    return numbers is not None and all(map(math.isfinite, numbers))


def _holds(numbers: Array, dtype: torch.dtype | None) -> bool:
    """Return True if `dtype` represents all `numbers` exactly."""
    rounded = rounded_to(numbers, dtype)
    return rounded is not None and np.array_equal(rounded, numbers)


def _named(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(a: Algebra, terms: Sequence[Term], at_once: bool, dtype: torch.dtype | None) -> Value | str:
    """Add the biases `terms` in `dtype`, if that rounds no more than the model does; else return the reason.

    Where the model adds x and y to scores s one by one, and rounds s, s + x and s + x + y to the dtype of x and y, the
    sum x + y may be rounded once: |x + y| <= |s| + |s + x + y|. Of more than two addends it is accumulated in float32.
    """
    if len(terms) > 1:
        alike = dtype is not None and all(each.mask.dtype == dtype and each.factor == 1 for each in terms)
        apart = all(each.scores is not None and each.scores.dtype == dtype for each in terms)
        wide = torch.float32 if len(terms) > 2 and not at_once else dtype
        total: Value | None = a.cast(terms[0].mask, wide) if alike and (at_once or apart) else None
        for each in terms[1:]:
            total = total and a.add(total, a.cast(each.mask, wide))
        return (
            (
                "as a bias it is a sum of several, which would be rounded once more; add them in the dtype of the "
                "queries before"
            )
            if total is None
            else a.cast(total, dtype)
        )
    value, factor = terms[0].mask, terms[0].factor
    while value.op == "expand" or exact(value) is not value:
        value = value.arg
    if value.op == "cast" and not is_float(value.arg):
        return "as a bias it is in integers; cast it to the dtype of the queries"
    if factor == 1:
        return value
    if not 0 < abs(factor) < 1 or not math.log2(abs(factor)).is_integer():
        return (
            f"as a bias it is multiplied by {factor:g} together with the scores, by which it would be rounded; "
            "add it behind that factor"
        )
    return a.scale(value, factor)


def _per_head(a: Algebra, value: Value, frame: Frame, keys: Any) -> Value:
    """View the bias `value`, which broadcasts to scores [*rows, T] of `frame`, as [B or 1, N, S, T], for T = `keys`."""
    full = (*frame.shape, keys)
    lead = (*(1,) * (len(full) - value.rank), *value.shape)
    wide = a.expand(a.reshape(value, lead), (lead[0], *full[1:]))
    return a.reshape(wide, (lead[0], *frame.sizes[1:], keys))


def _may_reach(most: float, x: Value, numbers: Array | None, weights: Collection[str]) -> bool:
    """Return True if the bias `x`, with entries `numbers` if constant, may have an entry of magnitude `most` or more.

    `weights` are as in `_may_hold`.
    """
    if numbers is not None:
        return not (np.abs(numbers) < most).all()
    return not largest(x) < most and _may_hold(most, x, weights)


def _may_hold(most: float, x: Value, weights: Collection[str]) -> bool:
    """Return True if `x`, which is no constant, may have an entry of magnitude `most` or more.

    Results of matmuls and Parameters in `weights` count as small, as scores do.
    """
    if x.dtype is torch.float16 and x.op not in (*_VIEWS, *_CHOOSES, "input", "full", "exp"):
        return True  # float16 overflows at 65504
    match x.op:
        case "input":
            return x.attrs[1] != 0 or x.attrs[0] not in weights
        case "full":
            return not abs(x.attrs[0]) < most
        case "scale" | "shift" if not abs(x.attrs[0]) < most:
            return True
        case "clip" | "clamp" if all(abs(each) < most for each in x.attrs):
            return False
        case "cast" if is_integer(x.arg) or x.arg.dtype is torch.bool:
            return False
        case "cast":  # numbers beyond the range of the dtype become infinite
            return _may_hold(min(most, torch.finfo(proven(x.dtype)).max), x.arg, weights)
        case "exp":  # never -inf; with +inf, plain attention gives NaN for the row
            return most < math.inf
        case "mul":  # a factor shared by all keys is taken as finite, as the scale of scores is
            keyed = [each for each in x.args if each.shape[-1:] not in ((), (1,))]
            return any(_may_hold(most, each, weights) for each in keyed)
        case "index" | "take":
            return _may_hold(most, x.arg, weights)
        case "pad":  # relative positions are shifted by padding
            return not abs(x.attrs[1]) < most or _may_hold(most, x.arg, weights)
        case "where":
            return any(_may_hold(most, each, weights) for each in x.args[1:])
        case _:
            return x.op not in _FINITE and (x.op not in _CARRIES or any(_may_hold(most, e, weights) for e in x.args))
