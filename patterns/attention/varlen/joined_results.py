"""Concatenations of the results of several attentions: the attention and the views behind each operand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from fusion.graph import Algebra, Graph, Reading, Value
from fusion.graph.contractions import matmul
from fusion.graph.dims import but_ones
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.varlen.segment_orders import ROWS

Results = Mapping[Value, tuple[Value, Reading]]
"""Results of attention and their readings, by the value below their views (`made_by`)."""

VIEWS = ("permute", "reshape")
_ALL_ROWS = ("count", "levels", "kv_len", "kv_lens", "bias")
"""Captures that apply to all queries of a sequence, and cannot be cut with them."""


@dataclass(frozen=True)
class Part:
    """One operand of a concatenation: the result of an attention, seen through views.

    Attributes:
        reading: the attention.
        plain: its result [1, N, S, E], as a value that no node computes.
        view: the operand as a view of `plain`.
    """

    reading: Reading
    plain: Value
    view: Value


@proof
def part_of(a: Algebra, results: Results, value: Value) -> Part | None:
    """Read `value`, an operand of a concatenation, as a view of the result of an attention in `results`, or of its
    queries.

    None if it is anything else.
    """
    made = made_by(value)
    result, reading = proven(results.get(made) or _projected(a, results, made))
    views, above, cut = list[Value](), list[Value](), None
    while prod(value.shape) != prod(result.shape) or a.reshape(result, value.shape) is not value:
        must(value.op in VIEWS or (value.op == "slice" and cut is None))
        if value.op == "slice":
            views, above, cut = [], views, value
        else:
            views.append(value)
        value = value.arg
    rows, reading = reading.captures["q"].shape[:ROWS], proven(_batch_as_heads(a, reading))
    q, v = reading.captures["q"], reading.captures["v"]
    plain = a.make("attended", (result,), (), (*q.shape[:3], v.shape[3]), result.dtype)
    seen = a.reshape(plain, (*rows, *plain.shape[ROWS:]))
    for op, how in reading.captures["output_view"]:
        must(op in VIEWS and not any(isinstance(each, str) for each in how))
        seen = a.permute(seen, how) if op == "permute" else a.reshape(seen, how)
    seen = a.reshape(seen, value.shape)
    for each in reversed(views):
        seen = a.seen_as(seen, each)
    part = Part(reading, plain, seen)
    if cut is not None:
        part = proven(_some_rows(a, part, *cut.attrs))
        seen = part.view
        for each in reversed(above):
            seen = a.seen_as(seen, each)
    return replace(part, view=seen)


@proof
def _projected(a: Algebra, results: Results, product: Value) -> tuple[Value, Reading] | None:
    """Read `product`, an attention over one latent times a matrix of each head, as attention over projected values.

        (P c) W_UV[n]  =  P (c W_UV[n])

    None for any other value, and for matrices along other dims than the heads and lanes of the result.
    """
    must(product.op == "matmul")
    x, up = product.args
    part = proven(part_of(a, results, x))
    heads, queries = part.plain.shape[1:3]
    captures = part.reading.captures
    must(part.plain.shape[0] == captures["v"].shape[1] == 1 and captures["output_view"] is not None)
    must(but_ones(up.shape[:-2]) == but_ones((heads,)) and x.shape == product.shape[:-1] + x.shape[-1:])
    must(x.shape[-3:-1] == (heads, queries) and a.reshape(part.plain, x.shape) is part.view)
    values = proven(matmul(a, captures["v"], a.reshape(up, (heads, *up.shape[-2:]))))
    views = (("reshape", product.shape),)
    return product, replace(part.reading, captures={**captures, "v": values, "output_view": views})


@proof
def _some_rows(a: Algebra, part: Part, axis: int, start: int, stop: int, step: int) -> Part | None:
    """Return `part` for the queries `start` … `stop` - 1 alone, which a slice with `step` takes along dim `axis` of its
    view.

    None if `step` is not 1, or if the mask or another capture cannot be restricted to these queries.
    """
    steps = proven(steps_of([(part.plain, part.view)], axis))
    must(step == 1 and steps.to == axis and part.view is steps.applied(a, part.plain))
    captures, plain = part.reading.captures, part.plain
    queries, keys = captures["q"].shape[ROWS], captures["k"].shape[ROWS]
    last = stop == queries and (captures["mask_kind"] == "causal_lower_right" or queries == keys)
    must(captures["mask_kind"] == "none" or (captures["mask_kind"] != "dense" and last))
    must(all(captures.get(name) is None for name in _ALL_ROWS))
    cut = {**captures, "q": _cut_rows(a, captures["q"], start, stop)}
    cut |= {} if captures["mask_kind"] == "none" else {"mask_kind": "causal_lower_right"}
    if captures.get("mask") is not None and captures["mask"].shape[ROWS] == queries:
        cut["mask"] = a.cut(captures["mask"], ROWS, start, stop)
    shape = (*plain.shape[:ROWS], stop - start, *plain.shape[ROWS + 1 :])
    plain = a.make("attended", plain.args, (start, stop), shape, plain.dtype)
    return Part(replace(part.reading, captures=cut), plain, steps.applied(a, plain))


def _cut_rows(a: Algebra, q: Value, start: int, stop: int) -> Value:
    """Slice the queries `q` [1, N, S, D] from `start` to `stop`, before the reshape that added the first dim."""
    below = q.arg if q.op == "reshape" else q
    if below is q or (1, *below.shape) != q.shape:
        return a.cut(q, ROWS, start, stop)
    cut = a.cut(below, ROWS - 1, start, stop)
    return a.reshape(cut, (1, *cut.shape))


@proof
def _batch_as_heads(a: Algebra, attention: Reading) -> Reading | None:
    """Fold the sequences of `attention` into heads, queries [1, B·N, S, D]; None where sequences share keys."""
    captures = attention.captures
    must(captures["q"].shape[0] == 1 or captures.get("sink") is None)
    heads = {name: (1, prod(captures[name].shape[:ROWS]), *captures[name].shape[ROWS:]) for name in ("q", "k", "v")}
    must(captures["q"].shape[0] == captures["k"].shape[0] == captures["v"].shape[0])
    folded = {name: a.reshape(captures[name], shape) for name, shape in heads.items()}
    return replace(attention, captures={**captures, **folded})


def joins(graph: Graph) -> Iterator[tuple[Results, Value]]:
    """Yield each concatenation, with the results of all attentions of the graph; nothing if there are fewer than
    two.
    """
    readings = graph.readings.all("softmax_attention")
    results = {made_by(value): (value, reading) for value, reading in readings}
    for value in graph.places if len(results) > 1 else ():
        if value.op == "cat" and len(value.args) > 1:
            yield results, value


def made_by(value: Value) -> Value:
    """Strip views, casts and slices from `value`, in whatever order they are."""
    return value.below(*VIEWS, "slice", "cast")


@dataclass(frozen=True)
class Steps:
    """Views of a tensor, with its number of rows left open.

    Attributes:
        steps: ("permute", dims) or ("reshape", sizes), the first applied first; None in sizes for the rows.
        to: the dim of the rows behind the views.
        dim: the dim of the rows before them.
    """

    steps: tuple[tuple[str, tuple[Any, ...]], ...]
    to: int
    dim: int = ROWS

    def for_rows(self, size: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """Return the steps for a tensor of `size` rows."""
        return tuple((op, tuple(size if each is None else each for each in how)) for op, how in self.steps)

    def applied(self, a: Algebra, plain: Value) -> Value:
        """Apply the views to `plain`."""
        for op, how in self.for_rows(plain.shape[self.dim]):
            plain = a.permute(plain, how) if op == "permute" else a.reshape(plain, how)
        return plain


@proof
def steps_of(pairs: Sequence[tuple[Value, Value]], axis: int, dim: int = ROWS) -> Steps | None:
    """Return the views from a tensor to its view, with the number of rows along `dim` left open.

    `pairs` have a tensor and its view each; the first with more than one row is read. If all have one row, it is viewed
    as one entry along `axis`. None if a view merges the rows with another dim.
    """
    plain, seen = next((both for both in pairs if both[0].shape[dim] != 1), pairs[0])
    views = proven(views_between(plain, seen))
    if plain.shape[dim] == 1:
        return each_alone(plain, seen, axis, dim)
    to, steps = dim, list[tuple[str, tuple[Any, ...]]]()
    for below, view in pairwise(views):
        if view.op == "permute":
            to = view.attrs.index(to)
            steps.append(("permute", view.attrs))
            continue
        rows, before = below.shape[to], prod(below.shape[:to])
        alike = (place for place, size in enumerate(view.shape) if size == rows and prod(view.shape[:place]) == before)
        to = proven(next(alike, None))
        steps.append(("reshape", (*view.shape[:to], None, *view.shape[to + 1 :])))
    return Steps(tuple(steps), to, dim)


@proof
def views_between(plain: Value, seen: Value) -> list[Value] | None:
    """List the values from `plain` to its view `seen`, both included; None if `seen` is no view of `plain`."""
    views = [seen]
    while views[-1] is not plain:
        must(views[-1].op in VIEWS)
        views.append(views[-1].arg)
    return views[::-1]


@proof
def each_alone(plain: Value, seen: Value, axis: int, dim: int) -> Steps | None:
    """Return the views that treat each entry of dim `dim` as one result `plain`, apply the views to `seen`, and join at
    `axis`.

    `plain` has one entry at `dim`, and `seen` one at `axis`. None if `seen` is no view of `plain`.
    """
    views = proven(views_between(plain, seen))
    must(seen.shape[axis] == 1)
    first = (dim, *(each for each in range(plain.rank) if each != dim))
    steps: list[tuple[str, tuple[Any, ...]]] = [("permute", first)] if dim else []
    steps.append(("reshape", (None, *plain.shape)))
    for view in views[1:]:
        if view.op == "permute":
            steps.append(("permute", (0, *(each + 1 for each in view.attrs))))
        else:
            steps.append(("reshape", (None, *view.shape)))
    others = (*seen.shape[:axis], *seen.shape[axis + 1 :])
    order = (*range(1, axis + 1), 0, *range(axis + 1, seen.rank))
    return Steps((*steps, ("reshape", (None, *others)), ("permute", order)), axis, dim)
