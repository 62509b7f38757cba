"""Row numbers across all sequences, each of T rows: number = g · T + place, in sequence g.

kv.reshape(-1, D)[places + torch.arange(B)[:, None] * T]
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fusion.analysis.intervals import bounds, uncast
from fusion.analysis.runs import iota
from fusion.graph import Algebra, Value
from fusion.graph.proof import must, proof


class Split(NamedTuple):
    """Positions [*R] of row numbers within `groups` groups of `size` rows each."""

    places: Value
    groups: int
    size: int


def split(a: Algebra, numbers: Value) -> Split | None:
    """Split row `numbers` into group and position within the group.

    In row-major order the numbers are G equal parts, one for each group.

    None if a number is not proven to be in the group whose first row is added to it.
    """
    total = uncast(numbers, "reshape")
    sides = (total.args, total.args[::-1]) if total.op == "add" else ()
    splits = (_by(a, total, place, first) for place, first in sides)
    return next((each._replace(places=a.reshape(each.places, numbers.shape)) for each in splits if each), None)


@proof
def _by(a: Algebra, total: Value, places: Value, first: Value) -> Split | None:
    """Split `total` = `places` + `first`, where `first` is the number of the first row of each group."""
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
