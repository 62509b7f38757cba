"""Bounds on the keys that a mask shows, as captures: causal order, length, length of each query, or segment ids."""

from __future__ import annotations

from math import prod
from typing import Any

from fusion.analysis.affine import Affine, Leaf, number
from fusion.graph import Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.masks.bounds import Limits, per_query, per_sequence, sees_some
from patterns.attention.masks.masks import Masks
from patterns.attention.varlen.read_segment_ids import segments_below

EVERY = {"mask_kind": "none", "window": None, "kv_len": None}
"""Captures of a mask that shows every key."""
NOTHING = Limits(None, None, False, ())
"""Bounds of a mask that hides no key."""


def in_words(masks: Masks, bounds: Limits) -> dict[str, Any] | None:
    """Return `bounds` as captures of `Seen`, with `every_row_nonempty`; None if no captures express them.

    `masks` are those to which the bounds belong.
    """
    if bounds == NOTHING:
        return {**EVERY, "every_row_nonempty": True}
    captures = masks.bounded(bounds)
    if not captures:
        lengths = _row_lens(masks, bounds)
        captures = (_segments(masks, bounds) or {}) if lengths is None else {"row_lens": lengths}
    nonempty = "segment" in captures or _sees_some(masks, bounds)  # a token sees itself
    return {**EVERY, **captures, "every_row_nonempty": nonempty} if captures else None


def starts_anywhere(masks: Masks, bounds: Limits) -> bool:
    """Return True if `bounds`, of `masks`, have a lower bound on the key that is read from a tensor."""
    key = len(masks.positions.shape) - 1
    named = () if bounds.low is None else tuple(bounds.low.terms)
    for part in bounds.rest:
        if not isinstance(part, bool) and part[0] == "le" and part[1].terms.get(key, 0) == -1:
            named += tuple(part[1].terms)
    return any(isinstance(term, Leaf) for term in named)


@proof
def _segments(masks: Masks, bounds: Limits) -> dict[str, Any] | None:
    """Return `segment`, the ids of packed tokens, and `segments`, a number above them, as captures.

    None unless `bounds`, read off `masks`, show each token exactly the keys of its own segment up to itself.
    """
    batch, _, queries, keys = masks.sizes
    must(batch == 1 and queries == keys and len(bounds.rest) == 1)
    must(bounds.high == number(0) and bounds.moving and bounds.low is None)
    (asked,) = bounds.rest
    if isinstance(asked, bool) or asked[0] != "eq":
        return None
    terms = [*asked[1].terms.items()]
    must(asked[1].constant == 0 and len(terms) == 2 and terms[0][1] * terms[1][1] < 0)
    must(all(isinstance(leaf, Leaf) for leaf, _ in terms))
    rank = len(masks.positions.shape)
    axes = {frozenset(leaf.index) - {number(0)} for leaf, _ in terms}
    must(axes == {frozenset({masks.positions.axis(axis)}) for axis in (rank - 2, rank - 1)})
    lines = {masks.a.scale(leaf.value, abs(factor)) for leaf, factor in terms}  # a sum is canonicalised to N · mean
    must(len(lines) == 1)
    (line,) = lines
    must(prod(line.shape) == queries)
    return {"segment": line, "segments": proven(segments_below(line))}


def _row_lens(masks: Masks, bounds: Limits) -> Value | None:
    """Return the number of keys that each query sees, [B, S], or [B, 1] for the first if each later one sees one more.

    None if `bounds`, read off `masks`, are more than one upper bound on the key.
    """
    batch, _, queries, _ = masks.sizes
    high = _own_bound(masks, bounds) if bounds.rest else bounds.high
    if high is None or bounds.low is not None:
        return None
    if bounds.moving:
        first = per_sequence(masks.a, high.plus(1), batch)
        return None if first is None else masks.a.reshape(first, (batch, 1))
    return per_query(masks.a, high.plus(1), (batch, queries), len(masks.positions.shape) - 2)


def _own_bound(masks: Masks, bounds: Limits) -> Affine | None:
    """Return the last key that each query sees, from the only condition in `bounds.rest`, an upper bound on the key.

    None if it is another condition, or if `bounds.high` is an upper bound too.
    """
    if bounds.high is not None or len(bounds.rest) != 1 or isinstance(bounds.rest[0], bool):
        return None
    kind, difference = bounds.rest[0]
    key = len(masks.positions.shape) - 1
    if kind != "le" or difference.terms.get(key, 0) != 1:
        return None
    others = difference.without(key)
    return None if key in others.axes() else others.times(-1)


def _sees_some(masks: Masks, bounds: Limits) -> bool:
    """Return True if every query is proven to see a key within `bounds`."""
    own = _own_bound(masks, bounds) if bounds.rest else None
    limits = bounds if own is None else Limits(own, None, False, ())
    return sees_some(limits, *masks.sizes[2:])
