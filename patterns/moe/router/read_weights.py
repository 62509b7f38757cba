"""Rows masked to their k largest numbers, by which routers give a weight to every expert, most of them 0.

    kept = x at the top-k indices of x, -inf or 0 elsewhere
    softmax(kept) = softmax over the k largest, scattered to their places in zeros

A mask by the bound x ≥ (least of the k largest) is refused: with ties more than k numbers pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from fusion import reader
from fusion.analysis.rounding import exact, is_float
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from fusion.graph.proof_steps import proven
from patterns.moe.router.selection_masks import Masked, has_topk, masked
from patterns.moe.words import KEPT

RULE = "expert_routing"


@reader(gives=(KEPT,))
def topk_masks(graph: Graph) -> Iterator[Annotation]:
    """Read every `kept`: rows masked to their k largest; report a miss for other masks made of a top-k."""
    for value in list(graph.places) if has_topk(graph) else ():
        rows = masked_rows(graph.algebra, value) or _miss(value) if is_float(value) else None
        if isinstance(rows, Miss):
            yield value, rows
        elif rows is not None:
            yield value, Reading("kept", {"x": rows.x, "count": rows.places.attrs[0], "fill": rows.fill})


class MaskedRows(NamedTuple):
    """`x` at its top-k indices `places` [.., k] in each row, `fill` elsewhere."""

    x: Value
    places: Value
    fill: float


def masked_rows(a: Algebra, value: Value) -> MaskedRows | None:
    """Read `value` as rows masked to their k largest numbers: by a scatter into -inf, or by a mask; None if neither."""
    return _scattered(a, value) or _masked(value)


def _scattered(a: Algebra, value: Value) -> MaskedRows | None:
    """Read `value` as the k largest of x, scattered to their own places in a tensor of -inf; None if it is anything
    else.
    """
    if value.op != "placed" or (value.arg.op, value.arg.attrs) != ("full", (-math.inf,)):
        return None
    _, places, numbers = value.args
    source = _topk_source(a, numbers)
    are_own = source is not None and places.op == "largest_index" and _ranked(source) is _ranked(places.arg)
    return MaskedRows(proven(source), places, -math.inf) if are_own else None


def _topk_source(a: Algebra, x: Value) -> Value | None:
    """Return z if `x` is topk(z) by values, with casts and a number per row moved from behind the top-k into z; else
    None.
    """
    if x.op == "largest":
        return x.arg
    if x.op == "cast":
        source = _topk_source(a, x.arg) if exact(x) is not x else None
        return None if source is None else a.cast(source, x.dtype)
    for rows, added in x.operands("add"):
        source = _topk_source(a, rows) if added.shape[-1:] == (1,) else None
        if source is not None:
            return a.add(source, added)
    return None


def _ranked(x: Value) -> Value:
    """Strip widening casts, and additions of one number per row, from `x`: neither changes the order in a row."""
    x = exact(x)
    for rows, added in x.operands("add"):
        if rows.shape == x.shape and added.shape[-1:] == (1,):
            return _ranked(rows)
    return x


def _masked(value: Value) -> MaskedRows | None:
    """Read `value` as x with one constant at all but its own top-k indices; None if it is anything else.

    The mask is applied by a where, a product or an addition.
    """
    numbers = masked(value, lambda selection: selection.size is None)
    if numbers is None or numbers.fill is None or numbers.selection.is_bound or not _is_own_topk(numbers):
        return None
    return MaskedRows(numbers.choice, numbers.selection.places, numbers.fill)


def _miss(value: Value) -> Miss | None:
    """Return a `Miss` if `value` is masked by a bound, or by a top-k whose masked numbers are not all one constant.

    None for other values.
    """
    numbers = masked(value, lambda selection: selection.size is None)
    if numbers is None or value.rank > 3:  # scores of attention heads have four dims
        return None
    if numbers.selection.is_bound:
        return Miss(RULE, _BOUND)
    return Miss(RULE, _OTHERS) if numbers.fill is None and _is_own_topk(numbers) else None


def _is_own_topk(numbers: Masked) -> bool:
    """Return True if `numbers` are masked by the top-k of themselves, or of the logits whose softmax they are."""
    places = numbers.selection.places
    return places.op == "largest_index" and _ranked(_logits(numbers.choice)) is _ranked(places.arg)


def _logits(x: Value) -> Value:
    """Return the logits if `x` is a softmax over the last dim, which keeps their order; otherwise `x`."""
    below = x.below("cast")
    return below.arg if below.op == "softmax" and below.attrs[0] == -1 else x


_OTHERS = (
    "experts: the mask made from the indices of topk does more than keep the scores at these indices; "
    "npu_moe_gating_top_k requires the scores of the chosen experts alone; write scores.gather(-1, topk_indices)"
)
_BOUND = (
    "experts: scores that reach the k-th largest are kept, of equal ones more than k; npu_moe_gating_top_k "
    "requires exactly k; use the indices that topk gives"
)
