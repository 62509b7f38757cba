"""Masks over listed keys that no captures describe, as padding on the left: looked up for each entry of the list.

    shown = {places[i, e] : not hidden[i, places[i, e]]}

The lookup is exact for every mask. Where fewer keys are visible than listed, `topk` lists hidden ones, and the lookup
hides their entries.
"""

from __future__ import annotations

from typing import Any

from fusion.analysis.affine import Formula, conjuncts, moved
from fusion.graph import Value
from patterns.attention.masks.assume_true import assume_true
from patterns.attention.masks.masks import Masks


def looked_up(
    masks: Masks, mask: Value, listed: Value, others: tuple[Formula, ...], sorted_places: bool
) -> dict[str, Any]:
    """Return the captures `hidden` and `ends` of a mask that shows each query some keys of its list.

    Args:
        masks: masks of the attention.
        mask: all masks as one, bool [B or 1, 1, S, T], True where a key is hidden.
        listed: value below `mask`, True at the listed keys; it is taken as True, so that `hidden` is the rest of
            `mask`.
        others: conditions of the masks on a key, other than that it is listed.
        sorted_places: True if the list has the largest scores first.
    """
    a, (batch, _, queries, keys) = masks.a, masks.sizes
    hidden = assume_true(a, mask, lambda truth: truth is listed)
    rows = a.reshape(hidden, (mask.shape[0], queries, keys))
    ends = sorted_places and _same_of_scores(masks, listed.arg, others)
    return {"hidden": a.expand(rows, (batch, queries, keys)), "ends": ends}


def _is_unmasked(scores: Value) -> bool:
    """Return True if `scores` are a matmul or a mean below casts, factors and views, so that no mask is applied to
    them.
    """
    return scores.below("cast", "scale", "reshape", "permute").op in ("matmul", "mean")


def _same_of_scores(masks: Masks, places: Value, others: tuple[Formula, ...]) -> bool:
    """Return True if `places` are the top-k of scores under a mask that hides a key exactly where `others` do.

    Then a list sorted by its scores has its hidden keys last.
    """
    source = places.below("cast", "reshape")
    masked = source.arg.below("cast") if source.op == "largest_index" else source
    behind = masks.behind(masked) if any(map(_is_unmasked, masked.args[-2:])) else None
    formula = "" if behind is None else behind.visible()
    if behind is None or isinstance(formula, str):
        return False
    axis, rank = masks.positions.axis, len(masks.positions.shape)
    moved_to = {0: axis(0), 1: axis(rank - 2), 2: axis(rank - 1)}
    batch, _, *rows = masks.sizes
    return behind.positions.shape == (batch, *rows) and set(conjuncts(moved(formula, moved_to))) == set(others)
