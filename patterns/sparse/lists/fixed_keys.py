"""Keys that a query sees beside those in its list: the first ones, or the last ones that it may see at all.

    seen = (listed or j < first or j > high − last) and j ≤ high        or        (listed and shown) or j < first

One list holds all of them, each key once.
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
    """How many keys every query sees beside its list, None where there are none.

    Attributes:
        first: of the first ones.
        last: of the last ones up to `high`, [B], plus `offset`, and for query i plus i if that is `moving`.
    """

    first: Any = attribute()
    last: Any = attribute()
    high: Any = tensor("B", optional=True)
    offset: Any = attribute()
    moving: Any = attribute()

    def beside(self, places: Tensor) -> Tensor:
        """Lists [B, S, K] with all of them; negative numbers name none."""
        batch, queries = places.shape[:2]
        found = [places]
        if self.first:
            found.append(_count(self.first, places).expand(batch, queries, -1))
        if self.last:
            high = self.offset if self.high is None else (self.high.to(torch.int32) + self.offset).reshape(batch, 1)
            ends = (_count(queries, places) if self.moving else torch.zeros_like(_count(queries, places))) + high
            near = ends.unsqueeze(-1) - _count(self.last, places)
            found.append(near.clamp(min=-1).expand(batch, queries, -1))
        return torch.cat(found, dim=-1) if len(found) > 1 else places


def _count(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, dtype=like.dtype, device=like.device)


def split(masks: Masks, bounds: Limits) -> tuple[Leaf, dict[str, Any], Limits] | None:
    """What is listed, the keys beside it in words, and the bounds of both; None where they are others.

    Where the first keys are seen whatever hides those that are listed, that is asked for in the bounds too.
    """
    choices = [part for part in bounds.rest if not isinstance(part, bool) and part[0] == "or"]
    lists = [leaf for each in choices for part in each[1] for leaf in map(list_of, conjuncts(part)) if leaf]
    if len(choices) != 1 or len(lists) != 1:
        return None
    others = Limits(bounds.high, bounds.low, bounds.moving, tuple(x for x in bounds.rest if x is not choices[0]))
    found: dict[str, Any] = {}
    hidden = False
    for part in choices[0][1]:
        listed = any(list_of(each) for each in conjuncts(part))
        hidden |= listed and list_of(part) is None
        said = {} if listed else _fixed(masks, part, others)
        if said is None or set(said) & set(found):
            return None
        found |= said
    if hidden and set(found) != {"first"}:
        return None
    return lists[0], found, replace(others, rest=(*others.rest, choices[0])) if hidden else others


def list_of(part: Formula) -> Leaf | None:
    """The list that says True, where that is all of it."""
    return part[1] if not isinstance(part, bool) and part[0] == "is" and part[1].value.op == "chosen" else None


def _fixed(masks: Masks, part: Formula, bounds: Limits) -> dict[str, Any] | None:
    """The first keys, or the last ones below an upper bound that is all there is; None for any others."""
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
    found = {"last": span.constant, "moving": bounds.moving}
    return {**found, "offset": high.constant} if start is None else {**found, "offset": 0, "high": start}


def _is_within(count: Affine, keys: int) -> bool:
    """Whether that is a number of keys, of which there are so many."""
    return not count.terms and isinstance(count.constant, int) and 0 < count.constant <= keys
