"""Which keys a mask lets through at all, in words: those of a causal order, of a length, or up to one of each query."""

from __future__ import annotations

from typing import Any

from fusion.analysis.affine import Affine
from fusion.graph import Value
from patterns.attention.bounds import Limits, per_query, per_sequence, sees_some
from patterns.attention.masks import Masks

EVERY = {"mask_kind": "none", "window": None, "kv_len": None}
"""Every key there is."""
NOTHING = Limits(None, None, False, ())
"""Of a mask that asks for nothing."""


def in_words(masks: Masks, bounds: Limits) -> dict[str, Any] | None:
    """The bounds in words, and whether every query is known to see a key."""
    found = EVERY
    if bounds == NOTHING:
        return {**found, "every_row_nonempty": True}
    words = masks.bounded(bounds)
    if not words:
        lengths = _row_lens(masks, bounds)
        words = {} if lengths is None else {"row_lens": lengths}
    return {**found, **words, "every_row_nonempty": _sees_some(masks, bounds)} if words else None


def _row_lens(masks: Masks, bounds: Limits) -> Value | None:
    """How many keys each query sees, as of `words`; None where something else than an upper bound is asked."""
    batch, _, queries, _ = masks.sizes
    high = _own_bound(masks, bounds) if bounds.rest else bounds.high
    if high is None or bounds.low is not None:
        return None
    if bounds.moving:
        first = per_sequence(masks.a, high.plus(1), batch)
        return None if first is None else masks.a.reshape(first, (batch, 1))
    return per_query(masks.a, high.plus(1), (batch, queries), len(masks.positions.shape) - 2)


def _own_bound(masks: Masks, bounds: Limits) -> Affine | None:
    """The last key that each query sees, where that is all that a mask asks for and is no bound of its sequence."""
    if bounds.high is not None or len(bounds.rest) != 1 or isinstance(bounds.rest[0], bool):
        return None
    kind, difference = bounds.rest[0]
    key = len(masks.positions.shape) - 1
    if kind != "le" or difference.terms.get(key, 0) != 1:
        return None
    others = difference.without(key)
    return None if key in others.axes() else others.times(-1)


def _sees_some(masks: Masks, bounds: Limits) -> bool:
    """Whether every query is known to see a key."""
    own = _own_bound(masks, bounds) if bounds.rest else None
    told = bounds if own is None else Limits(own, None, False, ())
    return sees_some(told, *masks.sizes[2:])
