"""Numbers among the rows of all sequences, each of which has T: number = g · T + place, of sequence g.

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
    """Places [*R] of flat numbers within their groups, of which there are so many of so many rows each."""

    places: Value
    groups: int
    size: int


def split(a: Algebra, numbers: Value) -> Split | None:
    """Flat numbers as places within groups, those of row-major numbers in the first group, the next, ..

    None where they are not proven to lie in the group whose first row is added to them.
    """
    total = uncast(numbers, "reshape")
    sides = (total.args, total.args[::-1]) if total.op == "add" else ()
    found = (_by(a, total, place, first) for place, first in sides)
    return next((each._replace(places=a.reshape(each.places, numbers.shape)) for each in found if each), None)


@proof
def _by(a: Algebra, total: Value, places: Value, first: Value) -> Split | None:
    """The same where `first` is the number of the first row of every group."""
    scaled = uncast(first, "reshape")
    must(scaled.op == "scale" and float(scaled.attrs[0]).is_integer())
    counted, size = uncast(scaled.arg, "reshape"), int(scaled.attrs[0])
    groups = counted.shape[0] if counted.rank == 1 else 0
    must(isinstance(groups, int) and iota(counted) == 0)
    aligned = (1,) * (total.rank - first.rank) + first.shape
    dim = next((each for each, of in enumerate(aligned) if of != 1), 0)
    must(prod(total.shape[:dim]) == 1 and aligned[dim] == groups == prod(aligned))
    low, high = bounds(places)
    must(dim < total.rank - 1 and low >= 0 and high < size)
    return Split(a.expand(places, total.shape), int(groups), size)
