"""Sequences of different lengths, one after the other, that are attended to by themselves (Dao et al., 2022, "varlen").

    out = [attention(q[s₀:s₁], k[t₀:t₁], v[t₀:t₁]), attention(q[s₁:s₂], k[t₁:t₂], v[t₁:t₂]), ..]

A loop over segments of packed tokens is one call of the operator, which is told where each ends; where each segment's
keys lie in pages of its own, it is one call over the pages (a serving engine's reference of paged attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from fusion import reader
from fusion.analysis.constant_folding import Folder
from fusion.analysis.row_layout import named
from fusion.graph import Algebra, Found, Graph, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.attention.varlen.joined_results import VIEWS, Results, Steps, joins, part_of, steps_of
from patterns.attention.varlen.read_block_masks import block_masked
from patterns.attention.varlen.segment_orders import ROWS, Said, in_one_window, kind_of
from patterns.attention.words import PAGED_SEGMENTS, SEGMENTED_ATTENTION
from patterns.cache.joined_tables import joined_table
from patterns.cache.read_block_tables import rows_of_pages

_ALIKE = ("scale", "window", "sink", "fully_masked_row")
_OWN = ("count", "levels", "kv_len", "kv_lens", "bias")
_SAID = {"q", "k", "v", "mask", "mask_kind", "output_view", *_ALIKE, *_OWN}
"""What is asked of each segment: attention of which more is said is none."""


@reader(gives=(SEGMENTED_ATTENTION,), needs=("softmax_attention",))
def segmented_attentions(graph: Graph) -> Iterator[Found]:
    """What is joined of attentions along their queries; attention behind a mask that makes segments."""
    yield from block_masked(graph)
    for results, value in joins(graph):
        read = segmented(graph, results, value)
        if read is not None:
            yield value, read


@reader(gives=(PAGED_SEGMENTS,), needs=("segmented_attention",))
def paged_segments(graph: Graph) -> Iterator[Found]:
    """Keys and values of segments of which each lies in pages of its own."""
    for _, attention in graph.readings.all("segmented_attention"):
        for rows in (attention.captures["k"], attention.captures["v"]):
            found = _in_pages(graph, rows, attention.captures["key_ends"])
            if found is not None:
                yield rows, found


@proof
def _in_pages(graph: Graph, rows: Value, ends: Sequence[int]) -> Reading | None:
    """Read joined rows, of which each segment ends at one of `ends`, by the pages of all and one block table."""
    each_of = [_segment(graph.algebra, rows, start, end) for start, end in pairwise((0, *ends))]
    parts = [proven(rows_of_pages(graph, each, _sizes(each))).captures for each in each_of]
    same = {name: parts[0][name] for name in ("pages", "size", "layout")}
    must(all(part[name] == each for part in parts for name, each in same.items()))
    tables = [part["block_table"] for part in parts]
    must(all(isinstance(each.shape[1], int) for each in tables))
    table = joined_table(graph.algebra, tables, same["pages"].shape[0])
    return Reading("paged_segments", {"rows": rows, "block_table": table} | same)


def _segment(a: Algebra, rows: Value, start: int, end: int) -> Value:
    """Cut joined rows [1, M, T, D] from `start` to `end`; where one gather gives all, gather these alone."""
    whole = rows.below(*VIEWS)
    steps = steps_of([(whole, rows)], ROWS, 0) if (whole.op, whole.attrs) == ("index", (0,)) else None
    if steps is None or whole.args[1].rank != 1:
        return a.cut(rows, ROWS, start, end)
    numbers = a.cut(whole.args[1], 0, start, end)
    part = a.make("index", (whole.arg, numbers), (0,), (*numbers.shape, *whole.shape[1:]), whole.dtype)
    return steps.applied(a, part)


def _sizes(rows: Value) -> tuple[Any, Any, Any, Any]:
    """Give the sizes of rows [B, M, T, D]."""
    batch, heads, keys, width = rows.shape
    return batch, heads, keys, width


@proof
def segmented(graph: Graph, results: Results, joined: Value) -> Reading | None:
    """Read the segments whose results a value joins, each with what it attends to."""
    a = graph.algebra
    parts = [proven(part_of(a, results, each)) for each in joined.args]
    every = [_without_rest(a, each.reading.captures) for each in parts]
    every = in_one_window(graph.shared(Folder), every)
    first = every[0]
    must(all(each.keys() <= _SAID for each in every))
    must(all(each.get(name) == first.get(name) for each in every for name in _ALIKE))
    must(all(each.get(name) is None for each in every for name in _OWN))
    ends, key_ends, value_ends = (proven(_ends([each[name] for each in every])) for name in ("q", "k", "v"))
    must(key_ends == value_ends)  # torch reads as many values as there are keys
    steps = proven(steps_of([(each.plain, each.seen) for each in parts], joined.attrs[0]))
    must(steps.to == joined.attrs[0] and all(each.seen is steps.applied(a, each.plain) for each in parts))
    whole = {name: _joined(graph, [each[name] for each in every]) for name in ("q", "k", "v")}
    captures = {name: first[name] for name in _ALIKE if name in first} | whole
    captures |= {"mask_kind": proven(kind_of(every)), "kv_len": None, "ends": ends, "key_ends": key_ends}
    relied = frozenset[str]().union(*(each.reading.relies for each in parts))
    view = proven(named(steps.of(ends[-1]), {}))
    return Reading("segmented_attention", captures | {"output_view": view}, relied)


def _without_rest(a: Algebra, said: Said) -> Said:
    """Cut keys and values to those that are seen, where a number says how many; a dense mask has an entry for each."""
    keys = said.get("kv_len")
    if not isinstance(keys, int) or said["mask_kind"] == "dense":
        return said
    seen = {name: a.cut(said[name], ROWS, 0, keys) for name in ("k", "v")}
    return {**said, **seen, "kv_len": None, "mask": None}


def _ends(parts: Sequence[Value]) -> tuple[int, ...] | None:
    """Where each part of packed tokens ends; None of several sequences, or of lengths that are not known, or are 0.

    The parts must be such that they can be joined: of as many heads and lanes, in one dtype.
    """
    sizes: list[Any] = [each.shape[ROWS] for each in parts]
    rows = {(*each.shape[:ROWS], *each.shape[ROWS + 1 :], each.dtype) for each in parts}
    packed = len(rows) == 1 and all(each.rank == 4 and each.shape[0] == 1 for each in parts)
    return tuple(accumulate(sizes)) if packed and all(isinstance(each, int) and each for each in sizes) else None


def _joined(graph: Graph, parts: Sequence[Value]) -> Value:
    """Join parts [1, N, S, D]: give what they are cut from, or gather the rows of all at once, or concatenate them."""
    a = graph.algebra
    return _uncut(a, parts) or _gathered(graph, parts) or a.cat(parts, ROWS)


@proof
def _gathered(graph: Graph, parts: Sequence[Value]) -> Value | None:
    """Gather rows of one cache by the joined numbers of parts that are gathered one by one; leave rows of pages."""
    a = graph.algebra
    each_of = [part.below(*VIEWS) for part in parts]
    first = each_of[0]
    must(all((each.op, each.attrs, each.arg) == ("index", (0,), first.arg) for each in each_of))
    numbers = [each.args[1] for each in each_of]
    must(all((each.rank, each.dtype) == (1, numbers[0].dtype) for each in numbers))
    steps = proven(steps_of([*zip(each_of, parts, strict=True)], ROWS, 0))
    must(steps.to == ROWS and all(steps.applied(a, x) is part for x, part in zip(each_of, parts, strict=True)))
    pages = rows_of_pages(graph, parts[0], _sizes(parts[0]))
    must(pages is None or pages.captures["size"] == 1)  # the operator reads larger pages in place
    index = a.cat(numbers, 0)
    rows = a.make("index", (first.arg, index), (0,), (*index.shape, *first.shape[1:]), first.dtype)
    return steps.applied(a, rows)


def _uncut(a: Algebra, parts: Sequence[Value]) -> Value | None:
    """Give what parts [1, N, S, D] are cut from, if each begins where the one before it ends, as [1, N, T, D]."""
    sizes: list[Any] = [each.shape[ROWS] for each in parts]
    ends = [0, *accumulate(sizes)]
    for part, before in zip(parts, ends, strict=False):
        found = _cut_of(a, part)
        start = -1 if found is None else found.start - before
        if found is None or start < 0:
            continue
        places = zip(pairwise(start + end for end in ends), parts, strict=True)
        if all(found.rows(a, *place) is each for place, each in places):
            return found.rows(a, start, start + ends[-1])
    return None


@dataclass(frozen=True)
class _Cut:
    """Rows of `source` from `start`, viewed by `steps` as [1, N, S, D]."""

    source: Value
    start: int
    steps: Steps

    def rows(self, a: Algebra, start: int, stop: int) -> Value:
        """View the rows of the source from `start` to `stop` alike."""
        return self.steps.applied(a, a.cut(self.source, self.steps.dim, start, stop))


@proof
def _cut_of(a: Algebra, part: Value) -> _Cut | None:
    """Read what `part` [1, N, S, D] is cut from, and the views behind the cut."""
    cut = part.below(*VIEWS)
    must(cut.op == "slice")
    axis, start = cut.attrs[:2]
    steps = proven(steps_of([(cut, part)], ROWS, axis))
    must(steps.to == ROWS)
    return _Cut(cut.arg, start, steps)
