"""Choices of which groups are hidden: filled, multiplied by 0, or lowered by infinity, as a list of groups says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusion.graph import Algebra, Value
from patterns.moe.router.list_masks import is_of_list, masked


@dataclass(frozen=True)
class Grouped:
    """What is chosen from: a choice, and what stands outside of the groups that are kept."""

    choice: Value
    groups: Value  # the list of groups
    size: Any  # experts of a group
    fill: float


def hidden_groups(a: Algebra, x: Value, is_choice: Callable[[Value], bool]) -> Grouped | str | None:
    """`x` as a choice of which some groups are filled, or why that is another one; None where it is nothing alike."""
    inner = x.below("reshape")
    found = masked(inner, lambda of: of.size is not None)
    if found is None:
        looks = inner.op == "where" and _is_filled_by_list(inner) and is_choice(a.reshape(_kept(inner), x.shape))
        return "what is filled is not proven to be groups of experts that stand side by side" if looks else None
    if found.fill is None:
        return _OTHERWISE[found.by]
    return Grouped(a.reshape(found.choice, x.shape), found.of.places, found.of.size, found.fill)


_OTHERWISE = {
    "where": "what is filled is not the groups that were not chosen",
    "mul": "the scores of groups that were chosen, or were not, are multiplied by other numbers than 1 and 0",
    "add": "other numbers than 0 and -inf are added to the scores of groups that were chosen, or were not",
}


def _is_filled_by_list(inner: Value) -> bool:
    """Whether a list says which of numbers are filled with one."""
    condition, *sides = inner.args
    return any(each.op == "full" for each in sides) and _kept(inner).shape == inner.shape and is_of_list(condition)


def _kept(inner: Value) -> Value:
    """The numbers of which some are filled."""
    _, filled, kept = inner.args
    return filled if kept.op == "full" else kept
