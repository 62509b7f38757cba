"""Attentions of packed sequences of different lengths, each over its own keys (Dao et al., 2022, "varlen").

    out = [attention(q[s₀:s₁], k[t₀:t₁], v[t₀:t₁]), attention(q[s₁:s₂], k[t₁:t₂], v[t₁:t₂]), ..]

A loop over segments of packed tokens is one call of the operator with the end of each segment; if the keys of each
segment are gathered from pages, it is one call over the pages (a serving engine's reference of paged attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from fusion import reader
from fusion.analysis.constant_folding import Folder
from fusion.analysis.row_layout import named
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.core.addends import computed_from
from patterns.attention.varlen.joined_results import VIEWS, Results, Steps, joins, part_of, steps_of
from patterns.attention.varlen.read_block_masks import block_masked
from patterns.attention.varlen.segment_orders import ROWS, in_one_window, kind_of, visible_rows
from patterns.attention.varlen.sequence_caches import cache_of
from patterns.attention.words import PAGED_SEGMENTS, SEGMENTED_ATTENTION
from patterns.cache.joined_tables import joined_table
from patterns.cache.read_block_tables import rows_of_pages

_ALIKE = ("scale", "window", "sink", "fully_masked_row")
_OWN = ("count", "levels", "kv_len", "kv_lens", "bias")
_WRITTEN_BETWEEN = (
    "cache: its pages are written between the attentions of two sequences, at slots that may be rows which the first "
    "has read; npu_fused_infer_attention_score requires one state of the pages; write the rows of all sequences first"
)
_CAPTURES = {"q", "k", "v", "mask", "mask_kind", "output_view", *_ALIKE, *_OWN}
"""All captures that a segment may have."""


@reader(gives=(SEGMENTED_ATTENTION,), needs=("softmax_attention",))
def segmented_attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every concatenation of attentions, and every block-diagonal mask, as `segmented_attention`."""
    yield from block_masked(graph)
    for results, value in joins(graph):
        read = segmented(graph, results, value)
        if read is not None:
            yield value, read


@reader(gives=(PAGED_SEGMENTS,), needs=("segmented_attention",))
def paged_segments(graph: Graph) -> Iterator[Annotation]:
    """Read all keys and values whose segments are gathered from pages, as `paged_segments`; report writes between the
    gathers.
    """
    for value, attention in graph.readings.all("segmented_attention"):
        for rows in (attention.captures["k"], attention.captures["v"]):
            reading = _in_pages(graph, rows, attention, value)
            if isinstance(reading, Miss):
                yield value, reading
            elif reading is not None:
                yield rows, reading


@proof
def _in_pages(graph: Graph, rows: Value, attention: Reading, joined: Value) -> Reading | Miss | None:
    """Read `rows`, keys or values of the segments of `attention`, as gathered from pages by one block table; else None.

    Sequences of one cache, of which each segment has the first rows, are consecutive pages. A miss where the pages are
    written between the gathers: the slots may be rows that a segment before has read.
    """
    each_of = [
        _segment(graph.algebra, rows, start, end) for start, end in pairwise((0, *attention.captures["key_ends"]))
    ]
    cached = cache_of(graph, each_of)
    if cached is not None:
        return Reading("paged_segments", {"rows": rows} | proven(cached.pages(graph.algebra, attention.captures["q"])))
    parts = [proven(rows_of_pages(graph, each, _sizes(each))).captures for each in each_of]
    same = {name: parts[0][name] for name in ("pages", "size", "layout")}
    states = [part["pages"].below("reshape") for part in parts]
    if len(set(states)) > 1 and all(computed_from(states[-1], each) for each in states):
        return Miss("attention", _WRITTEN_BETWEEN, at=(states[-1],), of=joined, useless=True)
    must(all(part[name] == each for part in parts for name, each in same.items()))
    tables = [part["block_table"] for part in parts]
    must(all(isinstance(each.shape[1], int) for each in tables))
    table = joined_table(graph.algebra, tables, same["pages"].shape[0])
    return Reading("paged_segments", {"rows": rows, "block_table": table} | same)


def _segment(a: Algebra, rows: Value, start: int, end: int) -> Value:
    """Slice the concatenated `rows` [1, M, T, D] from `start` to `end`; of a gather, its indices are sliced."""
    gather = rows.below(*VIEWS)
    steps = steps_of([(gather, rows)], ROWS, 0) if (gather.op, gather.attrs) == ("index", (0,)) else None
    if steps is None or gather.args[1].rank != 1:
        return a.cut(rows, ROWS, start, end)
    numbers = a.cut(gather.args[1], 0, start, end)
    part = a.make("index", (gather.arg, numbers), (0,), (*numbers.shape, *gather.shape[1:]), gather.dtype)
    return steps.applied(a, part)


