"""Sequences of different lengths, one after the other, that are attended to by themselves (Dao et al., 2022, "varlen").

    out = [attention(q[s₀:s₁], k[t₀:t₁], v[t₀:t₁]), attention(q[s₁:s₂], k[t₁:t₂], v[t₁:t₂]), ..]

A loop over segments of packed tokens is one call of the operator, which is told where each ends; where each segment's
keys lie in pages of its own, it is one call over the pages (a serving engine's reference of paged attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from fusion import reader
from fusion.analysis.constant_folding import Folder
from fusion.analysis.row_layout import named
from fusion.graph import Algebra, Found, Graph, Reading, Value, but_ones
from fusion.graph.proof import must, proof, proven
from patterns.attention.joined_results import VIEWS, Results, joins, part_of, steps_of
from patterns.attention.read_block_masks import block_masked
from patterns.attention.segment_orders import ROWS, in_one_window, kind_of
from patterns.attention.words import PAGED_SEGMENTS, SEGMENTED_ATTENTION
from patterns.cache.joined_tables import joined_table

_ALIKE = ("scale", "window", "sink", "fully_masked_row")
_OWN = ("count", "levels", "kv_len", "kv_lens", "bias")
_SAID = {"q", "k", "v", "mask", "mask_kind", "output_view", *_ALIKE, *_OWN}
"""What is asked of each segment: attention of which more is said is none."""


@reader(gives=(SEGMENTED_ATTENTION,), needs=("softmax_attention",))
def segmented_attentions(graph: Graph) -> Iterator[Found]:
    """What is joined of attentions along their queries; attention behind a mask that makes segments."""
    yield from block_masked(graph)
    for results, value in joins(graph):
        read = segmented(graph.algebra, graph.shared(Folder), results, value)
        if read is not None:
            yield value, read


@reader(gives=(PAGED_SEGMENTS,), needs=("segmented_attention", "paged_rows"))
def paged_segments(graph: Graph) -> Iterator[Found]:
    """Keys and values of segments of which each lies in pages of its own."""
    for _, attention in graph.readings.all("segmented_attention"):
        for rows in (attention.captures["k"], attention.captures["v"]):
            found = _in_pages(graph, rows)
            if found is not None:
                yield rows, found


@proof
def _in_pages(graph: Graph, rows: Value) -> Reading | None:
    """Joined rows by the pages of all, and the rows of one block table."""
    must(rows.op == "cat" and rows.attrs == (ROWS,))
    parts = [proven(graph.readings.one(each, "paged_rows")).captures for each in rows.args]
    same = {name: parts[0][name] for name in ("pages", "size", "layout")}
    must(all(part[name] == each for part in parts for name, each in same.items()))
    tables = [part["block_table"] for part in parts]
    must(all(isinstance(each.shape[1], int) for each in tables))
    table = joined_table(graph.algebra, tables, same["pages"].shape[0])
    return Reading("paged_segments", {"rows": rows, "block_table": table} | same)


@proof
def segmented(a: Algebra, folder: Folder, results: Results, joined: Value) -> Reading | None:
    """The segments of which a value joins the results, each with what it attends to."""
    parts = [proven(part_of(a, results, each)) for each in joined.args]
    every = [each.reading.captures for each in parts]
    every = in_one_window(folder, every)
    first = every[0]
    must(all(each.keys() <= _SAID for each in every))
    must(all(each.get(name) == first.get(name) for each in every for name in _ALIKE))
    must(all(each.get(name) is None for each in every for name in _OWN))
    ends, key_ends, value_ends = (proven(_ends([each[name] for each in every])) for name in ("q", "k", "v"))
    must(key_ends == value_ends)  # torch reads as many values as there are keys
    steps = proven(steps_of([(each.plain, each.seen) for each in parts], joined.attrs[0]))
    must(steps.to == joined.attrs[0] and all(each.seen is steps.applied(a, each.plain) for each in parts))
    whole = {name: _joined(a, [each[name] for each in every]) for name in ("q", "k", "v")}
    captures = {name: first[name] for name in _ALIKE if name in first} | whole
    captures |= {"mask_kind": proven(kind_of(every)), "kv_len": None, "ends": ends, "key_ends": key_ends}
    relied = frozenset[str]().union(*(each.reading.relies for each in parts))
    view = proven(named(steps.of(ends[-1]), {}))
    return Reading("segmented_attention", captures | {"output_view": view}, relied)


def _ends(parts: Sequence[Value]) -> tuple[int, ...] | None:
    """Where each part of packed tokens ends; None of several sequences, or of lengths that are not known, or are 0.

    The parts must be such that they can be joined: of as many heads and lanes, in one dtype.
    """
    sizes: list[Any] = [each.shape[ROWS] for each in parts]
    rows = {(*each.shape[:ROWS], *each.shape[ROWS + 1 :], each.dtype) for each in parts}
    packed = len(rows) == 1 and all(each.rank == 4 and each.shape[0] == 1 for each in parts)
    return tuple(accumulate(sizes)) if packed and all(isinstance(each, int) and each for each in sizes) else None


def _joined(a: Algebra, parts: Sequence[Value]) -> Value:
    """Parts [1, N, S, D] one behind the other: what they are cut from, or joined anew."""
    return _uncut(a, parts) or a.cat(parts, ROWS)


def _uncut(a: Algebra, parts: Sequence[Value]) -> Value | None:
    """What parts are cut from, each where the one before it ends."""
    sizes: list[Any] = [each.shape[ROWS] for each in parts]
    ends = list(accumulate(sizes))
    for part, before in zip(parts, (0, *ends), strict=False):
        found = _whole(a, part)
        start = -1 if found is None else found[1] - before
        if found and start >= 0 and all(map(partial(_is_cut, a, found[0]), (start + end for end in ends), parts)):
            return a.cut(found[0], ROWS, start, start + ends[-1])
    return None


@proof
def _whole(a: Algebra, part: Value) -> tuple[Value, int] | None:
    """What [1, N, S, D] is cut from, as [1, N, T, D], and where it begins; one row may be cut before it was opened."""
    _, heads, rows, width = part.shape
    cut = part.below("reshape")
    must(cut.op == "slice")
    axis, start = cut.attrs[:2]
    if cut is part and axis == ROWS:
        return cut.arg, start
    must(rows == cut.shape[axis] == 1)
    tokens = a.permute(cut.arg, (axis, *(each for each in range(cut.rank) if each != axis)))
    count = tokens.shape[0]
    opened = a.permute(a.reshape(tokens, (count, heads, width)), (1, 0, 2))
    return a.reshape(opened, (1, heads, count, width)), start


def _is_cut(a: Algebra, whole: Value, end: int, part: Value) -> bool:
    """Whether a part is the rows before `end` of what it is cut from; one row is cut before it was turned as well."""
    size: Any = part.shape[ROWS]
    axis = ROWS
    if a.cut(whole, axis, end - size, end) is part:
        return True
    while size == 1 and whole.op in VIEWS:
        if whole.op == "reshape":
            if but_ones(whole.shape) != but_ones(whole.arg.shape) or whole.shape[axis] == 1:
                return False
            axis = _places(whole.arg)[len(but_ones(whole.shape[:axis]))]
        else:
            axis = whole.attrs[axis]
        whole = whole.arg
        if a.reshape(a.cut(whole, axis, end - 1, end), part.shape) is part:
            return True
    return False


def _places(x: Value) -> list[int]:
    """The dims of more than one entry."""
    return [place for place, size in enumerate(x.shape) if size != 1]
