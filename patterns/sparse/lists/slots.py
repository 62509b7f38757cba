"""Slots in pages that a block table gives for places of keys: slot = table[b, place // Size] · Size + place % Size.

A model that gathers listed rows by their slots reads the pages of each sequence as the operator does, by the places.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Value
from fusion.graph.proof import must, proof, proven
from patterns.cache.read_block_tables import numbered


class Tabled(NamedTuple):
    """Places [*R] in pages of `size` rows that a block table [G, M] names: row-major R are of all G in turn.

    `counted_back`: whether a negative place counts from the end of these pages; else there is none.
    """

    table: Value
    places: Value
    size: int
    counted_back: bool

    def rows(self, a: Algebra, flat: Value) -> Value:
        """The rows [G, M · Size, D] of the pages that the table names, of the rows [1, Block · Size, D] of all."""
        if flat.op == "cat" and flat.attrs == (flat.rank - 1,):
            return a.cat([self.rows(a, each) for each in flat.args], -1)
        if flat.op == "slice" and flat.attrs[0] == flat.rank - 1:
            return a.cut(self.rows(a, flat.arg), -1, *flat.attrs[1:])
        (groups, many), (_, rows, width) = self.table.shape, flat.shape
        pages = a.reshape(flat, (rows // self.size, self.size, width))
        gathered = a.make("index", (pages, self.table), (0,), (groups, many, self.size, width), pages.dtype)
        return a.reshape(gathered, (groups, many * self.size, width))


def by_table(a: Algebra, slots: Value, rows: Any) -> Tabled | None:
    """Slots among so many rows as places in pages; None where no table is proven to give them.

    Where int32 counts all the rows, numbers that wrap round in it name no page.
    """
    if not isinstance(rows, int) or (slots.below("cast").dtype is not torch.int64 and rows > 2**31):
        return None
    found = _by_page(a, slots) or _by_row(a, slots, rows)
    is_whole = found is not None and rows % found.size == 0 and isinstance(found.table.shape[1], int)
    return found if is_whole else None


@proof
def _by_page(a: Algebra, slots: Value) -> Tabled | None:
    """table[b, place // Size] · Size + place % Size."""
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
    """every[b, place], where `every` is the slot of every row."""
    read = uncast(slots, "reshape", "wrap")
    every, places = proven(_looked_up(a, read))
    must(prod(places.shape) == prod(slots.shape))
    table, size = proven(numbered(a, every, every.shape[0], rows))
    return Tabled(uncast(table), a.reshape(places, slots.shape), size, read.op == "index")


def _looked_up(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """A table [G, M] and the columns that are read of it, row-major those of the first row, of the next, .."""
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
