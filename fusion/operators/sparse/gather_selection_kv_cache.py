"""Gather of listed blocks of a cache, which may be on the host, into a device buffer with blocks of earlier calls.

    slot of id: where status has it, else a free one        selection[slot] = full[id] unless the buffer has it
    status[slot] = id, -1 behind the last slot in use       status[-1] = number of tokens in use

The package of the operator may define its overload at any time: the pass emits an overload of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion._torch.tensors import count
from fusion.operators.cache.pages import Put
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import HALVES, INT8, INT32
from fusion.operators.flops import unlisted
from fusion.operators.limits import Limit
from fusion.operators.operator import Operator, functional


@dataclass(frozen=True)
class _Slots:
    """Slots of the buffer for the blocks that T queries list, with K entries each."""

    listed: Tensor
    """Mask [T, K] of entries that name a block."""
    tokens: Tensor
    """Number [T, K] of tokens of the block, 0 for entries that name none."""
    cached: Tensor
    """Mask [T, K] of blocks that the buffer has, without new tokens in them."""
    old: Tensor
    """Slot [T, K] of a cached block, arbitrary for other entries."""
    new: Tensor
    """Slot [T, K] after the call: a permutation of all slots, with the entries that name no block last."""


def _lengths(given: Given) -> tuple[Tensor, Tensor]:
    """Return how many tokens each query sees, and how many tokens of its sequence are older than this step, [T, 1]
    each.

    The queries are the last tokens of their sequences, equally many in all; the kernel does not read their number.
    """
    sequence, number = _sequences(given)
    lengths, queries = given["full_kv_actual_seq"].long()[sequence], _queries(given)
    return (lengths - queries + 1 + number)[:, None], (lengths - queries)[:, None]


def _sequences(given: Given) -> tuple[Tensor, Tensor]:
    """Return the segment id of each query, and its position among the queries of its sequence, [T] each."""
    tables, queries = given["selection_kv_block_table"], _queries(given)
    query = torch.arange(tables.shape[0], device=tables.device)
    return query.div(queries, rounding_mode="floor"), query % queries


def _queries(given: Given) -> int:
    """Return the number of queries of each sequence."""
    return given["selection_kv_block_table"].shape[0] // given["full_kv_block_table"].shape[0]


def _slots(given: Given, ids: Tensor, status: Tensor) -> _Slots:
    """Allocate slots of the buffer for the blocks `ids` [T, K] that each query lists.

    `status` [T, K + 1] is the block that each slot had before the call, and in its last column the number of tokens in
    use.
    """
    seen, known = _lengths(given)
    size = given["selection_topk_block_size"]
    last = (seen + size - 1).div(size, rounding_mode="floor") - 1
    listed = (ids >= 0) & (ids <= last)
    number = listed.sum(-1, keepdim=True)
    complete, order = _complete_blocks(status, size).sort(-1)
    place = torch.searchsorted(complete, ids).clamp(max=ids.shape[1] - 1)
    cached = listed & (complete.gather(1, place) == ids) & ((ids + 1) * size <= known)
    old = order.gather(1, place)
    new = _destinations(listed, cached & (old < number), old)
    if size > 1:
        new = _largest_last(new, ids.masked_fill(~listed, -1), number)
    tokens = torch.where(ids == last, seen - last * size, size).masked_fill(~listed, 0)
    return _Slots(listed, tokens, cached, old, new)


def _complete_blocks(status: Tensor, size: int) -> Tensor:
    """Return the block in each slot [T, K], by `status` [T, K + 1]; -1 if not all `size` tokens of the slot are in use.

    For blocks of one token the slot is always taken to be in use: the kernel for long lists does not read the last
    column.
    """
    if size == 1:
        return status[:, :-1]
    slots = torch.arange(status.shape[1] - 1, device=status.device)
    return status[:, :-1].masked_fill(slots >= status[:, -1:].div(size, rounding_mode="floor"), -1)


def _destinations(listed: Tensor, stays: Tensor, old: Tensor) -> Tensor:
    """Return the slot of each entry [T, K] after the call, a permutation of all slots.

    Blocks that stay keep their `old` slot. The free slots, in ascending order, go first to the other listed blocks,
    then to entries that name none.

    Args:
        listed: True for an entry that names a block.
        stays: True for a block that stays in its slot.
        old: the slot before the call.
    """
    taken = torch.zeros_like(old).scatter_add(1, old, stays.long())
    free = taken.sort(dim=-1, stable=True).indices
    moves = listed & ~stays
    behind = moves.sum(-1, keepdim=True) + (~listed).cumsum(-1)
    rank = torch.where(listed, moves.cumsum(-1), behind) - 1
    return torch.where(stays, old, free.gather(1, rank.clamp(min=0)))


def _largest_last(slots: Tensor, ids: Tensor, number: Tensor) -> Tensor:
    """Exchange two of the `slots` [T, K], so that the block with the largest of `ids` is in the last slot in use.

    That block may be incomplete. `number` [T, 1] is the number of slots in use.
    """
    last = (number - 1).clamp(min=0)
    own = slots.gather(1, ids.argmax(-1, keepdim=True))
    return torch.where(slots == own, last, torch.where(slots == last, own, slots))


def _places(cache: Tensor, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the page, and the row in it, in `cache` [Block, Size, C] of the tokens `rows` [T, R], by `table` [T,
    P].
    """
    size = cache.shape[1]
    pages = table.long().gather(1, rows.div(size, rounding_mode="floor"))
    return pages.clamp(0, cache.shape[0] - 1), rows % size  # a sequence without tokens may have any table


