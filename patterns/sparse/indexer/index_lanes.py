"""Queries and keys of an indexer: the first of their lanes are rotated, as both operators of custom_pypto do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import Group, attribute, require
from patterns.kit.orders import HALF, INTERLEAVED
from patterns.rotary.token_tables import rotated_lanes

EPSILON_OF_KEYS = 1e-6
"""What both add under the root of the norm of the keys."""


@dataclass(frozen=True)
class Lanes(Group):
    """Which lanes of queries and keys alike are rotated: those up to `split` of `end`."""

    split: Any = attribute()
    end: Any = attribute()


@dataclass(frozen=True)
class RotatedLanes(Group):
    """How the first lanes of queries, or keys, of an indexer are rotated."""

    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def term(self, p, x, lanes, tables, like, heads_first):
        """They, joined with the others."""
        first, rest = p.lanes(x, 0, lanes.split), p.lanes(x, lanes.split, lanes.end)
        return p.joined(rotated_lanes(p, first, tables, self, like, heads_first), rest)

    def guard(self, what: str) -> None:
        """Refuse lanes that the operator would rotate otherwise."""
        orders = dict(what=what, source=self.source, result=self.result)
        said = "{what} of the indexer go from {source} to {result} order, in the operator from pairs to halves"
        require((self.source, self.result) == (INTERLEAVED, HALF), said, **orders)
