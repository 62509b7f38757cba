"""Attentions of one sequence each whose results are concatenated, read as one attention of a batch.

    out = [attention(q[b], k[b], v[b], first lengths[b] keys) for b in range(B)]

All sequences must have as many queries and keys. Reference code of serving engines has such loops, with lengths that
are data.
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
from patterns.attention.varlen.segment_orders import ROWS
from patterns.attention.words import SOFTMAX_ATTENTION

_ALIKE = ("scale", "window", "sink", "fully_masked_row", "mask_kind", "kv_len")
_BROADCAST = ("mask", "levels", "bias")
"""Captures that all sequences may share."""
_OWN = ("count", "kv_lens", *_BROADCAST)
"""Captures that differ between sequences; without any, `segmented_attentions` reads sequences of any length."""
_JOINED = ("q", "k", "v", *_OWN)


@reader(gives=(), needs=("softmax_attention",), refines=(SOFTMAX_ATTENTION.name,))
def batched_attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every concatenation of attentions of one sequence each, as `softmax_attention` of the batch."""
    for results, value in joins(graph):
        read = batched(graph.algebra, results, value)
        if read is not None:
            yield value, read


@proof
def batched(a: Algebra, results: Results, joined: Value) -> Reading | None:
    """Read attentions of one sequence each, among `results`, which `joined` concatenates, as attention of a batch.

    None if the sequences differ in more than their tensors.
    """
    parts = [proven(part_of(a, results, each)) for each in joined.args]
    every = [each.reading.captures for each in parts]
    first, (axis,) = every[0], joined.attrs
    must(all(each.keys() == first.keys() for each in every))
    must(first.keys() <= {*_ALIKE, *_JOINED, "output_view"})
    must(any(first.get(name) is not None for name in _OWN))
    must(all(each.get(name) == first.get(name) for each in every for name in _ALIKE))
    must(all(each[name].shape[0] == 1 for each in every for name in ("q", "k", "v")))
    there = [name for name in _JOINED if first.get(name) is not None]
    stacked = {name: proven(_joined(a, [each[name] for each in every], name in _BROADCAST)) for name in there}
    must(all(_views(each) == _views(parts[0]) for each in parts))
    view = proven(_view(a, parts[0], axis, joined.shape))
    relied = frozenset[str]().union(*(each.reading.relies for each in parts))
    return Reading("softmax_attention", {**first, **stacked, "output_view": view}, relied)


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


def _joined(a: Algebra, parts: Sequence[Value], broadcast: bool) -> Value | None:
    """Concatenate `parts`, the same operand [1, ..] of each sequence, to [B, ..]; None if their shapes or dtypes
    differ.

    If `broadcast` is True, one that all sequences share is returned as it is.
    """
    if broadcast and all(each is parts[0] for each in parts):
        return parts[0]
    alike = {(each.shape, each.dtype) for each in parts}
    return a.cat(parts, 0) if len(alike) == 1 and parts[0].shape[:1] == (1,) else None


def _views(part: Part) -> list[tuple[Any, ...]]:
    """List op, attributes and shape of each view between the result of the attention `part` and the operand that it
    becomes.
    """
    return [(each.op, each.attrs, each.shape) for each in proven(views_between(part.plain, part.view))[1:]]
