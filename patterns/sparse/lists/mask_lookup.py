"""What hides keys of a list and has no words, as padding on the left: looked up in a mask for each entry of the list.

    shown = {places[i, e] : not hidden[i, places[i, e]]}

Exact for every mask: where fewer keys are seen than are listed, `topk` lists hidden ones, and the mask says so.
"""

from __future__ import annotations

from typing import Any

from fusion.analysis.affine import Formula, conjuncts, moved
from fusion.graph import Value
from patterns.attention.masks.assume_true import granted
from patterns.attention.masks.masks import Masks


def looked_up(
    masks: Masks, mask: Value, listed: Value, others: tuple[Formula, ...], sorted_places: bool
) -> dict[str, Any]:
    """What is said of a mask [B or 1, 1, S, T], true where a key is hidden, that shows each query a part of a list.

    Args:
        masks: those of the attention.
        mask: all of them as one.
        listed: true at the keys that are listed.
        others: what they ask of a key besides.
        sorted_places: whether the list is sorted by scores.
    """
    a, (batch, _, queries, keys) = masks.a, masks.sizes
    hidden = granted(a, mask, lambda truth: truth is listed)
    rows = a.reshape(hidden, (mask.shape[0], queries, keys))
    ends = sorted_places and _same_of_scores(masks, listed.arg, others)
    return {"hidden": a.expand(rows, (batch, queries, keys)), "ends": ends}


def _is_unmasked(scores: Value) -> bool:
    """Whether nothing lowers some of the scores, which would stand among those that are hidden."""
    return scores.below("cast", "scale", "reshape", "permute").op in ("matmul", "mean")


def _same_of_scores(masks: Masks, places: Value, others: tuple[Formula, ...]) -> bool:
    """Whether a list is of the largest scores behind the same mask: then what that hides is last in each row."""
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
