"""out[j] = x[j]·cos[j] ∓ x[partner(j)]·sin[j]: a rotation of pairs of lanes, proven lane by lane in any spelling.

The pairs are (p, p + D/2) in "half" order or (2p, 2p + 1) in "interleaved" order; input and output may differ in order.
Tables become full-width values [.., D] that are read at the lane of the result; by the negative angle, minus the sines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from fusion import reader, word
from fusion.analysis.lane_products import Leaves, Term, terms
from fusion.analysis.lanes import NONE, Index, Rows, rows
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from patterns.rotary.pairs import ORDERS, Side, align, pairs_of, refusal, runs, side_of, unpaired
from patterns.rotary.tables import KnownTables

_ROTATED: dict[str, str] = {
    "x": "[.., D]", "cos": "[.., D]", "sin": "[.., D]", "dtype": "of the result",
    "source": '"half" or "interleaved": which lanes of x are pairs', "result": "the same of the result",
}  # fmt: skip
ROTATION = word("rotation", "pairs of lanes turned by angles of which cos and sin are given [.., D]", **_ROTATED)
PARTIAL_ROTATION = word(
    "partial_rotation",
    "some of the lanes turned, the others as they are [.., D + E]",
    **_ROTATED, rest="[.., E]", rest_first="whether these stand first",
)  # fmt: skip


class _Sum(NamedTuple):
    """A value as a sum of two products, lane by lane, and the lanes that both make up."""

    value: Value
    terms: list[Term]
    leaves: Leaves
    where: Index


_TURNING = ("add", "cat", "reshape", "slice_scatter", "cast")
"""Ops of values that may be rotations."""


@reader(gives=(ROTATION, PARTIAL_ROTATION))
def rotations(graph: Graph) -> Iterator[Found]:
    """Rotations of lanes, of values that nodes hold; one that only carries another along is none of its own."""
    turned: set[Value] = set()
    known = KnownTables(graph.algebra, graph.places)
    for value in list(graph.places):
        if not _may_turn(value) or (value.op == "cast" and value.arg in graph.places):
            continue
        outcome = rotation(known, value, whole=_stands_on_one(graph, value, turned))
        if isinstance(outcome, str):
            yield value, Miss("rotation", outcome)
        elif outcome is not None:
            turned.add(value)
            yield value, outcome


def _may_turn(value: Value) -> bool:
    """Whether an op may end a rotation: of those that scale, what makes a sum of two products of their mean."""
    return value.op in _TURNING or (value.op == "scale" and value.below("scale", "reshape").op == "mean")


def _stands_on_one(graph: Graph, value: Value, turned: Collection[Value], depth: int = 3) -> bool:
    """Whether a rotation stands closely below the user's own node, so that this one only carries it along."""
    nodes = graph.places[value][:1]
    for _ in range(depth):
        nodes = tuple(source for node in nodes for source in node.all_input_nodes)
        if any(graph.held.get(node) in turned for node in nodes):
            return True
    return False


def rotation(known: KnownTables, root: Value, whole: bool = False) -> Reading | str | None:
    """Read `root` as a rotation; of `whole` ones only one of all lanes, and no reason why it is none.

    Returns the reading ("rotation", or "partial_rotation" where some lanes pass through), the reason why something
    that looks like one is not, or None.
    """
    at = rows(root)
    if at is None or not _multiplies(root) or root.dtype is None or not root.dtype.is_floating_point:
        return None
    if whole and not _may_turn_all(root):
        return None
    leaves = Leaves()
    outcome = _summed(known, root, at, leaves, whole)
    if not isinstance(outcome, Reading) and leaves.joined:
        outcome = _summed(known, root, at, Leaves(rounded=known.algebra.cast), whole) or outcome
    return None if whole and isinstance(outcome, str) else outcome


def _summed(known: KnownTables, root: Value, at: Rows, leaves: Leaves, whole: bool) -> Reading | str | None:
    """The reading of a sum of two products; why none where a third term is added."""
    found = terms(at, leaves)
    if found is None or (whole and not _turns_all(found)):
        return None
    if len(found) == 3:
        pairs = ([found[0], found[1]], [found[0], found[2]], [found[1], found[2]])
        turned = any(isinstance(_turned(known, root, pair, leaves), Reading) for pair in pairs)
        return (
            "a third term is added to the rotation; npu_rotary_mul requires x · cos + partner(x) · "
            "sin alone; add it behind"
            if turned
            else None
        )
    return _turned(known, root, found, leaves) if len(found) == 2 else None


