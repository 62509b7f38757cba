"""What the user says of a mask that is passed in, as a formula over its positions; `fusion.assumptions` checks it.

Counted from the mask itself is only how many keys the first query of each sequence sees; where there are as many
queries as keys, not even that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, conjunction
from fusion.facts import window
from fusion.graph import Algebra, Value
from patterns.attention.masks import hidden


@dataclass(frozen=True)
class Assumed:
    """The assumptions about the inputs of one graph, by name: "causal", "window:n" or "padding"."""

    algebra: Algebra
    kinds: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def visible(self, mask: Value, at: Sequence[Affine]) -> Formula | None:
        """Where a mask [B | 1, N | 1, S, T] or [N | 1, S, T] shows a key; None where nothing is assumed of it."""
        kind = self.kinds.get(mask.attrs[0]) if mask.op == "input" and mask.attrs[1] == 0 else None
        if kind is None or mask.rank not in (3, 4):
            return None
        last = None if kind == "padding" else self._last(mask, at)
        if last is None:  # then all that is said is that an added mask is one
            return ("is", Leaf(mask, tuple(at))) if _is_added(mask) else None
        ahead = at[-1] + at[-2].times(-1) + last.times(-1)
        keys = window(kind)
        if keys is None:
            return ("le", ahead)
        return conjunction(("le", ahead), ("le", ahead.times(-1).plus(1 - keys)))

    def _last(self, mask: Value, at: Sequence[Affine]) -> Affine | None:
        """The last key that query 0 sees: L_b − S; None where it cannot be counted."""
        queries, keys = mask.shape[-2:]
        if queries == keys:
            return Affine()
        if window(self.kinds[mask.attrs[0]]) is not None:
            return None
        counted = Leaf(self._count(mask), tuple(at[:-3]))
        return Affine(MappingProxyType({counted: 1}), -1)

    def _count(self, mask: Value) -> Value:
        """How many keys the first query sees: [B | 1], or one number [] for a mask without B."""
        a = self.algebra
        row: Any = mask
        for axis in range(mask.rank - 3, mask.rank - 1):
            row = a.slice(row, axis, 0, 1)
        assert row is not None  # the first of at least one
        lead = mask.shape[:-3]
        return a.make("count", (_shown(a, a.reshape(row, (*lead, mask.shape[-1]))),), (), lead, torch.int64)


def _is_added(mask: Value) -> bool:
    return mask.dtype is not None and mask.dtype.is_floating_point


def _shown(a: Algebra, mask: Value) -> Value:
    """The mask as booleans, true where a key is seen: floats are added to scores, everything else chooses."""
    if not _is_added(mask):
        return a.cast(mask, torch.bool)
    return a.make("not", (hidden(a, mask),), (), mask.shape, torch.bool)
