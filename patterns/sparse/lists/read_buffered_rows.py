"""Rows of listed keys in a buffer of the model, into which each step copies only the rows that are new to it.

    hit, slot = where status == id        free = the slots that have no key of the list, in their order
    new = slot where hit, else the next free one
    buffer[new] = buffer[slot] where hit, else cache[id]            status[new] = id, status[-1] = K

Buffer and cache are pages, with tables for each list. Anything else is reported with its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusion import reader
from fusion.analysis.consecutive_positions import wrapped
from fusion.analysis.intervals import bounds
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.sparse.lists.buffer_slots import (
    Compared,
    choice,
    compared,
    free_order,
    is_next_free,
    is_updated_status,
    plain,
)
from patterns.sparse.lists.gathered_rows import counts, distinct, gathered
from patterns.sparse.words import KEPT_ROWS, KEPT_STATUS

_NO_BUFFER = (
    "buffer: listed rows are gathered into fresh memory at every step; npu_gather_selection_kv_cache "
    "requires a buffer of the model with a block table and a status (selection_kv_cache, "
    "selection_kv_block_table, selection_kv_block_status); keep the gathered rows in such a buffer"
)
_NO_TABLE = (
    "selection_kv_block_table: the buffer has none of each list; npu_gather_selection_kv_cache requires "
    "one; find slots as table[slot // Size] and slot % Size"
)
_NO_STATUS = (
    "selection_kv_block_status: no list of the step before is compared with this one, so that all rows are "
    "read again; npu_gather_selection_kv_cache requires it; keep the position of each slot in the status, "
    "and compare it with the list"
)
_OTHER_STATUS = (
    "selection_kv_block_status: it is [.., K] for a list of K; npu_gather_selection_kv_cache requires [.., "
    "K + 1] and writes the number of tokens in the last column; allocate one more"
)
_OTHER_LIST = (
    "list of keys: an entry may be no key, or one that the list names twice; npu_gather_selection_kv_cache "
    "requires distinct positions of keys; make the list of topk"
)
_OTHER_SLOTS = (
    "selection_kv_cache: rows that are missing from it are written to other slots, or in another order, than the n-th "
    "missing row to the n-th free slot; npu_gather_selection_kv_cache requires that order; number missing rows by "
    "miss.cumsum(-1) - 1, and free slots alike"
)
_STATUS_NOT_UPDATED = (
    "selection_kv_block_status: it does not become the list in the order of slots with its length; "
    "npu_gather_selection_kv_cache writes that and requires it; write status[:, :K] scattered by the "
    "slots, and status[:, K] = K"
)
_ELSEWHERE = (
    "buffer: rows that are in it already are moved; npu_gather_selection_kv_cache leaves them in the slots "
    "that the status names and requires that"
)
_ALONE = (
    "selection_k_rope: there is no buffer of rotated lanes; npu_gather_selection_kv_cache requires one unless "
    "rows are packed in int8; keep the latent and its rotated lanes in two buffers"
)
_READ_ELSEWHERE = (
    "slots: something else than the buffers and the status reads where rows go; "
    "npu_gather_selection_kv_cache may choose other slots and requires that the status alone is read; read "
    "the status behind the step"
)


@dataclass(frozen=True)
class _Paged:
    """Row numbers [.., R] in pages of `size` rows each, which a table names for each list [.., P]."""

    table: Value
    numbers: Value
    size: int


@dataclass(frozen=True)
class _Rows:
    """Rows gathered from pages.

    Attributes:
        source: the pages as the model has them, of any shape.
        pages: the pages as [Block, Size, C].
        at: numbers of the rows.
    """

    source: Value
    pages: Value
    at: _Paged


@dataclass(frozen=True)
class _BufferWrite:
    """A write of listed rows into a buffer.

    Attributes:
        value: the buffer after the write.
        status: the status after the step.
        slots: slots of the listed rows.
        captures: captures of `kept_rows`.
    """

    value: Value
    status: Value
    slots: Value
    captures: Mapping[str, Any]


@reader(gives=(KEPT_ROWS, KEPT_STATUS), needs=("write_pages", "write", "listed_attention"))
def buffered_rows(graph: Graph) -> Iterator[Annotation]:
    """Read every buffer of listed rows as `kept_rows` and `kept_status`; report why others are not read."""
    writes: list[_BufferWrite] = []
    written = set[Value]()
    for value, write in graph.readings.all("write_pages", "write"):
        result = _written(graph, value, write)
        if result is not None:
            written.add(value)
        if isinstance(result, str):
            yield value, Miss("gather_selection_kv_cache", result)
        elif result is not None:
            writes.append(result)
    for value, attention in graph.readings.all("listed_attention"):
        if written.isdisjoint(attention.captures["k"].sources()):
            yield value, Miss("gather_selection_kv_cache", _NO_BUFFER)
    for result in writes:
        alike = [each for each in writes if each.slots is result.slots]
        reason = ""
        if not result.captures["packed"] and len(alike) == 1:
            reason = _ALONE
        elif _is_read_elsewhere(graph, result.slots, {each for one in alike for each in (one.value, one.status)}):
            reason = _READ_ELSEWHERE
        if reason:
            yield result.value, Miss("gather_selection_kv_cache", reason)
            continue
        listed = {name: result.captures[name] for name in ("ids", "status")}
        yield result.value, Reading("kept_rows", result.captures, over=result.captures["cache"])
        yield result.status, Reading("kept_status", listed, over=listed["status"])


def _is_read_elsewhere(graph: Graph, slots: Value, into: Collection[Value]) -> bool:
    """Return True if something that is computed from `slots`, or from their order of free slots, is not used for
    `into`.

    Args:
        graph: the graph.
        slots: slots that the rows of a list are written to.
        into: the values that may depend on the choice of slots: buffers and status after the step.
    """
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


def _written(graph: Graph, value: Value, write: Reading) -> _BufferWrite | str | None:
    """Read `value`, by the cache write `write`, as a buffer after a write of listed rows.

    Returns the write; the reason if the operator could not do it; or None if no rows gathered from another cache are
    written.
    """
    a, (cache, rows) = graph.algebra, (write.captures[name] for name in ("cache", "rows"))
    condition, there, fresh = choice(rows.below("reshape")) or (None, None, rows)
    source = _rows(a, fresh)
    if source is None or source.source is cache.below("reshape"):
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
    if stays is None or (stays.source, stays.at) != (cache.below("reshape"), own):
        return _ELSEWHERE
    return _with_status(graph, value, cache, own, source, same)


def _with_status(
    graph: Graph, value: Value, cache: Value, own: _Paged, source: _Rows, same: Compared
) -> _BufferWrite | str:
    """Find the status after a step for a write of listed rows into `cache`; the reason if the operator writes another
    one.

    Args:
        graph: the graph.
        value: the buffer after the write.
        cache: the buffer before the write.
        own: slots of the rows in the buffer.
        source: rows of the cache of all keys.
        same: comparison of the list with the status before the step.
    """
    a, ids, new = graph.algebra, source.at.numbers, plain(own.numbers)
    count = ids.shape[-1]
    has_length = same.stored.op == "slice" and same.stored.attrs == (ids.rank - 1, 0, count, 1)
    if not has_length or same.stored.arg.shape[-1] != count + 1:
        return _OTHER_STATUS
    if not distinct(ids) or bounds(ids)[0] < 0:
        return _OTHER_LIST
    if not is_next_free(new, same):
        return _OTHER_SLOTS
    status = next((each for each in graph.places if is_updated_status(each, same, new, ids)), None)
    if status is None:
        return _STATUS_NOT_UPDATED
    pages = source.pages.shape[0]
    tables = {"table": wrapped(a, own.table, cache.shape[0]), "full_table": wrapped(a, source.at.table, pages)}
    caches = {"cache": cache, "full": source.pages, "packed": cache.dtype is torch.int8}
    return _BufferWrite(value, status, new, {**caches, **tables, "ids": ids, "status": same.stored.arg})


@proof
def _rows(a: Algebra, x: Value) -> _Rows | None:
    """Read `x` [.., R, C] as rows gathered from pages [Block, Size, C] by a table [.., P]; None if it is anything
    else.
    """
    rows = proven(gathered(a, x))
    at = proven(_paged(a, rows.places))
    _, count, lanes = rows.source.shape
    must(rows.groups == 1 and isinstance(count, int) and count % at.size == 0 and count < 1 << 31)
    pages = a.reshape(rows.source, (int(count) // at.size, at.size, lanes))
    return _Rows(rows.source.below("reshape"), pages, at)


@proof
def _paged(a: Algebra, places: Value) -> _Paged | None:
    """Read `places` as table[number // Size] · Size + number % Size; None if it is anything else."""
    x = plain(places, "reshape", "wrap")  # a page that counts from the end does so too as the number of a row
    must(x.op == "add")
    for page, offset in x.operands():
        page, offset = (plain(each, "reshape") for each in (page, offset))
        if page.op == "scale" and offset.op == "remainder" and page.attrs == offset.attrs:
            size = int(offset.attrs[0])
            table, number = proven(_entry(a, plain(page.arg, "reshape", "wrap")))
            must((number.op, number.attrs) == ("floor_divide", (size,)) and number.arg is offset.arg)
            return _Paged(table, offset.arg, size)
    return None


@proof
def _entry(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """Read `x` [.., R] as table[.., index]: return the table of each list [.., P], and the indices [.., R]; None
    otherwise.
    """
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
