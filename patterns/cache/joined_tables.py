"""One block table of all sequences, built from one block table of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion.analysis.consecutive_positions import wrapped
from fusion.graph import Algebra, Value


def joined_table(a: Algebra, tables: Sequence[Value], blocks: Any) -> Value:
    """Combine `tables`, one [1, Pᵢ] of each of N sequences, to a block table [N, P] of page numbers below `blocks`.

    If `tables` are consecutive rows of one tensor, the result is a slice of that tensor; else their concatenation,
    the shorter ones padded with their first page: no operator reads the entries beyond the length of a sequence.
    """
    source, count = tables[0].below("wrap", "cast", "reshape", "slice"), len(tables)
    rows: Any = source.shape[0] if source.rank == 2 else 0

    def row(i: int, length: Any) -> Value:
        cut = a.cut(a.cut(source, 0, i, i + 1), 1, 0, length)
        return wrapped(a, a.cast(cut, tables[0].dtype), blocks)

    for start in range(rows - count + 1 if isinstance(rows, int) else 0):
        if all(row(start + i, each.shape[1]) is each for i, each in enumerate(tables)):
            return wrapped(a, a.cut(source, 0, start, start + count), blocks)
    most: Any = max(each.shape[1] for each in tables)
    first = (a.expand(a.cut(each, 1, 0, 1), (1, most - each.shape[1])) for each in tables)
    filled = (a.cat((each, more), 1) for each, more in zip(tables, first, strict=True))
    return a.cat([*filled], 0)
