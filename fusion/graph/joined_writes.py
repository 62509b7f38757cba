"""Writes at equal positions into parts of a cache that cover it: one write of their joined rows.

cache[index, :, :512] = a; cache[index, :, 512:] = b     cache[index] = cat(a, b)

The parts are disjoint, so that their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.graph.algebra import Algebra
from fusion.graph.proof import must, proof, proven
from fusion.graph.value import Value

Part = tuple[int, int, Value, Value]
"""Where a part starts and stops, the buffer before it was put back, and what was put back."""


@proof
def joined(a: Algebra, buffer: Value, parts: Sequence[Part], axis: int) -> Value | None:
    """Return `buffer` after one write along another axis, which the neighbouring `parts` along `axis` make up."""
    written = [proven(_opened(a, source, axis, before, start, stop)) for start, stop, before, source in parts]
    op, index, attrs = written[0].op, written[0].args[2:], written[0].attrs
    must(all((each.op, each.args[2:], each.attrs) == (op, index, attrs) for each in written))
    rows, place = [each.args[1] for each in written], _axis_of_rows(written[0], axis)
    must(len({(*each.shape[:place], *each.shape[place + 1 :]) for each in rows}) == 1)  # from one start may go fewer
    return a.make(op, (buffer, a.cat(rows, place), *index), attrs, buffer.shape, buffer.dtype)


@proof
def _opened(a: Algebra, source: Value, axis: int, before: Value, start: int, stop: int) -> Value | None:
    """Return the write into `before`[start:stop] along `axis` that `source` is, with the dim of a single entry.

    Such a dim is missing where the part was selected by a number.
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
    """Return the axes of the cache along which the index counts; the batch as well where positions are of sequences."""
    is_by_place = written.op == "write_rows" and len(written.args) == 4
    return (written.attrs[0], written.attrs[0] + 1) if is_by_place else (0, written.attrs[0])


def _axis_of_rows(written: Value, axis: int) -> int:
    """Return where `axis` of the cache stands in the rows: two indices of a page are one dim of them."""
    return axis - 1 if written.op == "write_rows" and len(written.args) == 4 else axis