def _turns_all(found: Sequence[Term]) -> bool:
    """Whether every lane is a sum of two products."""
    return len(found) == 2 and all((each.second.leaf != NONE).all() for each in found)


def _turned(known: KnownTables, root: Value, found: list[Term], leaves: Leaves) -> Reading | str | None:
    """The reading of a sum of two products."""
    turned = (found[0].second.leaf != NONE) & (found[1].second.leaf != NONE)
    where = np.nonzero(turned)[0]
    if len(where) < 2 or len(where) % 2 or where[-1] - where[0] + 1 != len(where):
        return None
    both, reason = _Sum(root, found, leaves, where), None
    of_one, of_other = ({*each.first.leaf[where].tolist(), *each.second.leaf[where].tolist()} for each in found)
    for leaf in sorted(of_one & of_other):
        outcome = _classify(known, both, leaf)
        if isinstance(outcome, Reading):
            return outcome
        reason = reason or outcome
    return reason or _apart(both)


def _apart(found: _Sum) -> str | None:
    """Why two products without a tensor in common look like a rotation all the same."""
    factors = [side for term in found.terms for side in (term.first, term.second)]
    numbers = {int(number) for side in factors for number in side.leaf[found.where]}
    values = [found.leaves.found[number][0] for number in sorted(numbers)]
    for value in values:
        pieces = [each.arg if each.op == "scale" else each for each in value.args]
        if value.op == "cat" and any(each.op == "slice" and each.arg in values for each in pieces):
            return f"the rotation is along dim {value.attrs[0] - value.rank}, not along the last dim"
    signs = [np.sign(term.coefficient[found.where]) for term in found.terms]
    both = any((each > 0).any() and (each < 0).any() for each in signs)
    return "the term with the sine rotates another tensor than the one with the cosine" if both else None


def _multiplies(value: Value, depth: int = 8) -> bool:
    """Whether a product stands closely below `value`: a cheap test before the lanes are followed."""
    if value.op == "mul" or (value.op == "matmul" and value.arg.shape[-1] == 2):
        return True
    moving = ("add", "scale", "cast", "reshape", "permute", "slice", "cat", "slice_scatter", "mean")
    return depth > 0 and value.op in moving and any(_multiplies(each, depth - 1) for each in value.args)


def _may_turn_all(value: Value) -> bool:
    """Whether all lanes may be sums of two products: a test as cheap, as one of a part is often joined with others."""
    match value.op:
        case "add":
            return all(map(_multiplies, value.args))
        case "matmul":
            return value.arg.shape[-1] == 2
        case "mean" | "mul":
            return True
        case "cat" | "slice_scatter":
            return all(map(_may_turn_all, value.args))
        case "scale" | "cast" | "reshape" | "permute" | "expand" | "slice" | "flip":
            return _may_turn_all(value.arg)
        case _:
            return False


def _classify(known: KnownTables, found: _Sum, leaf: int) -> Reading | str | None:
    """The reading if it is this leaf whose lanes are turned."""
    left, right = (side_of(term, leaf, found.where) for term in found.terms)
    if left is None or right is None:
        return None
    reason: str | None = None
    lanes = np.concatenate((left.lane, right.lane))
    are_all = lanes.max() - lanes.min() == len(left.lane) - 1  # as of pairs in either order
    for source, result in product(ORDERS, ORDERS) if are_all else ():
        aligned = align(left, right, source, result)
        if aligned is None:
            continue
        reason = refusal(*aligned, pairs_of(result, len(found.where)))
        if reason is None:
            return _reading(known, found, leaf, aligned, {"source": source, "result": result})
    return reason or (unpaired(left, right) if found.value.rank > 1 else None)  # one row is no lanes of tokens