def _copied(put: Put, given: Given, slots: _Slots, ids: Tensor, name: str) -> Tensor:
    """Write by `put` the rows of the listed blocks `ids` to the new slots of the buffer `selection_{name}`.

    Rows of blocks that are in the buffer come from their old slots, the others from the cache `full_{name}`. A buffer
    of rank 1, which has no rows, is returned as it is.
    """
    selection, full = given[f"selection_{name}"], given[f"full_{name}"]
    if selection.dim() == 1:
        return selection
    size, table = given["selection_topk_block_size"], given["full_kv_block_table"][_sequences(given)[0]]
    token = torch.arange(size, device=ids.device)
    new, old, listed = (
        (each[..., None] * size + token).flatten(1)
        for each in (slots.new, slots.old, ids.masked_fill(~slots.listed, 0))
    )
    own = given["selection_kv_block_table"]
    places = [each.flatten() for each in _places(selection, own, new)]
    cached, fresh = selection[_places(selection, own, old)], full[_places(full, table, listed)]
    rows = torch.where(slots.cached.repeat_interleave(size, -1)[..., None], cached, fresh)
    written = (token < slots.tokens[..., None]).flatten(1)[..., None]
    return put(selection, places, torch.where(written, rows, selection[_places(selection, own, new)]).flatten(0, 1))


def _computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    """Compute the number of tokens in use of each query [T], and write the four buffers by `put`."""
    status = given["selection_kv_block_status"]
    ids, before = (
        given[name].flatten(0, -2).long() for name in ("selection_topk_indices", "selection_kv_block_status")
    )
    slots = _slots(given, ids, before)
    tokens = slots.tokens.sum(-1)
    blocks = torch.empty_like(ids).scatter(1, slots.new, ids.masked_fill(~slots.listed, -1))
    after = torch.where(_lengths(given)[0] > 0, torch.cat((blocks, tokens[:, None]), dim=-1), before)
    rope, kv = (_copied(put, given, slots, ids, name) for name in ("k_rope", "kv_cache"))
    table = given["selection_kv_block_table"]
    status = put(status, None, after.to(status.dtype).reshape(status.shape))
    return tokens.to(given["selection_topk_indices"].dtype), rope, kv, table, status


def _skipped_bytes(given: Given) -> float:
    """Estimate how many bytes of the full caches no list names."""
    named = count(given["selection_topk_indices"]) * given["selection_topk_block_size"]
    return sum(unlisted(given[name], named) for name in ("full_k_rope", "full_kv_cache") if given[name].dim() > 1)


