"""out[j] = x[j]·cos[j] ∓ x[partner(j)]·sin[j]: a rotation of pairs of lanes, proven lane by lane in any spelling.

The pairs are (p, p + D/2) in "half" order or (2p, 2p + 1) in "interleaved" order; input and output may differ in order.
Tables become full-width values [.., D], indexed by the lane of the result; a rotation by the negative angle has negated
sines.
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
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from patterns.rotary.pairs import ORDERS, Side, align, pairs_of, refusal, runs, side_of, unpaired
from patterns.rotary.tables import KnownTables

_ROTATED: dict[str, str] = {
    "x": "[.., D]", "cos": "[.., D]", "sin": "[.., D]", "dtype": "of the result",
    "source": 'the order of pairs of lanes of x, "half" or "interleaved"', "result": "the order of pairs of the result",
}  # fmt: skip
ROTATION = word("rotation", "x[j]·cos[j] ∓ x[partner(j)]·sin[j], pairs of lanes rotated by tables [.., D]", **_ROTATED)
PARTIAL_ROTATION = word(
    "partial_rotation",
    "the concatenation of rotated lanes [.., D] and others that are not rotated [.., E]",
    **_ROTATED, rest="the lanes that are not rotated, [.., E]", rest_first="true if `rest` is first",
)  # fmt: skip


class _Sum(NamedTuple):
    """A value that is a sum of two products at some lanes.

    Attributes:
        value: the value.
        terms: the products of each lane.
        leaves: the tensors that the products are of.
        where: the lanes at which both products exist.
    """

    value: Value
    terms: list[Term]
    leaves: Leaves
    where: Index


_LAST_OPS = ("add", "cat", "reshape", "slice_scatter", "cast")
"""Ops of values that may be rotations."""


@reader(gives=(ROTATION, PARTIAL_ROTATION))
def rotations(graph: Graph) -> Iterator[Annotation]:
    """Read every rotation of lanes as `rotation` or `partial_rotation`, but not nodes that pass on another rotation."""
    rotated: set[Value] = set()
    known = KnownTables(graph.algebra, graph.places)
    for value in list(graph.places):
        if not _may_be_rotation(value) or (value.op == "cast" and value.arg in graph.places):
            continue
        outcome = rotation(known, value, full=_is_above_rotation(graph, value, rotated))
        if isinstance(outcome, str):
            yield value, Miss("rotation", outcome)
        elif outcome is not None:
            rotated.add(value)
            yield value, outcome


def _may_be_rotation(value: Value) -> bool:
    """Return True if the op of `value` may be the last one of a rotation.

    It is a sum, a concatenation or write of lanes, a view or a cast; or a scaled mean, as a mean over two products is
    their sum.
    """
    return value.op in _LAST_OPS or (value.op == "scale" and value.below("scale", "reshape").op == "mean")


def _is_above_rotation(graph: Graph, value: Value, rotated: Collection[Value], depth: int = 3) -> bool:
    """Return True if `value` is computed from a rotation in `rotated` by at most `depth` nodes.

    It is then more likely to pass that rotation on than to be another one.
    """
    nodes = graph.places[value][:1]
    for _ in range(depth):
        nodes = tuple(source for node in nodes for source in node.all_input_nodes)
        if any(graph.value_of.get(node) in rotated for node in nodes):
            return True
    return False


def rotation(known: KnownTables, root: Value, full: bool = False) -> Reading | str | None:
    """Read `root` as a rotation of all its lanes, or of some where others pass through.

    Args:
        known: the tables of the graph.
        root: the value.
        full: True to read only rotations of all lanes, without reasons for others.

    Returns:
        The reading ("rotation" or "partial_rotation"), the reason why a similar value is no rotation, or None.
    """
    at = rows(root)
    if at is None or not _multiplies(root) or root.dtype is None or not root.dtype.is_floating_point:
        return None
    if full and not _may_be_full(root):
        return None
    leaves = Leaves()
    outcome = _summed(known, root, at, leaves, full)
    if not isinstance(outcome, Reading) and leaves.joined:
        outcome = _summed(known, root, at, Leaves(rounded=known.algebra.cast), full) or outcome
    return None if full and isinstance(outcome, str) else outcome


def _summed(known: KnownTables, root: Value, at: Rows, leaves: Leaves, full: bool) -> Reading | str | None:
    """Read the lanes `at` of `root`, a sum of two products, as a rotation; the reason if a third term is added to one.

    `leaves` collects the tensors that the lanes come from; with `full`, all lanes must be rotated. None for others.
    """
    products = terms(at, leaves)
    if products is None or (full and not _is_full(products)):
        return None
    if len(products) == 3:
        pairs = ([products[0], products[1]], [products[0], products[2]], [products[1], products[2]])
        turned = any(isinstance(_as_rotation(known, root, pair, leaves), Reading) for pair in pairs)
        return (
            (
                "rotation: a third term is added to it; npu_rotary_mul requires x · cos + partner(x) · sin "
                "alone; add the term behind, in a sum of its own"
            )
            if turned
            else None
        )
    return _as_rotation(known, root, products, leaves) if len(products) == 2 else None


def _is_full(products: Sequence[Term]) -> bool:
    """Return True if every lane is a sum of two products."""
    return len(products) == 2 and all((each.second.leaf != NONE).all() for each in products)


def _as_rotation(known: KnownTables, root: Value, products: list[Term], leaves: Leaves) -> Reading | str | None:
    """Read `products`, the two of each lane of `root`, as a rotation of a leaf that both have; a reason or None for
    others.

    `leaves` has the tensors that the products are of.
    """
    turned = (products[0].second.leaf != NONE) & (products[1].second.leaf != NONE)
    where = np.nonzero(turned)[0]
    if len(where) < 2 or len(where) % 2 or where[-1] - where[0] + 1 != len(where):
        return None
    both, reason = _Sum(root, products, leaves, where), None
    leaves_of_one, leaves_of_other = (
        {*each.first.leaf[where].tolist(), *each.second.leaf[where].tolist()} for each in products
    )
    for leaf in sorted(leaves_of_one & leaves_of_other):
        outcome = _classify(known, both, leaf)
        if isinstance(outcome, Reading):
            return outcome
        reason = reason or outcome
    return reason or _why_unrelated(both)


def _why_unrelated(sums: _Sum) -> str | None:
    """Return the reason why the two products of `sums`, which have no tensor in common, are no rotation; or None.

    The lanes are halves of another dim, or the products differ in sign as a rotation of two tensors would.
    """
    factors = [side for term in sums.terms for side in (term.first, term.second)]
    numbers = {int(number) for side in factors for number in side.leaf[sums.where]}
    values = [sums.leaves.leaves[number][0] for number in sorted(numbers)]
    for value in values:
        pieces = [each.arg if each.op == "scale" else each for each in value.args]
        if value.op == "cat" and any(each.op == "slice" and each.arg in values for each in pieces):
            return (
                f"rotation: it pairs entries of dim {value.attrs[0] - value.rank}; npu_rotary_mul requires "
                "pairs of the last dim; transpose before the rotation"
            )
    signs = [np.sign(term.coefficient[sums.where]) for term in sums.terms]
    both = any((each > 0).any() and (each < 0).any() for each in signs)
    return (
        "sin: its term reads another tensor than that of the cosine; npu_rotary_mul requires both of one x"
        if both
        else None
    )


def _multiplies(value: Value, depth: int = 8) -> bool:
    """Return True if `value` depends on a product within `depth` ops: a cheap test before lanes are followed."""
    if value.op == "mul" or (value.op == "matmul" and value.arg.shape[-1] == 2):
        return True
    moving = ("add", "scale", "cast", "reshape", "permute", "slice", "cat", "slice_scatter", "mean")
    return depth > 0 and value.op in moving and any(_multiplies(each, depth - 1) for each in value.args)


def _may_be_full(value: Value) -> bool:
    """Return True if all lanes of `value` may be sums of two products: a cheap test.

    It excludes rotated lanes that are concatenated with others.
    """
    match value.op:
        case "add":
            return all(map(_multiplies, value.args))
        case "matmul":
            return value.arg.shape[-1] == 2
        case "mean" | "mul":
            return True
        case "cat" | "slice_scatter":
            return all(map(_may_be_full, value.args))
        case "scale" | "cast" | "reshape" | "permute" | "expand" | "slice" | "flip":
            return _may_be_full(value.arg)
        case _:
            return False


def _classify(known: KnownTables, sums: _Sum, leaf: int) -> Reading | str | None:
    """Read the sum as a rotation of the leaf number `leaf`, by trying all orders of pairs; else a reason or None."""
    left, right = (side_of(term, leaf, sums.where) for term in sums.terms)
    if left is None or right is None:
        return None
    reason: str | None = None
    lanes = np.concatenate((left.lane, right.lane))
    are_all = lanes.max() - lanes.min() == len(left.lane) - 1  # as pairs in either order do
    for source, result in product(ORDERS, ORDERS) if are_all else ():
        aligned = align(left, right, source, result)
        if aligned is None:
            continue
        reason = refusal(*aligned, pairs_of(result, len(sums.where)))
        if reason is None:
            return _reading(known, sums, leaf, aligned, {"source": source, "result": result})
    return reason or (unpaired(left, right) if sums.value.rank > 1 else None)  # a single row has no tokens


def _reading(
    known: KnownTables, sums: _Sum, leaf: int, sides: Sequence[Side], orders: Mapping[str, str]
) -> Reading | str:
    """Build the reading of the sum `sums` as a rotation of leaf number `leaf`; or return a reason.

    `sides` are the products with cosines and with sines, `orders` those of pairs of input and result.
    """
    a, (root, _, leaves, where) = known.algebra, sums
    size, compute = len(where), _compute_dtype(leaves)
    first = int(min(each.lane.min() for each in sides))
    flat, factor = known.factored(_flat(a, *leaves.leaves[leaf]), float(sides[0].factor[0]))
    x = a.slice(flat, -1, first, first + size)
    if x is None or x.shape != (*root.shape[:-1], size):
        return (
            "x: it is broadcast along the tables; npu_rotary_mul requires x of the shape of the result; expand it first"
        )
    cos, sin = (_table(known, leaves, each, factor) for each in sides)
    if cos is None or sin is None:
        return (
            "cos, sin: lanes read the tables in an order that is neither full, repeated by halves nor by "
            "pairs; npu_rotary_mul requires one of these; write torch.cat((freqs, freqs), -1), or "
            "repeat_interleave(2, -1)"
        )
    tables = {"cos": a.cast(cos, compute), "sin": a.cast(sin, compute)}
    captures = {"x": a.cast(x, compute), **tables, "dtype": root.dtype, **orders}
    if size == root.shape[-1]:
        return Reading("rotation", captures)
    rest = _passing(a, sums)
    if rest is None:
        return (
            "lanes: those that are not rotated are changed; a partial rotation requires that they pass "
            "through; change them behind the concatenation"
        )
    return Reading("partial_rotation", captures | {"rest": rest, "rest_first": bool(where[0] != 0)})


def _table(known: KnownTables, leaves: Leaves, side: Side, without: float) -> Value | None:
    """Return the table [.., D] of the product `side`, divided by the factor `without`; None in another order.

    `leaves` has the tensors that the table is of; those of several runs of lanes are concatenated.
    """
    pieces: list[Value] = []
    for start, stop in runs(side.table):
        flat = _flat(known.algebra, *leaves.leaves[int(side.table[start])])
        piece = known.scaled(flat, side.entry[start:stop], float(side.factor[0]) / without)
        if piece is None or piece.shape[:-1] != (pieces or [piece])[0].shape[:-1]:
            return None
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else known.algebra.cat(pieces, -1)


def _compute_dtype(leaves: Leaves) -> torch.dtype | None:
    """Return the dtype of the products; where these differ, the dtype to which they and their leaves promote."""
    made_of = {leaf.dtype for leaf, _ in leaves.leaves} if len(leaves.computed) > 1 else set()
    return reduce(torch.promote_types, [each for each in leaves.computed | made_of if each is not None])


def _flat(a: Algebra, leaf: Value, depth: int) -> Value:
    """Merge the last `depth` dims of `leaf` into one dim of lanes."""
    lead = leaf.rank - depth
    return a.reshape(leaf, (*leaf.shape[:lead], prod(leaf.shape[lead:])))


def _passing(a: Algebra, sums: _Sum) -> Value | None:
    """Return the lanes of `sums.value` that are not rotated as one value [.., E].

    None if they are not contiguous, or not passed through unchanged.
    """
    root, both, leaves, where = sums
    first, second = both  # lanes of one term have no second product
    others = np.setdiff1d(np.arange(len(first.coefficient)), where)
    leaf, lane = first.first.leaf[others], first.first.index[others]
    contiguous = (leaf == leaf[0]).all() and (np.diff(lane) == 1).all() and (first.coefficient[others] == 1).all()
    if (np.diff(others) != 1).any():
        return None
    alone = (first.second.leaf[others] == NONE).all() and (second.first.leaf[others] == NONE).all()
    if not contiguous or not alone:  # lanes of a norm are products themselves
        return _concatenated_rest(a, root, int(others[0]), int(others[-1]) + 1)
    rest = a.slice(_flat(a, *leaves.leaves[int(leaf[0])]), -1, int(lane[0]), int(lane[-1]) + 1)
    return rest if rest is not None and rest.shape[:-1] == root.shape[:-1] and rest.dtype == root.dtype else None


def _concatenated_rest(a: Algebra, root: Value, start: int, stop: int) -> Value | None:
    """Return the lanes `start` to `stop` of `root`, if these are one value that it concatenates; else None."""
    joined, rest = root.below("reshape", "cast"), a.slice(root, -1, start, stop)
    if joined.op == "slice_scatter":
        return _rest_of_write(a, joined, root.shape, start, stop) if joined.dtype == root.dtype else None
    pieces = [each.below("reshape", "cast") for each in joined.args] if joined.op == "cat" else []
    return rest if rest is not None and rest.below("reshape", "cast") in pieces else None


def _rest_of_write(a: Algebra, written: Value, shape: tuple[Any, ...], start: int, stop: int) -> Value | None:
    """Return the lanes `start` to `stop` of the tensor into which rotated lanes are `written`, viewed as `shape`.

    None for caches, and if these lanes are overwritten.
    """
    axis, first, last, step = written.attrs
    x = written.arg
    if (axis, step) != (x.rank - 1, 1) or x.shape[-1] != shape[-1] or (start < last and first < stop):
        return None
    if x.below("reshape", "cast", "slice", "slice_scatter", "write", "write_rows").op == "input":
        return None
    return a.slice(a.reshape(x, shape), -1, start, stop)
