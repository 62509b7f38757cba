"""Scores of experts, masked outside of the selected groups: filled by a where, multiplied by 0, or -inf is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusion.graph import Algebra, Value
from patterns.moe.router.selection_masks import masked, uses_topk


@dataclass(frozen=True)
class Grouped:
    """Scores of experts that are masked outside of the selected groups.

    Attributes:
        choice: scores of all experts [*T, E].
        groups: indices of the selected groups.
        size: number of experts of a group.
        fill: number in place of the scores in all other groups.
    """

    choice: Value
    groups: Value
    size: Any
    fill: float


def hidden_groups(a: Algebra, x: Value, is_choice: Callable[[Value], bool]) -> Grouped | str | None:
    """Read `x` as scores that are masked outside of the selected groups of experts.

    Returns the reason if a mask by a top-k has another form, None if `x` has no such mask. `is_choice` tells if a value
    is scores, with or without a bias, as a router chooses by.
    """
    inner = x.below("reshape")
    groups = masked(inner, lambda selection: selection.size is not None)
    if groups is None:
        looks = inner.op == "where" and _is_filled_by_topk(inner) and is_choice(a.reshape(_unmasked(inner), x.shape))
        return (
            (
                "groups: the entries that are filled are not proven to be runs of neighbouring experts; "
                "npu_moe_gating_top_k requires view(T, groups, E / groups); write the mask of groups [T, groups, "
                "1] expanded over their experts"
            )
            if looks
            else None
        )
    if groups.fill is None:
        return _OTHERWISE[groups.by]
    return Grouped(a.reshape(groups.choice, x.shape), groups.selection.places, groups.selection.size, groups.fill)


_OTHERWISE = {
    "where": (
        "groups: the entries that are filled are not those of the groups outside of the top-k; "
        "npu_moe_gating_top_k requires that; fill where no chosen group is"
    ),
    "mul": (
        "groups: scores of chosen, or of other, groups are multiplied by other numbers than 1 and 0; "
        "npu_moe_gating_top_k requires these; write masked_fill(~mask, -inf)"
    ),
    "add": (
        "groups: other numbers than 0 and -inf are added to the scores of chosen, or of other, groups; "
        "npu_moe_gating_top_k requires these; write masked_fill(~mask, -inf)"
    ),
}


def _is_filled_by_topk(inner: Value) -> bool:
    """Return True if the where `inner` fills some of its numbers with a constant, by a condition made of top-k
    indices.
    """
    condition, *sides = inner.args
    return any(each.op == "full" for each in sides) and _unmasked(inner).shape == inner.shape and uses_topk(condition)


def _unmasked(inner: Value) -> Value:
    """Return the operand of the where `inner` that is not a constant: the numbers before the mask."""
    _, first, second = inner.args
    return first if second.op == "full" else second