_UB = 196608
"""Size of the unified buffer of a vector core, in bytes."""
_HOST = (
    Limit("T % B == 0", because="every sequence has as many queries"),
    Limit("T == B * S", when="rank(selection_topk_indices) == 4"),
    Limit("Status == K + 1", because="the last column of the status is a length"),
    "selection_topk_block_size >= 1",
    Limit("Size % selection_topk_block_size == 0 and FullSize % selection_topk_block_size == 0"),
    Limit("Pages * Size >= K * selection_topk_block_size", because="the pages of a query hold what it lists"),
    Limit("Blocks >= T * Pages", because="every query has pages of its own"),
    *(f"dtype({name}) == dtype(full_kv_cache)" for name in ("selection_kv_cache", "selection_k_rope", "full_k_rope")),
)
_KERNEL = (
    "K <= 2048",
    Limit("K <= 32 or selection_topk_block_size == 1", because="longer lists are of tokens"),
    Limit("T // B <= 7", because="its tiling takes no more queries"),
    Limit("T == B", when="K <= 32", because="the kernel of short lists reads a length for each query"),
    Limit("FullSize == Size", because="its page has one size of blocks"),
    Limit("Dr <= 64", when="rank(full_k_rope) == 3"),
    "C <= 656",
    Limit("FullPages * FullSize <= 16777216", because="numbers of keys are compared in float32"),
    Limit("dtype(full_kv_cache) != 'int8'", when="rank(full_k_rope) == 3", because="rows in int8 hold the rotated key"),
    Limit("dtype(full_kv_cache) == 'int8'", when="rank(full_k_rope) == 1", because="other rows have a rotated key"),
    Limit(
        f"2 * selection_topk_block_size * (C + 64) * itemsize(full_kv_cache) + 8 * K + 4 * Pages + 256 <= {_UB}",
        because="two blocks, the list, the status and the table fit in the memory of a core",
    ),
)
_LISTS = "B S 1 {0} / T 1 {0} / B S 1 {0} / T 1 {0}"
_ROPE = "{0} {1} Dr / {0} {1} Dr / 0 / 0"
_DIMS = {
    "selection_kv_block_table": "T Pages",
    "full_kv_block_table": "B FullPages",
    "full_kv_actual_seq full_q_actual_seq": "B",
    "selection_topk_indices": _LISTS.format("K"),
    "selection_kv_block_status": _LISTS.format("Status"),
    "selection_kv_cache": "Blocks Size C",
    "full_kv_cache": "FullBlocks FullSize C",
    "selection_k_rope": _ROPE.format("Blocks", "Size"),
    "full_k_rope": _ROPE.format("FullBlocks", "FullSize"),
}
_CACHES = "selection_kv_cache full_kv_cache selection_k_rope full_k_rope"
_SUMMARY = (
    "selection[slot] = full[id] for every block of selection_topk_block_size tokens that a list names, unless status "
    "tells that it stands in the buffer: then it stays, or comes to a lower slot where fewer blocks are listed; the "
    "others take the free slots in the order of the list; status[slot] = id, -1 behind them, and in its last column "
    "the tokens in use, which are the result; a block that a new token is in is read again; negative entries, and what "
    "a query does not see, name nothing; lists name no block twice; full_q_actual_seq is T / B everywhere; {what}"
)

GATHER_SELECTION_KV_CACHE = Operator(
    schema=(
        "custom::npu_gather_selection_kv_cache.in_place(Tensor(a!) selection_k_rope, Tensor(b!) selection_kv_cache, "
        "Tensor(c!) selection_kv_block_table, Tensor(d!) selection_kv_block_status, Tensor selection_topk_indices, "
        "Tensor full_k_rope, Tensor full_kv_cache, Tensor full_kv_block_table, Tensor full_kv_actual_seq, "
        "Tensor full_q_actual_seq, *, int selection_topk_block_size=64) -> Tensor"
    ),
    compute=_computed,
    without_effect=frozenset({"full_q_actual_seq"}),
    outputs=lambda selection_kv_block_table, selection_topk_indices: selection_topk_indices.new_empty(
        [selection_kv_block_table.shape[0]]
    ),
    dims=_DIMS,
    dtypes=dict.fromkeys(_DIMS, INT32) | {_CACHES: HALVES | INT8},
    limits={"host": _HOST, "ascend910_93": _KERNEL},
    moves=True,
    lowerings=frozenset({"eager", "npugraph_ex"}),
    skipped_bytes=_skipped_bytes,
    source=(
        "cann-recipes-infer ops/ascendc: page (A3 alone, though the kernel is built for A2), golden, tiling and both "
        "kernels of gather_selection_kv_cache: where golden and kernel of long lists do not agree, as the kernel; the "
        "order of the slots is what the status tells, no more; its converter for GE writes into copies of the buffers"
    ),
    summary=_SUMMARY.format(what="an overload of ours, because a package of its own defines the operator"),
    runs_default=True,
)
GATHER_SELECTION_KV_CACHE_FUNCTIONAL = functional(
    GATHER_SELECTION_KV_CACHE,
    "custom::npu_gather_selection_kv_cache.functional",
    _SUMMARY.format(what="copies of the buffers are the last four results; an overload of ours"),
)
