"""Results of several attentions that are joined: what each is of, and how all are seen as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from fusion.graph import Algebra, Graph, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.attention.varlen.segment_orders import ROWS

Results = Mapping[Value, tuple[Value, Reading]]
"""What attention gives, and how it is read, by what computes it."""

VIEWS = ("permute", "reshape")
_ALL_ROWS = ("count", "levels", "kv_len", "kv_lens", "bias")
"""What is said of all queries of a sequence at once."""


@dataclass(frozen=True)
class Part:
    """Attention whose result is joined: what is read of it, its result [1, N, S, E], and how that is seen."""

    reading: Reading
    plain: Value
    seen: Value


@proof
def part_of(a: Algebra, results: Results, value: Value) -> Part | None:
    """What a value that is joined is, if it is a result of attention, perhaps turned, or some rows of one."""
    result, reading = proven(results.get(made_by(value)))
    views, above, cut = list[Value](), list[Value](), None
    while prod(value.shape) != prod(result.shape) or a.reshape(result, value.shape) is not value:
        must(value.op in VIEWS or (value.op == "slice" and cut is None))
        if value.op == "slice":
            views, above, cut = [], views, value
        else:
            views.append(value)
        value = value.arg
    rows, reading = reading.captures["q"].shape[:ROWS], proven(_of_one(a, reading))
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
        seen = part.seen
        for each in reversed(above):
            seen = a.seen_as(seen, each)
    return replace(part, seen=seen)


@proof
def _some_rows(a: Algebra, part: Part, axis: int, start: int, stop: int, step: int) -> Part | None:
    """Attention of the queries from `start` to `stop`, which are those along `axis` of how its result is seen."""
    steps = proven(steps_of([(part.plain, part.seen)], axis))
    must(step == 1 and steps.to == axis and part.seen is steps.applied(a, part.plain))
    said, plain = part.reading.captures, part.plain
    queries, keys = said["q"].shape[ROWS], said["k"].shape[ROWS]
    last = stop == queries and (said["mask_kind"] == "causal_lower_right" or queries == keys)
    must(said["mask_kind"] == "none" or (said["mask_kind"] != "dense" and last))
    must(all(said.get(name) is None for name in _ALL_ROWS))
    captures = {**said, "q": _cut_rows(a, said["q"], start, stop)}
    captures |= {} if said["mask_kind"] == "none" else {"mask_kind": "causal_lower_right"}
    if said.get("mask") is not None and said["mask"].shape[ROWS] == queries:
        captures["mask"] = a.cut(said["mask"], ROWS, start, stop)
    shape = (*plain.shape[:ROWS], stop - start, *plain.shape[ROWS + 1 :])
    plain = a.make("attended", plain.args, (start, stop), shape, plain.dtype)
    return Part(replace(part.reading, captures=captures), plain, steps.applied(a, plain))


def _cut_rows(a: Algebra, q: Value, start: int, stop: int) -> Value:
    """Some of the queries [1, N, S, D], which may have been put into larger memory before they got the first dim."""
    below = q.arg if q.op == "reshape" else q
    if below is q or (1, *below.shape) != q.shape:
        return a.cut(q, ROWS, start, stop)
    cut = a.cut(below, ROWS - 1, start, stop)
    return a.reshape(cut, (1, *cut.shape))


@proof
def _of_one(a: Algebra, attention: Reading) -> Reading | None:
    """Attention of the heads of all sequences as of those of one, each with its own keys."""
    said = attention.captures
    must(said["q"].shape[0] == 1 or said.get("sink") is None)
    heads = {name: (1, prod(said[name].shape[:ROWS]), *said[name].shape[ROWS:]) for name in ("q", "k", "v")}
    must(said["q"].shape[0] == said["k"].shape[0] == said["v"].shape[0])
    folded = {name: a.reshape(said[name], shape) for name, shape in heads.items()}
    return replace(attention, captures={**said, **folded})


def joins(graph: Graph) -> Iterator[tuple[Results, Value]]:
    """Everything that is joined of several values, where there are several attentions, with their results."""
    found = graph.readings.all("softmax_attention")
    results = {made_by(value): (value, reading) for value, reading in found}
    for value in graph.places if len(results) > 1 else ():
        if value.op == "cat" and len(value.args) > 1:
            yield results, value


def made_by(value: Value) -> Value:
    """What computes a value, or more than it: below views, casts (that of a reshape is a reshape of one) and slices."""
    return value.below(*VIEWS, "slice", "cast")


@dataclass(frozen=True)
class Steps:
    """Views of a tensor, whatever the number of its rows: dim `dim` before, dim `to` behind, None in reshapes."""

    steps: tuple[tuple[str, tuple[Any, ...]], ...]
    to: int
    dim: int = ROWS

    def of(self, size: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """The steps for so many rows."""
        return tuple((op, tuple(size if each is None else each for each in how)) for op, how in self.steps)

    def applied(self, a: Algebra, plain: Value) -> Value:
        """What they make of a tensor."""
        for op, how in self.of(plain.shape[self.dim]):
            plain = a.permute(plain, how) if op == "permute" else a.reshape(plain, how)
        return plain


@proof
def steps_of(turned: Sequence[tuple[Value, Value]], axis: int, dim: int = ROWS) -> Steps | None:
    """Read the views between tensors with rows along `dim` and how they are seen, by the first of several rows.

    Gives None where a view joins rows with another dim. One row alone goes to the dim `axis`.
    """
    plain, seen = next((both for both in turned if both[0].shape[dim] != 1), turned[0])
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
    """The views from a tensor to how it is seen, both among them."""
    views = [seen]
    while views[-1] is not plain:
        must(views[-1].op in VIEWS)
        views.append(views[-1].arg)
    return views[::-1]


@proof
def each_alone(plain: Value, seen: Value, axis: int, dim: int) -> Steps | None:
    """How each of many entries of `dim` is seen as the one of `plain` is, all joined along `axis`.

    They stand before all other dims until they go to their place.
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
