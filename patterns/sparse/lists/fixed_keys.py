"""Keys that a query sees in addition to its list: the first ones, or the last ones up to a bound.

    seen = (listed or j < first or j > high − last) and j ≤ high        or        (listed and shown) or j < first

All of them are appended to the list, which then names each key once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, tensor
from fusion.analysis.affine import Affine, Formula, Leaf, conjuncts, number
from patterns.attention.masks.bounds import Limits, bound, per_sequence
from patterns.attention.masks.masks import Masks


@dataclass(frozen=True)
class FixedKeys(Group):
    """Numbers of keys that every query sees in addition to its list, None for none.

    Attributes:
        first: number of first keys.
        last: number of last keys, up to the key high + offset of a query.
        high: [B], None for 0.
        offset: integer added to `high`.
        moving: True if query i sees keys up to high + offset + i.
    """

    first: Any = attribute()
    last: Any = attribute()
    high: Any = tensor("B", optional=True)
    offset: Any = attribute()
    moving: Any = attribute()

    def append_to(self, places: Tensor) -> Tensor:
        """Append to lists `places` [B, S, K] the positions of the first and of the last keys; -1 where there is no such
        key.
        """
        batch, queries = places.shape[:2]
        parts = [places]
        if self.first:
            parts.append(_count(self.first, places).expand(batch, queries, -1))
        if self.last:
            high = self.offset if self.high is None else (self.high.to(torch.int32) + self.offset).reshape(batch, 1)
            ends = (_count(queries, places) if self.moving else torch.zeros_like(_count(queries, places))) + high
            near = ends.unsqueeze(-1) - _count(self.last, places)
            parts.append(near.clamp(min=-1).expand(batch, queries, -1))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else places


def _count(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, dtype=like.dtype, device=like.device)


def split(masks: Masks, bounds: Limits) -> tuple[Leaf, dict[str, Any], Limits] | None:
    """Split the conditions `bounds` of a mask that shows listed keys or fixed ones: one "or" among `bounds.rest`.

    Returns the list in it, the captures of `FixedKeys`, and the conditions besides the "or". An "or" of the form
    (listed and shown) or j < first stays among these, since `shown` may hide a listed key.

    None if there is not exactly one "or" with one list, or if another side of the "or" shows other keys than the first
    or the last ones.
    """
    choices = [part for part in bounds.rest if not isinstance(part, bool) and part[0] == "or"]
    lists = [leaf for each in choices for part in each[1] for leaf in map(list_of, conjuncts(part)) if leaf]
    if len(choices) != 1 or len(lists) != 1:
        return None
    others = Limits(bounds.high, bounds.low, bounds.moving, tuple(x for x in bounds.rest if x is not choices[0]))
    fixed: dict[str, Any] = {}
    hidden = False
    for part in choices[0][1]:
        listed = any(list_of(each) for each in conjuncts(part))
        hidden |= listed and list_of(part) is None
        captures = {} if listed else _fixed(masks, part, others)
        if captures is None or set(captures) & set(fixed):
            return None
        fixed |= captures
    if hidden and set(fixed) != {"first"}:
        return None
    return lists[0], fixed, replace(others, rest=(*others.rest, choices[0])) if hidden else others


def list_of(part: Formula) -> Leaf | None:
    """Return the list if `part` is the condition that the key is in a list; None if it is any other condition."""
    return part[1] if not isinstance(part, bool) and part[0] == "is" and part[1].value.op == "chosen" else None


def _fixed(masks: Masks, part: Formula, bounds: Limits) -> dict[str, Any] | None:
    """Read the condition `part` as "one of the first keys", or as "one of the last keys before the upper bound in
    `bounds`".

    Returns `first`, or `last` with the captures of the bound. None if `part` is any other condition, if the number of
    keys is symbolic, or, for last keys, if `bounds`, the rest of `masks`, has more than an upper bound.
    """
    rank, keys = len(masks.positions.shape), masks.sizes[3]
    side, at, move = bound(part, rank - 2, rank - 1) or ("", None, 0)
    if at is None or not isinstance(keys, int):
        return None
    if side == "high":
        return None if move or not _is_within(at.plus(1), keys) else {"first": at.constant + 1}
    high = number(keys - 1) if bounds.high is None else bounds.high
    if bounds.low is not None or bounds.rest or bool(move) != bounds.moving:
        return None
    span = high.plus(1) + at.times(-1)
    start = per_sequence(masks.a, high, masks.sizes[0])
    if not _is_within(span, keys) or (start is None and (high.terms or not isinstance(high.constant, int))):
        return None
    captures = {"last": span.constant, "moving": bounds.moving}
    return {**captures, "offset": high.constant} if start is None else {**captures, "offset": 0, "high": start}


def _is_within(count: Affine, keys: int) -> bool:
    """Return True if `count` is a constant number of keys, at least 1 and at most `keys`."""
    return not count.terms and isinstance(count.constant, int) and 0 < count.constant <= keys
