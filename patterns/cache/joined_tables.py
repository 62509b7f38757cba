"""One block table for sequences of which each has its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion.analysis.runs import wrapped
from fusion.graph import Algebra, Value


def joined_table(a: Algebra, tables: Sequence[Value], blocks: Any) -> Value:
    """The block table [N, P] of sequences that have one [1, Pᵢ] each: rows of one where they are, else all joined.

    What a table says beyond a length is not read: shorter ones are filled up with their first page.
    """
    whole, count = tables[0].below("wrap", "cast", "reshape", "slice"), len(tables)
    rows: Any = whole.shape[0] if whole.rank == 2 else 0

    def row(number: int, length: Any) -> Value:
        cut = a.cut(a.cut(whole, 0, number, number + 1), 1, 0, length)
        return wrapped(a, a.cast(cut, tables[0].dtype), blocks)

    for start in range(rows - count + 1 if isinstance(rows, int) else 0):
        if all(row(start + number, each.shape[1]) is each for number, each in enumerate(tables)):
            return wrapped(a, a.cut(whole, 0, start, start + count), blocks)
    most: Any = max(each.shape[1] for each in tables)
    first = (a.expand(a.cut(each, 1, 0, 1), (1, most - each.shape[1])) for each in tables)
    filled = (a.cat((each, more), 1) for each, more in zip(tables, first, strict=True))
    return a.cat([*filled], 0)
