"""Queries and keys of an indexer whose first lanes are rotated, as by both operators of custom_pypto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import Group, attribute, require
from patterns.rotary.orders import HALF, INTERLEAVED
from patterns.rotary.token_tables import rotated_lanes

EPSILON_OF_KEYS = 1e-6
"""Epsilon of the layer norm of the keys in both operators."""


@dataclass(frozen=True)
class Lanes(Group):
    """Lanes of queries and keys of an indexer: [0, split) are rotated, [split, end) are not."""

    split: Any = attribute()
    end: Any = attribute()


@dataclass(frozen=True)
class RotatedLanes(Group):
    """Rotation of the first lanes of queries, or of keys, of an indexer.

    Attributes:
        source: order of the lanes before the rotation, as in `patterns.rotary.orders`.
        result: order of the lanes after it.
        dtype: dtype of the rotation.
    """

    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def term(self, p, x, lanes, tables, like, heads_first):
        """Return the term of `x` [.., D] with its first `lanes.split` lanes rotated, joined with the lanes up to
        `lanes.end`.

        `tables` hold the cosines and sines; `like` and `heads_first` are passed to `rotated_lanes`.
        """
        first, rest = p.lanes(x, 0, lanes.split), p.lanes(x, lanes.split, lanes.end)
        return p.joined(rotated_lanes(p, first, tables, self, like, heads_first), rest)

    def guard(self, what: str, operator: str) -> None:
        """Refuse a rotation other than that of `operator`, from interleaved pairs to halves.

        `what` names the rows, queries or keys, in the reason.
        """
        given = dict(what=what, source=self.source, result=self.result, operator=operator)
        reason = (
            "{what} of the indexer: they are rotated from {source} to {result} order; {operator} requires "
            "interleaved pairs before and halves behind; permute the rows of their projection so"
        )
        require((self.source, self.result) == (INTERLEAVED, HALF), reason, **given)
