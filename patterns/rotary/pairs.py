"""Pairs of lanes of a rotation: each lane of x, its partner and their order, or the reason why there are none."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion.analysis.lane_products import Term
from fusion.analysis.lanes import Index
from patterns.rotary.orders import HALF, INTERLEAVED

ORDERS = (HALF, INTERLEAVED)


class Side(NamedTuple):
    """One product of a rotation, as arrays over the lanes of the result.

    Attributes:
        lane: the lane of x.
        table: the number of the leaf by which the lane is multiplied.
        entry: the lane of that leaf.
        factor: the constant factor.
    """

    lane: Index
    table: Index
    entry: Index
    factor: NDArray[np.float64]


def side_of(term: Term, leaf: int, where: Index) -> Side | None:
    """Read `term` at the lanes `where` as a product of the leaf number `leaf` with a table.

    None unless exactly one factor of each lane is of that leaf.
    """
    first, second = term.first, term.second
    in_first, in_second = first.leaf[where] == leaf, second.leaf[where] == leaf
    if not (in_first ^ in_second).all():
        return None
    lane = np.where(in_first, first.index[where], second.index[where])
    table = np.where(in_first, second.leaf[where], first.leaf[where])
    entry = np.where(in_first, second.index[where], first.index[where])
    return Side(lane, table, entry, term.coefficient[where])


def pairs_of(order: str, size: int) -> Index:
    """Return the lanes of each pair [size / 2, 2], in "half" or "interleaved" `order`."""
    lanes = np.arange(size)
    return lanes.reshape(2, -1).T if order == HALF else lanes.reshape(-1, 2)


def align(left: Side, right: Side, source: str, result: str) -> tuple[Side, Side] | None:
    """Sort the products `left` and `right` into that of each lane itself (cos) and that of its partner (sin).

    `source` and `result` are the orders of pairs before and after the rotation. The factors of sin are multiplied by
    the signs of a rotation, so that one factor is left. None where lanes have another order.
    """
    size, base = len(left.lane), min(left.lane.min(), right.lane.min())
    lanes, to = pairs_of(source, size), pairs_of(result, size)
    own, partner, sign = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size)
    own[to], partner[to], sign[to] = base + lanes, base + lanes[:, ::-1], (-1.0, 1.0)
    straight = (left.lane == own) & (right.lane == partner)
    crossed = (right.lane == own) & (left.lane == partner)
    if not (straight | crossed).all():
        return None
    cos, sin = (
        Side(*(np.where(straight, *each) for each in zip(*both, strict=True)))
        for both in ((left, right), (right, left))
    )
    return cos, sin._replace(factor=sin.factor * sign)


def refusal(cos: Side, sin: Side, pairs: Index) -> str | None:
    """Return the reason why products of lanes (`cos`) and of partners (`sin`) are no rotation; None if they are one.

    `pairs` [D / 2, 2] are the lanes of each pair of the result.
    """
    differ = any((each.table[pairs[:, 0]] != each.table[pairs[:, 1]]).any() for each in (cos, sin))
    if differ or any(stop - start < 2 for each in (cos, sin) for start, stop in runs(each.table)):
        return (
            "cos, sin: lanes take them from different tensors; npu_rotary_mul requires one table of "
            "cosines and one of sines; join them along the lanes"
        )
    gain = cos.factor[0]
    if gain <= 0 or not (cos.factor == gain).all():
        return (
            "cos: its terms have different factors, or negative ones; npu_rotary_mul requires x · cos with "
            "one positive factor, which its table holds; multiply the table by the factors"
        )
    if not (sin.factor == sin.factor[0]).all():
        if (cos.table == sin.table).all() and len({*cos.entry, *sin.entry}) == 2 * len(cos.lane):
            return (
                "matrices: each pair is multiplied by its own, which is not proven to be [[cos, -sin], [sin, "
                "cos]]; npu_rotary_mul requires that; write it of one table of cosines and one of sines"
            )
        return (
            "sin: its terms do not have one plus and one minus in each pair; npu_rotary_mul requires x1 * cos "
            "- x2 * sin and x2 * cos + x1 * sin"
        )
    return None


def unpaired(left: Side, right: Side) -> str | None:
    """Return the reason why `left` and `right`, two products of lanes of one tensor, are no rotation.

    Each lane is its own partner, or pairs have another order. None if the result has no pairs of lanes.
    """
    if (left.lane == right.lane).all():
        return (
            "lanes: each is combined with itself; npu_rotary_mul requires the partner of its pair, j and j + "
            "D/2, or 2j and 2j + 1"
        )
    _, uses = np.unique(np.concatenate((left.lane, right.lane)), return_counts=True)
    if len(uses) != len(left.lane) or (uses != 2).any():
        return None  # as of one half of a rotation, or of weighted sums: the result holds no pairs of lanes
    return (
        "lanes: their partners are in other places than half order (j, j + D/2) or interleaved order (2j, 2j + "
        "1); npu_rotary_mul requires one of both; permute the rows of the projection so"
    )


def runs(numbers: Index) -> list[tuple[int, int]]:
    """List the start and the end of each run of equal numbers."""
    bounds = [0, *(np.nonzero(np.diff(numbers))[0] + 1).tolist(), len(numbers)]
    return list(pairwise(bounds))