def _reading(
    known: KnownTables, found: _Sum, leaf: int, sides: Sequence[Side], orders: Mapping[str, str]
) -> Reading | str:
    """The rotation of lanes of a leaf by tables that are read at the lanes of the result."""
    a, (root, _, leaves, where) = known.algebra, found
    size, compute = len(where), _compute_dtype(leaves)
    first = int(min(each.lane.min() for each in sides))
    flat, factor = known.factored(_flat(a, *leaves.found[leaf]), float(sides[0].factor[0]))
    x = a.slice(flat, -1, first, first + size)
    if x is None or x.shape != (*root.shape[:-1], size):
        return "the rotated tensor is broadcast along the tables"
    cos, sin = (_table(known, leaves, each, factor) for each in sides)
    if cos is None or sin is None:
        return "the table is read in an order that is neither full, repeated by halves nor repeated by pairs"
    tables = {"cos": a.cast(cos, compute), "sin": a.cast(sin, compute)}
    captures = {"x": a.cast(x, compute), **tables, "dtype": root.dtype, **orders}
    if size == root.shape[-1]:
        return Reading("rotation", captures)
    rest = _passing(a, found)
    if rest is None:
        return "the lanes that are not rotated do not pass through unchanged"
    return Reading("partial_rotation", captures | {"rest": rest, "rest_first": bool(where[0] != 0)})


def _table(known: KnownTables, leaves: Leaves, side: Side, without: float) -> Value | None:
    """The table by which all lanes are multiplied, `without` a factor of theirs; joined where runs of lanes have tables
    of their own.
    """
    pieces: list[Value] = []
    for start, stop in runs(side.table):
        flat = _flat(known.algebra, *leaves.found[int(side.table[start])])
        piece = known.scaled(flat, side.entry[start:stop], float(side.factor[0]) / without)
        if piece is None or piece.shape[:-1] != (pieces or [piece])[0].shape[:-1]:
            return None
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else known.algebra.cat(pieces, -1)


def _compute_dtype(leaves: Leaves) -> torch.dtype | None:
    """The dtype of the products; where they differ, one that holds all of them and what they are made of."""
    made_of = {leaf.dtype for leaf, _ in leaves.found} if len(leaves.computed) > 1 else set()
    return reduce(torch.promote_types, [each for each in leaves.computed | made_of if each is not None])


def _flat(a: Algebra, leaf: Value, depth: int) -> Value:
    """A tensor with its last dims as one run of lanes."""
    lead = leaf.rank - depth
    return a.reshape(leaf, (*leaf.shape[:lead], prod(leaf.shape[lead:])))


def _passing(a: Algebra, found: _Sum) -> Value | None:
    """The lanes beside the rotated ones, as one value."""
    root, both, leaves, where = found
    first, second = both  # lanes that are one term have no second one
    others = np.setdiff1d(np.arange(len(first.coefficient)), where)
    leaf, lane = first.first.leaf[others], first.first.index[others]
    whole = (leaf == leaf[0]).all() and (np.diff(lane) == 1).all() and (first.coefficient[others] == 1).all()
    if (np.diff(others) != 1).any():
        return None
    alone = (first.second.leaf[others] == NONE).all() and (second.first.leaf[others] == NONE).all()
    if not whole or not alone:  # as those of a norm are not, which are terms themselves
        return _joined_beside(a, root, int(others[0]), int(others[-1]) + 1)
    rest = a.slice(_flat(a, *leaves.found[int(leaf[0])]), -1, int(lane[0]), int(lane[-1]) + 1)
    return rest if rest is not None and rest.shape[:-1] == root.shape[:-1] and rest.dtype == root.dtype else None


def _joined_beside(a: Algebra, root: Value, start: int, stop: int) -> Value | None:
    """The lanes from `start` up to `stop`, where they are a value of their own that `root` is joined from."""
    joined, rest = root.below("reshape", "cast"), a.slice(root, -1, start, stop)
    if joined.op == "slice_scatter":
        return _beside_written(a, joined, root.shape, start, stop) if joined.dtype == root.dtype else None
    pieces = [each.below("reshape", "cast") for each in joined.args] if joined.op == "cat" else []
    return rest if rest is not None and rest.below("reshape", "cast") in pieces else None


def _beside_written(a: Algebra, written: Value, shape: tuple[Any, ...], start: int, stop: int) -> Value | None:
    """The lanes from `start` up to `stop` of `shape`, where others are written into what is no cache."""
    axis, first, last, step = written.attrs
    x = written.arg
    if (axis, step) != (x.rank - 1, 1) or x.shape[-1] != shape[-1] or (start < last and first < stop):
        return None
    if x.below("reshape", "cast", "slice", "slice_scatter", "write", "write_rows").op == "input":
        return None
    return a.slice(a.reshape(x, shape), -1, start, stop)
