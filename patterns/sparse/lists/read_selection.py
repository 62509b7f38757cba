"""Rows of listed keys that a model keeps in a buffer, so that the next step copies only those that are new to it.

    found, slot = where status == id      free = the slots that hold none of the list, in their order
    new = slot where found, else the next free one
    buffer[new] = buffer[slot] where found, else cache[id]          status[new] = id, status[-1] = K

Both caches are pages, each list has tables of its own. Whatever differs from that is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusion import reader
from fusion.analysis.intervals import bounds
from fusion.analysis.runs import wrapped
from fusion.graph import Algebra, Found, Graph, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.sparse.lists.buffer_slots import Compared, choice, compared, free_order, is_next_free, is_told, plain
from patterns.sparse.lists.rows import counts, distinct, gathered
from patterns.sparse.words import KEPT_ROWS, KEPT_STATUS, UNKEPT_ROWS

_NO_BUFFER = (
    "the listed rows are gathered into fresh memory at every step: the model keeps no buffer for them, with a block "
    "table and a status of its own (selection_kv_cache, selection_kv_block_table, selection_kv_block_status)"
)
_NO_TABLE = (
    "the buffer has no block table of its own for each list (selection_kv_block_table), by which a slot is found as "
    "table[slot // Size] and slot % Size"
)
_NO_STATUS = (
    "all listed rows are read again: nothing tells which of them the buffer holds already, as a list that is compared "
    "with a status does (selection_kv_block_status)"
)
_OTHER_STATUS = (
    "the status has no last column, [.., K + 1] for a list of K, in which the operator writes how many tokens the "
    "buffer holds"
)
_OTHER_LIST = "an entry of the list may be no key, or one that the list names twice"
_OTHER_SLOTS = "rows that the buffer does not hold go elsewhere than, one by one, to its free slots in their order"
_NOT_TOLD = (
    "the status does not become the list by its slots and the length of the list, though the operator writes it: "
    "status[:, :K] scattered by the slots, and status[:, K] = K"
)
_ELSEWHERE = "rows that the buffer holds are not left where they are, in the slots that the status names"
_ALONE = "there is no second buffer, which the operator keeps of rotated lanes unless rows are packed in int8"
_READ_ELSEWHERE = (
    "something else reads which slots the rows go to: the operator may choose others, of which the status alone tells"
)


@dataclass(frozen=True)
class _Paged:
    """Rows at numbers [.., R] of the pages, of `size` rows each, that a table names for each list [.., P]."""

    table: Value
    numbers: Value
    size: int


@dataclass(frozen=True)
class _Rows:
    """Rows of pages [Block, Size, C]; `held` is what the model holds of them, perhaps with other dims."""

    held: Value
    pages: Value
    at: _Paged


@dataclass(frozen=True)
class _Kept:
    """A write of rows that are kept: its value, that of the status, the slots of the rows, and what a reading says."""

    value: Value
    told: Value
    slots: Value
    said: Mapping[str, Any]


@reader(gives=(KEPT_ROWS, KEPT_STATUS, UNKEPT_ROWS), needs=("write_pages", "write", "listed_attention"))
def kept_selections(graph: Graph) -> Iterator[Found]:
    """Buffers of listed rows with their status; why others are none that an operator keeps."""
    kept: list[_Kept] = []
    written = set[Value]()
    for value, write in graph.readings.all("write_pages", "write"):
        found = _written(graph, value, write)
        if found is not None:
            written.add(value)
        if isinstance(found, str):
            yield value, _unkept(found)
        elif found is not None:
            kept.append(found)
    for value, attention in graph.readings.all("listed_attention"):
        if written.isdisjoint(attention.captures["k"].sources()):
            yield value, _unkept(_NO_BUFFER)
    for found in kept:
        alike = [each for each in kept if each.slots is found.slots]
        reason = ""
        if not found.said["packed"] and len(alike) == 1:
            reason = _ALONE
        elif _is_read_elsewhere(graph, found.slots, {each for one in alike for each in (one.value, one.told)}):
            reason = _READ_ELSEWHERE
        if reason:
            yield found.value, _unkept(reason)
            continue
        listed = {name: found.said[name] for name in ("ids", "status")}
        yield found.value, Reading("kept_rows", found.said, over=found.said["cache"])
        yield found.told, Reading("kept_status", listed, over=listed["status"])


def _unkept(reason: str) -> Reading:
    """Why rows are not kept, which the rule tells where it is on: a `Miss` would be told always."""
    return Reading("unkept_rows", {"reason": reason})


def _is_read_elsewhere(graph: Graph, slots: Value, into: Collection[Value]) -> bool:
    """Whether nodes read slots, or the order of the free ones, on no way into some values."""
    ends = {node for each in into for node in graph.places[each]}
    leading, waiting = set(ends), list(ends)
    while waiting:
        before = set(waiting.pop().all_input_nodes) - leading
        leading |= before
        waiting.extend(before)
    order = free_order(slots)
    waiting = [node for value, nodes in graph.places.items() if plain(value) is order for node in nodes]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        behind = set() if node in ends else set(node.users) - seen
        if node not in leading:
            return True
        seen |= behind
        waiting.extend(behind)
    return False


def _written(graph: Graph, value: Value, write: Reading) -> _Kept | str | None:
    """A write as one of rows that are kept; why it is none; None if it is not like one."""
    a, (cache, rows) = graph.algebra, (write.captures[name] for name in ("cache", "rows"))
    condition, there, fresh = choice(rows.below("reshape")) or (None, None, rows)
    source = _rows(a, fresh)
    if source is None or source.held is cache.below("reshape"):
        return None
    slots, by_page = write.captures.get("slots", write.captures.get("index")), write.op == "write_pages"
    own = None if slots is None or write.captures.get("nz_block") is not None else _paged(a, slots)
    if own is None:
        return _NO_TABLE if by_page or not graph.readings.of(value, "write_pages") else None
    if not by_page:
        return None
    same = None if condition is None else compared(a, condition, source.at.numbers)
    if same is None or there is None:
        return _NO_STATUS
    stays = _rows(a, there)
    if stays is None or (stays.held, stays.at) != (cache.below("reshape"), own):
        return _ELSEWHERE
    return _with_status(graph, value, cache, own, source, same)


def _with_status(graph: Graph, value: Value, cache: Value, own: _Paged, source: _Rows, same: Compared) -> _Kept | str:
    """A write of listed rows to slots, whose status tells of them; why it does not."""
    a, ids, new = graph.algebra, source.at.numbers, plain(own.numbers)
    count = ids.shape[-1]
    whole = same.held.op == "slice" and same.held.attrs == (ids.rank - 1, 0, count, 1)
    if not whole or same.held.arg.shape[-1] != count + 1:
        return _OTHER_STATUS
    if not distinct(ids) or bounds(ids)[0] < 0:
        return _OTHER_LIST
    if not is_next_free(new, same):
        return _OTHER_SLOTS
    told = next((each for each in graph.places if is_told(each, same, new, ids)), None)
    if told is None:
        return _NOT_TOLD
    pages = source.pages.shape[0]
    tables = {"table": wrapped(a, own.table, cache.shape[0]), "full_table": wrapped(a, source.at.table, pages)}
    kept = {"cache": cache, "full": source.pages, "packed": cache.dtype is torch.int8}
    return _Kept(value, told, new, {**kept, **tables, "ids": ids, "status": same.held.arg})


@proof
def _rows(a: Algebra, x: Value) -> _Rows | None:
    """Rows that are gathered by numbers of rows of pages."""
    found = proven(gathered(a, x))
    at = proven(_paged(a, found.places))
    _, count, lanes = found.source.shape
    must(found.groups == 1 and isinstance(count, int) and count % at.size == 0 and count < 1 << 31)
    pages = a.reshape(found.source, (int(count) // at.size, at.size, lanes))
    return _Rows(found.source.below("reshape"), pages, at)


@proof
def _paged(a: Algebra, places: Value) -> _Paged | None:
    """Places as table[number // Size] * Size + number % Size."""
    x = plain(places, "reshape", "wrap")  # a page that counts from the end does so too as the number of a row
    must(x.op == "add")
    for page, offset in (x.args, x.args[::-1]):
        page, offset = (plain(each, "reshape") for each in (page, offset))
        if page.op == "scale" and offset.op == "remainder" and page.attrs == offset.attrs:
            size = int(offset.attrs[0])
            table, number = proven(_entry(a, plain(page.arg, "reshape", "wrap")))
            must((number.op, number.attrs) == ("floor_divide", (size,)) and number.arg is offset.arg)
            return _Paged(table, offset.arg, size)
    return None


@proof
def _entry(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """A table for each list [.., P], and which entries of it are taken [.., R]."""
    if x.op == "take":
        table, numbers = x.args
    else:
        must(x.op == "index" and x.attrs == (0, 1))
        table, row, numbers = x.args
        must(table.rank == 2 and counts(a, row, table.shape[0], x.rank))
    lead, rank = table.shape[:-1], x.rank - table.rank
    must(rank >= 0 and numbers.shape == x.shape and lead == x.shape[: len(lead)])
    opened = a.reshape(table, (*lead, *[1] * rank, table.shape[-1]))
    return a.expand(opened, (*x.shape[:-1], table.shape[-1])), numbers