def _sizes(rows: Value) -> tuple[Any, Any, Any, Any]:
    batch, heads, keys, width = rows.shape
    return batch, heads, keys, width


@proof
def segmented(graph: Graph, results: Results, joined: Value) -> Reading | None:
    """Read attentions among `results` that `joined` concatenates along their queries as one `segmented_attention`.

    None if the segments differ in more than lengths and masks.
    """
    a = graph.algebra
    parts = [proven(part_of(a, results, each)) for each in joined.args]
    every = [visible_rows(a, each.reading.captures) for each in parts]
    every = in_one_window(graph.shared(Folder), every)
    first = every[0]
    must(all(each.keys() <= _CAPTURES for each in every))
    must(all(each.get(name) == first.get(name) for each in every for name in _ALIKE))
    must(all(each.get(name) is None for each in every for name in _OWN))
    ends, key_ends, value_ends = (proven(_ends([each[name] for each in every])) for name in ("q", "k", "v"))
    must(key_ends == value_ends)  # torch reads as many values as there are keys
    steps = proven(steps_of([(each.plain, each.view) for each in parts], joined.attrs[0]))
    must(steps.to == joined.attrs[0] and all(each.view is steps.applied(a, each.plain) for each in parts))
    joined_rows = {name: _joined(graph, [each[name] for each in every]) for name in ("q", "k", "v")}
    captures = {name: first[name] for name in _ALIKE if name in first} | joined_rows
    captures |= {"mask_kind": proven(kind_of(every)), "kv_len": None, "ends": ends, "key_ends": key_ends}
    relied = frozenset[str]().union(*(each.reading.relies for each in parts))
    view = proven(named(steps.for_rows(ends[-1]), {}))
    return Reading("segmented_attention", captures | {"output_view": view}, relied)


def _ends(parts: Sequence[Value]) -> tuple[int, ...] | None:
    """Return the end of each of `parts` [1, N, S, D] in packed tokens.

    None for lengths that are symbolic or 0, or parts that differ in heads, lanes or dtype.
    """
    sizes: list[Any] = [each.shape[ROWS] for each in parts]
    rows = {(*each.shape[:ROWS], *each.shape[ROWS + 1 :], each.dtype) for each in parts}
    packed = len(rows) == 1 and all(each.rank == 4 and each.shape[0] == 1 for each in parts)
    return tuple(accumulate(sizes)) if packed and all(isinstance(each, int) and each for each in sizes) else None


def _joined(graph: Graph, parts: Sequence[Value]) -> Value:
    """Join `parts` [1, N, S, D]: by the tensor that they are sliced from, by one gather, or by a concatenation."""
    a = graph.algebra
    return _uncut(a, parts) or _gathered(graph, parts) or a.cat(parts, ROWS)


@proof
def _gathered(graph: Graph, parts: Sequence[Value]) -> Value | None:
    """Gather the rows of all `parts` at once, if each is a gather from the same cache.

    None for other parts, and for rows of pages, which the operator reads in place.
    """
    a = graph.algebra
    each_of = [part.below(*VIEWS) for part in parts]
    first = each_of[0]
    must(all((each.op, each.attrs) == ("index", (0,)) for each in each_of))
    must(all(each.arg is first.arg for each in each_of))
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
    """Return the rows [1, N, T, D] of which `parts` [1, N, S, D] are adjacent slices; else None."""
    sizes: list[Any] = [each.shape[ROWS] for each in parts]
    ends = [0, *accumulate(sizes)]
    for part, before in zip(parts, ends, strict=False):
        cut = _cut_of(a, part)
        start = -1 if cut is None else cut.start - before
        if cut is None or start < 0:
            continue
        places = zip(pairwise(start + end for end in ends), parts, strict=True)
        if all(cut.rows(a, *place) is each for place, each in places):
            return cut.rows(a, start, start + ends[-1])
    return None


@dataclass(frozen=True)
class _Cut:
    """A slice of rows, viewed as [1, N, S, D].

    Attributes:
        source: the tensor that is sliced.
        start: the first row.
        steps: the views behind the slice.
    """

    source: Value
    start: int
    steps: Steps

    def rows(self, a: Algebra, start: int, stop: int) -> Value:
        """Slice the source from `start` to `stop`, and apply the same views."""
        return self.steps.applied(a, a.cut(self.source, self.steps.dim, start, stop))


@proof
def _cut_of(a: Algebra, part: Value) -> _Cut | None:
    """Read the slice and the views from which `part` [1, N, S, D] is made; None for others."""
    cut = part.below(*VIEWS)
    must(cut.op == "slice")
    axis, start = cut.attrs[:2]
    steps = proven(steps_of([(cut, part)], ROWS, axis))
    must(steps.to == ROWS)
    return _Cut(cut.arg, start, steps)
