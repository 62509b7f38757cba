"""Writes at equal positions into disjoint parts that together cover a cache: one write of the concatenated rows.

cache[index, :, :512] = a; cache[index, :, 512:] = b     cache[index] = cat(a, b)

The parts are disjoint, so that their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.graph.algebra import Algebra
from fusion.graph.proof_steps import must, proof, proven
from fusion.graph.value import Value

Part = tuple[int, int, Value, Value]
"""Start and stop along the axis, the buffer before the part was put back, and the value that was put back."""


@proof
def joined(a: Algebra, buffer: Value, parts: Sequence[Part], axis: int) -> Value | None:
    """Return `buffer` after one write of the rows of all `parts`, which are adjacent along `axis` and cover it."""
    written = [proven(_opened(a, source, axis, before, start, stop)) for start, stop, before, source in parts]
    op, index, attrs = written[0].op, written[0].args[2:], written[0].attrs
    must(all((each.op, each.args[2:], each.attrs) == (op, index, attrs) for each in written))
    rows, place = [each.args[1] for each in written], _axis_of_rows(written[0], axis)
    must(
        len({(*each.shape[:place], *each.shape[place + 1 :]) for each in rows}) == 1
    )  # writes from one start may differ in their number of rows
    return a.make(op, (buffer, a.cat(rows, place), *index), attrs, buffer.shape, buffer.dtype)


@proof
def _opened(a: Algebra, source: Value, axis: int, before: Value, start: int, stop: int) -> Value | None:
    """Return `source` as a write into `before`[start:stop] along `axis`, with the sliced dim as a dim of size 1.

    The dim of a part of one entry is missing in `source` where the part was selected by a number.
    """
    part, written = a.cut(before, axis, start, stop), source.below("reshape")
    must(written.op in ("write", "write_rows", "slice_scatter") and a.reshape(written.arg, part.shape) is part)
    if written.shape == part.shape:
        must(axis not in _axes_of_positions(written))
        return written
    must(stop - start == 1 and written.shape == (*part.shape[:axis], *part.shape[axis + 1 :]))
    must(axis > max(_axes_of_positions(written)))
    rows, place = written.args[1], _axis_of_rows(written, axis)
    return a.make(written.op, (part, a.opened(rows, place), *written.args[2:]), written.attrs, part.shape, part.dtype)


def _axes_of_positions(written: Value) -> Sequence[int]:
    """Return the axes of the cache that the index of `written` may cover.

    The two axes of a (block, offset) index; else the batch, for positions of each sequence, and the axis of the rows.
    """
    is_by_place = written.op == "write_rows" and len(written.args) == 4
    return (written.attrs[0], written.attrs[0] + 1) if is_by_place else (0, written.attrs[0])


def _axis_of_rows(written: Value, axis: int) -> int:
    """Return the axis of the rows of `written` that is `axis` of the cache; a (block, offset) index merges two axes."""
    return axis - 1 if written.op == "write_rows" and len(written.args) == 4 else axis
