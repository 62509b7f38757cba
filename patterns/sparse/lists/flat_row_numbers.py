"""Row numbers across all sequences, each of T rows: number = g · T + place, in sequence g.

kv.reshape(-1, D)[places + torch.arange(B)[:, None] * T]
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fusion.analysis.consecutive_positions import iota
from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import must, proof


class Split(NamedTuple):
    """Row numbers [*R] of `groups` groups of `size` rows each, as `places` [*R] within their groups."""

    places: Value
    groups: int
    size: int


def split(a: Algebra, numbers: Value) -> Split | None:
    """Split row `numbers` [*R] = g · size + place into the group g and the `place` of a row in it.

    In row-major order, the first R / G numbers must be of group 0, the next ones of group 1. None if `numbers` is no
    such sum, or if a place is not proven to be in 0 .. size - 1.
    """
    total = uncast(numbers, "reshape")
    sides = total.operands("add")
    splits = (_by(a, total, place, first) for place, first in sides)
    return next((each._replace(places=a.reshape(each.places, numbers.shape)) for each in splits if each), None)


@proof
def _by(a: Algebra, total: Value, places: Value, first: Value) -> Split | None:
    """Split `total` = `places` + `first`, where `first` is arange(G) · size; None if it is not, or `places` exceed a
    group.
    """
    scaled = uncast(first, "reshape")
    must(scaled.op == "scale" and float(scaled.attrs[0]).is_integer())
    counted, size = uncast(scaled.arg, "reshape"), int(scaled.attrs[0])
    groups = counted.shape[0] if counted.rank == 1 else 0
    must(isinstance(groups, int) and iota(counted) == 0)
    aligned = (1,) * (total.rank - first.rank) + first.shape
    dim = next((each for each, extent in enumerate(aligned) if extent != 1), 0)
    must(prod(total.shape[:dim]) == 1 and aligned[dim] == groups == prod(aligned))
    low, high = bounds(places)
    must(dim < total.rank - 1 and low >= 0 and high < size)
    return Split(a.expand(places, total.shape), int(groups), size)
