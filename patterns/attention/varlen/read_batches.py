"""Attentions of one sequence each whose results are concatenated, read as one attention of a batch.

    out = [attention(q[b], k[b], v[b], first lengths[b] keys) for b in range(B)]

All sequences must have as many queries, and as many keys unless these are the first rows of one cache. Reference code
of serving engines has such loops, with lengths that are data or numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from fusion import reader
from fusion.analysis.row_layout import named
from fusion.graph import Algebra, Annotation, Graph, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.varlen.joined_results import Part, Results, each_alone, joins, part_of, views_between
from patterns.attention.varlen.segment_orders import ROWS, Captures, kind_of, visible_rows
from patterns.attention.varlen.stacked_sequences import stacked
from patterns.attention.words import SOFTMAX_ATTENTION

_ALIKE = ("scale", "window", "sink", "fully_masked_row", "mask_kind", "kv_len")
_BROADCAST = ("mask", "levels", "bias")
"""Captures that all sequences may share."""
_LENGTHS = ("count", "kv_lens", "kv_len", "levels", "bias")
"""Captures that say which keys are seen, beside the kind of the mask."""
_OWN = ("count", "kv_lens", *_BROADCAST)
"""Captures that differ between sequences; without any, `segmented_attentions` reads sequences of any length."""
_JOINED = ("q", "k", "v", *_OWN)


@reader(gives=(), needs=("softmax_attention",), refines=(SOFTMAX_ATTENTION.name,))
def batched_attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every concatenation of attentions of one sequence each, as `softmax_attention` of the batch."""
    for results, value in joins(graph):
        read = batched(graph, results, value)
        if read is not None:
            yield value, read


@proof
def batched(graph: Graph, results: Results, joined: Value) -> Reading | None:
    """Read attentions of one sequence each, among `results`, which `joined` concatenates, as attention of a batch.

    None if the sequences differ in more than their tensors.
    """
    a = graph.algebra
    parts = [proven(part_of(a, results, each)) for each in joined.args]
    every, (axis,) = [each.reading.captures for each in parts], joined.attrs
    must(all(each.keys() <= {*_ALIKE, *_JOINED, "output_view"} for each in every))
    must(all(each[name].shape[0] == 1 for each in every for name in ("q", "k", "v")))
    stacked = proven(_alike(graph, every) or _own_lengths(graph, every))
    must(all(_views(each) == _views(parts[0]) for each in parts))
    view = proven(_view(a, parts[0], axis, joined.shape))
    relied = frozenset[str]().union(*(each.reading.relies for each in parts))
    return Reading("softmax_attention", {**stacked, "output_view": view}, relied)


@proof
def _alike(graph: Graph, every: Sequence[Captures]) -> Captures | None:
    """Return the captures of the batch of sequences with the captures `every`, whose masks are tensors or lengths.

    None if there is no such tensor, or if the sequences differ in their numbers of queries or keys.
    """
    first = every[0]
    must(all(each.keys() == first.keys() for each in every))
    must(any(first.get(name) is not None for name in _OWN))
    must(all(each.get(name) == first.get(name) for each in every for name in _ALIKE))
    there = [name for name in _JOINED if first.get(name) is not None]
    joined = {name: _joined(graph, [each[name] for each in every], name in _BROADCAST) for name in there}
    return {**first, **{name: proven(each) for name, each in joined.items()}}


@proof
def _own_lengths(graph: Graph, every: Sequence[Captures]) -> Captures | None:
    """Return the captures of the batch of sequences with the captures `every`, each of which sees the first keys of its
    own sequence of one cache.

    None for keys that are not read from a cache, or for masks that differ in more than the number of keys.
    """
    a = graph.algebra
    every = [visible_rows(a, each) for each in every]
    first = every[0]
    must(all(each.get(name) == first.get(name) for each in every for name in _ALIKE if name != "mask_kind"))
    must(first.get("window") is None and all(each.get(name) is None for each in every for name in _LENGTHS))
    keys, values = (proven(stacked(graph, [each[name] for each in every])) for name in ("k", "v"))
    must(keys.lengths == values.lengths != () and keys.axis == values.axis == ROWS - 4)
    k, v = (a.reshape(each.every, (len(every), *each.every.shape[2:])) for each in (keys, values))
    lengths: Any = keys.lengths
    if len(set(lengths)) == 1:
        k, v, lengths = a.cut(k, ROWS, 0, lengths[0]), a.cut(v, ROWS, 0, lengths[0]), None
    q = proven(_joined(graph, [each["q"] for each in every], False))
    return {**first, "q": q, "k": k, "v": v, "kv_len": lengths, "mask": None, "mask_kind": proven(kind_of(every))}


@proof
def _view(a: Algebra, part: Part, axis: int, shape: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the steps from the result of the batch to `shape`, the concatenation along `axis` of the sequences'
    results.

    `part` is one sequence with the views behind its result, which all have. Symbolic sizes are replaced by names, as
    the lowering has its own. None if there are no such steps.
    """
    seen, count, names = part.view, shape[axis] // part.view.shape[axis], {part.plain.shape[ROWS]: "S"}
    if seen.shape[axis] == 1:
        return named(proven(each_alone(part.plain, seen, axis, 0)).for_rows(count), names)
    must(prod(seen.shape[:axis]) == 1)
    opened = a.reshape(seen, (1, *seen.shape))
    steps = proven(each_alone(part.plain, opened, 0, 0)).for_rows(count)
    return named((*steps, ("reshape", tuple(shape))), names)


def _joined(graph: Graph, parts: Sequence[Value], broadcast: bool) -> Value | None:
    """Join `parts`, the same operand [1, ..] of each sequence, to [B, ..]; None if their shapes or dtypes differ.

    If `broadcast` is True, one that all sequences share is returned as it is.
    """
    if broadcast and all(each is parts[0] for each in parts):
        return parts[0]
    first, a = parts[0], graph.algebra
    if len({(each.shape, each.dtype) for each in parts}) != 1 or first.shape[:1] != (1,):
        return None
    joint = stacked(graph, parts)
    if joint is None:
        return a.cat(parts, 0)
    rows = a.reshape(joint.every, (len(parts), *joint.every.shape[2:]))
    return rows if joint.axis is None else a.cut(rows, joint.axis, 0, joint.lengths[0])


def _views(part: Part) -> list[tuple[Any, ...]]:
    """List op, attributes and shape of each view between the result of the attention `part` and the operand that it
    becomes.
    """
    return [(each.op, each.attrs, each.shape) for each in proven(views_between(part.plain, part.view))[1:]]
