"""Slots in pages that a block table gives for positions of keys: slot = table[b, place // Size] · Size + place % Size.

An operator reads rows that are gathered by slots through the block table of each sequence, by positions.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.cache.read_block_tables import row_number_table


class Tabled(NamedTuple):
    """Positions [*R] in pages of `size` rows that a block table [G, M] names.

    In row-major order the first R / G positions are in the pages of the first row of the table, the next ones in those
    of the second. `counted_back` is True if a negative position counts from the end of the pages; otherwise there is
    none.
    """

    table: Value
    places: Value
    size: int
    counted_back: bool

    def rows(self, a: Algebra, flat: Value) -> Value:
        """Gather the rows [G, M · Size, D] of the pages in `self.table` from `flat` [1, Block · Size, D], the rows of
        all pages.
        """
        if flat.op == "cat" and flat.attrs == (flat.rank - 1,):
            return a.cat([self.rows(a, each) for each in flat.args], -1)
        if flat.op == "slice" and flat.attrs[0] == flat.rank - 1:
            return a.cut(self.rows(a, flat.arg), -1, *flat.attrs[1:])
        (groups, many), (_, rows, width) = self.table.shape, flat.shape
        pages = a.reshape(flat, (rows // self.size, self.size, width))
        gathered = a.make("index", (pages, self.table), (0,), (groups, many, self.size, width), pages.dtype)
        return a.reshape(gathered, (groups, many * self.size, width))


def by_table(a: Algebra, slots: Value, rows: Any) -> Tabled | None:
    """Read `slots`, row numbers in pages of `rows` rows in all, as positions that a block table maps to slots.

    None if no table is proven to; if `rows` is symbolic; or if `slots` are int32 and there are more than 2³¹ rows, so
    that a slot that wraps round could name another page.
    """
    if not isinstance(rows, int) or (slots.below("cast").dtype is not torch.int64 and rows > 2**31):
        return None
    tabled = _by_page(a, slots) or _by_row(a, slots, rows)
    is_divided = tabled is not None and rows % tabled.size == 0 and isinstance(tabled.table.shape[1], int)
    return tabled if is_divided else None


@proof
def _by_page(a: Algebra, slots: Value) -> Tabled | None:
    """Read `slots` as table[b, place // Size] · Size + place % Size; None if they are computed in another way."""
    total = uncast(slots, "reshape", "wrap")
    must(total.op == "add")
    first, second = (uncast(each, "reshape") for each in total.args)
    first, second = (first, second) if first.op == "scale" else (second, first)
    offset = uncast(second, "reshape", "wrap")
    must((first.op, offset.op) == ("scale", "remainder") and first.attrs == offset.attrs)
    size, places = int(offset.attrs[0]), offset.arg
    read = uncast(first.arg, "reshape", "wrap")
    table, page = proven(_looked_up(a, read))
    page = uncast(page, "reshape")
    must(page.op == "floor_divide" and page.attrs == offset.attrs and uncast(page.arg) is uncast(places))
    must(prod(places.shape) == prod(slots.shape) == prod(first.shape))
    return Tabled(table, a.reshape(places, slots.shape), size, read.op == "index")


@proof
def _by_row(a: Algebra, slots: Value, rows: Any) -> Tabled | None:
    """Read `slots` as every[b, place], where every[b] has the slots of all positions of sequence b, expanded from a
    table.

    `rows` is the number of rows of all pages. None if `slots` are computed in another way.
    """
    read = uncast(slots, "reshape", "wrap")
    every, places = proven(_looked_up(a, read))
    must(prod(places.shape) == prod(slots.shape))
    table, size = proven(row_number_table(a, every, every.shape[0], rows))
    return Tabled(uncast(table), a.reshape(places, slots.shape), size, read.op == "index")


def _looked_up(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """Read `x` as entries of a table [G, M]: return the table, and the column of each entry, in the shape of `x`.

    In row-major order, the first of G equal parts of `x` is from row 0 of the table, the next from row 1. None if `x`
    is anything else.
    """
    if x.op == "take":
        table, columns = x.args
        lead, many = table.shape[: table.rank - x.rank + columns.rank - 1], table.shape[-1]
        is_row = table.rank == len(lead) + 1
        return (uncast(a.reshape(table, (prod(lead), many))), columns) if is_row else None
    if x.op != "index" or x.attrs not in ((0,), (0, 1)) or x.arg.rank != len(x.attrs):
        return None
    if x.attrs == (0,):
        return uncast(a.reshape(x.arg, (1, x.arg.shape[0]))), x.args[1]
    table, row, columns = x.args
    if row.rank != x.rank or row.shape != (x.shape[0], *[1] * (x.rank - 1)):
        return None
    rows = a.make("index", (table, a.reshape(row, (x.shape[0],))), (0,), (x.shape[0], table.shape[1]), table.dtype)
    return uncast(rows), a.expand(columns, x.shape)
