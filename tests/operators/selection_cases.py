"""Small calls of the operator that keeps listed rows in a buffer, both sides of its limits, what it means in loops."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from fusion.operators import HOST
from tests.operators.sparse_cases import Make, random

NAMES = tuple(f"custom::npu_gather_selection_kv_cache.{form}" for form in ("in_place", "functional"))


def gathering(
    lengths: tuple[int, ...], queries: int = 1, k: int = 4, block: int = 1, size: int = 4, full_size: int = 0,
    pages: int = 0, full_pages: int = 6, c: int = 24, dr: int = 16, packed: bool = False, int8: bool = False,
    lists: Any = None, held: Any = None, spare: int = 1, made: Any = random, index: torch.dtype = torch.int32,
) -> Make:  # fmt: skip
    """`lists` and `held` are what queries list and what the status tells; drawn where they are None, some are the same.

    What the buffer holds is not what the cache holds: it shows which of them is copied.
    """

    def make(dtype: torch.dtype) -> dict[str, Any]:
        rows, batch, per = len(lengths) * queries, len(lengths), pages or -(-k * block // size)
        wide, stored = full_size or size, torch.int8 if int8 else dtype
        blocks, most = full_pages * wide // block, (max(lengths) + block - 1) // block
        draw, listed, status = Random(7), [], []
        for row in range(rows):
            ids, old = (draw.sample(range(max(min(blocks, most + 2), k)), k) for _ in range(2))
            count = draw.randint(1, k)
            listed.append(ids[:count] + [-1] * (k - count) if lists is None else list(lists[row]))
            count = draw.randint(0, k)
            told, tokens = (old[:count], count * block - count % 2) if held is None else held[row]
            status.append([*told, *(-1 for _ in range(k - len(told))), tokens])

        def drawn(*shape: int) -> Tensor:
            return torch.randint(-99, 99, shape, dtype=torch.int8) if int8 else made(*shape, dtype=dtype)

        shape = (rows, 1) if packed else (batch, queries, 1)
        count, full = rows * per + spare, batch * full_pages + 2
        call = {
            "selection_k_rope": torch.empty(0, dtype=stored) if int8 else drawn(count, size, dr),
            "selection_kv_cache": drawn(count, size, c),
            "selection_kv_block_table": torch.randperm(count)[: rows * per].reshape(rows, per).to(index),
            "selection_kv_block_status": torch.tensor(status).reshape(*shape, k + 1).to(index),
            "selection_topk_indices": torch.tensor(listed).reshape(*shape, k).to(index),
            "full_k_rope": torch.empty(0, dtype=stored) if int8 else drawn(full, wide, dr),
            "full_kv_cache": drawn(full, wide, c),
            "full_kv_block_table": torch.randperm(full)[: batch * full_pages].reshape(batch, full_pages).to(index),
            "full_kv_actual_seq": torch.tensor(lengths).to(index),
            "full_q_actual_seq": torch.full((batch,), queries).to(index),
            "selection_topk_block_size": block,
        }
        device = call["full_kv_cache"].device
        return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in call.items()}

    return make


EMPTY = ([], -1)
"""A status that tells of nothing."""
CASES: tuple[tuple[str, Make], ...] = (
    ("one query", gathering((11, 6, 20))),
    ("two queries", gathering((9, 22, 14), queries=2)),
    ("packed", gathering((9, 22), queries=3, packed=True)),
    ("nothing held", gathering((11,), lists=((3, 0, 9, 7),), held=(EMPTY,))),
    ("all held", gathering((11,), lists=((3, 0, 9, 7),), held=(([7, 9, 3, 0], 4),))),
    ("some held", gathering((20,), lists=((3, 0, 9, 7),), held=(([5, 9, 2, 3], 4),))),
    ("fewer than are held", gathering((20,), lists=((3, 9, -1, -1),), held=(([5, 8, 2, 3], 4),))),
    ("told behind the length", gathering((20,), lists=((3, 9, 5, -1),), held=(([5, 8, 2, 3], 2),))),
    ("the newest keys", gathering((10,), queries=2, lists=((9, 8, 7, 2), (9, 8, 7, 6)), held=(([9, 8, 7, 2], 4),) * 2)),
    ("behind what is seen", gathering((5,), lists=((7, 1, 5, 4),), held=(([7, 1], 2),))),
    ("no list", gathering((5, 9), lists=((-1,) * 4, (2, -1, -1, -1)), held=(([3, 1], 2),) * 2)),
    ("a sequence without tokens", gathering((0, 9), lists=((0, 1, -1, -1), (2, 8, -1, -1)), held=(([3, 1], 2),) * 2)),
    ("fewer tokens than queries", gathering((1,), queries=2, lists=((0, -1, -1, -1),) * 2, held=(([2], 1),) * 2)),
    ("blocks", gathering((23, 9), k=5, block=2, size=4)),
    ("blocks of a page", gathering((30, 17), k=3, block=4, size=4, full_pages=8)),
    ("a part of a block", gathering((23,), k=4, block=4, size=4, lists=((5, 1, 3, 0),), held=(([3, 2, 5], 11),))),
    ("a part that is not the last listed", gathering((23,), k=4, block=4, lists=((5, 1, 3, -1),), held=(([3], 4),))),
    ("longer pages of the cache", gathering((23, 40), k=5, block=2, size=4, full_size=8)),
    ("int8", gathering((11, 6, 20), int8=True)),
    ("int8, packed", gathering((11, 6), queries=2, int8=True, packed=True)),
    ("int64", gathering((11, 6, 20), index=torch.int64)),
)


def reference(
    selection_k_rope: Tensor, selection_kv_cache: Tensor, selection_kv_block_table: Tensor,
    selection_kv_block_status: Tensor, selection_topk_indices: Tensor, full_k_rope: Tensor, full_kv_cache: Tensor,
    full_kv_block_table: Tensor, full_kv_actual_seq: Tensor, full_q_actual_seq: Tensor, selection_topk_block_size: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Token by token: the number of tokens, then all four buffers."""
    block, rows, k = selection_topk_block_size, len(selection_kv_block_table), selection_topk_indices.shape[-1]
    caches = [[each.clone(), full] for each, full in (
        (selection_k_rope, full_k_rope), (selection_kv_cache, full_kv_cache)) if each.dim() == 3]  # fmt: skip
    status = selection_kv_block_status.clone()
    lines, lists = status.view(rows, k + 1), selection_topk_indices.reshape(rows, k).tolist()
    numbers, queries = torch.zeros(rows, dtype=selection_topk_indices.dtype), rows // len(full_kv_actual_seq)
    for row in range(rows):
        b, length = row // queries, int(full_kv_actual_seq[row // queries])
        seen = length - (queries - 1 - row % queries)
        if seen <= 0:
            continue
        ids = [each for each in lists[row] if 0 <= each * block < seen]
        before = lines[row].tolist()
        held = {each: slot for slot, each in enumerate(before[:k]) if block == 1 or (slot + 1) * block <= before[k]}
        hits = {each: held[each] for each in ids if each in held and (each + 1) * block <= length - queries}
        slots: dict[int, int] = {each: slot for each, slot in hits.items() if slot < len(ids)}
        for each in ids:
            if each not in slots:
                slots[each] = min(set(range(k)) - set(slots.values()))
        if block > 1 and ids:
            largest = max(ids)
            other = next(each for each, slot in slots.items() if slot == len(ids) - 1)
            slots[largest], slots[other] = slots[other], slots[largest]
        for cache, full in caches:
            old = cache.clone()
            for each in ids:
                for t in range(min(block, seen - each * block)):
                    there = page(selection_kv_block_table[row], slots[each] * block + t, cache)
                    if each in hits:
                        cache[there] = old[page(selection_kv_block_table[row], hits[each] * block + t, cache)]
                    else:
                        cache[there] = full[page(full_kv_block_table[b], each * block + t, full)]
        lines[row] = -1
        for each, slot in slots.items():
            lines[row, slot] = each
        lines[row, k] = numbers[row] = sum(min(block, seen - each * block) for each in ids)
    done = {cache.shape[-1]: cache for cache, _ in caches}
    rope = done[selection_k_rope.shape[-1]] if selection_k_rope.dim() == 3 else selection_k_rope
    return numbers, rope, done[selection_kv_cache.shape[-1]], selection_kv_block_table, status


def page(table: Tensor, token: int, cache: Tensor) -> tuple[int, int]:
    """Where a token of a sequence stands."""
    return int(table[token // cache.shape[1]]), token % cache.shape[1]


REFERENCES = dict.fromkeys(NAMES, reference)

# both sides of its limits ------------------------------------------------------------------------------------------

A3 = "ascend910_93"


def sized(batch: int = 2, k: int = 64, size: int = 64, **more: Any) -> dict[str, Any]:
    """A call of the sizes that a chip takes."""
    nothing = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    how: dict[str, Any] = {"c": 512, "dr": 64, "made": nothing, "full_pages": 3, "spare": 0} | more
    dtype = how.pop("dtype", torch.bfloat16)
    return gathering((3 * size,) * batch, k=k, size=size, **how)(dtype)


def cut(call: dict[str, Any], **rows: int) -> dict[str, Any]:
    """The same call with only so many first rows of an argument."""
    return call | {name: call[name][:count] for name, count in rows.items()}


def edges() -> list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]]:
    """Operator, targets, a legal call, the same beyond one limit, what the refusal says."""
    both, fine, of_blocks = (HOST, A3), sized(), sized(k=32, block=2)
    status, three = fine["selection_kv_block_status"], sized(3)
    wrong = {name: fine[name].half() for name in ("selection_kv_cache", "selection_k_rope", "full_k_rope")}
    rowless = {name: torch.empty(0, dtype=torch.bfloat16) for name in ("selection_k_rope", "full_k_rope")}
    quantised = sized(int8=True, c=656)
    ropes = {name: torch.empty(*fine[name].shape, dtype=torch.int8) for name in wrong}
    ropes["full_kv_cache"] = torch.empty(*fine["full_kv_cache"].shape, dtype=torch.int8)
    batch = {"full_kv_block_table": 2, "full_kv_actual_seq": 2, "full_q_actual_seq": 2}
    packed = sized(4, packed=True)
    return [
        (name, *each)
        for name in NAMES
        for each in (
            (both, cut(packed, **batch), cut(sized(3, packed=True), **batch), "T % B == 0"),
            (both, fine, fine | {"selection_kv_block_table": sized(4)["selection_kv_block_table"]}, "T == B * S"),
            (both, fine, fine | {"selection_kv_block_status": status[..., 1:]}, "Status == K + 1"),
            (both, fine, fine | {"selection_topk_block_size": 0}, "selection_topk_block_size >= 1"),
            (both, of_blocks, sized(k=32, size=63, block=2, pages=2), "Size % selection_topk_block_size == 0"),
            (both, of_blocks, sized(k=32, full_size=63, block=2), "FullSize % selection_topk_block_size == 0"),
            (both, fine, sized(k=65, pages=1), "Pages * Size >= K * selection_topk_block_size"),
            (both, fine, cut(fine, selection_kv_cache=1, selection_k_rope=1), "Blocks >= T * Pages"),
            *(
                (both, fine, fine | {each: wrong[each]}, f"dtype({each}) == dtype(full_kv_cache)")
                for each in wrong
            ),
            ((A3,), sized(1, k=2048), sized(1, k=2049), "K <= 2048"),
            ((A3,), of_blocks, sized(k=33, block=2), "K <= 32 or selection_topk_block_size == 1"),
            ((A3,), sized(queries=7), sized(queries=8), "T // B <= 7"),
            ((A3,), sized(k=33, queries=2), sized(k=32, queries=2), "T == B"),
            ((A3,), fine, sized(full_size=128), "FullSize == Size"),
            ((A3,), fine, sized(dr=72), "Dr <= 64"),
            ((A3,), quantised, sized(int8=True, c=672), "C <= 656"),
            ((A3,), sized(1, full_pages=1 << 18), sized(1, full_pages=1 | 1 << 18), "FullPages * FullSize <= 16777216"),
            ((A3,), fine, fine | ropes, "dtype(full_kv_cache) != 'int8'"),
            ((A3,), quantised, fine | rowless, "dtype(full_kv_cache) == 'int8'"),
            ((A3,), sized(k=3, block=64), sized(k=3, block=128, size=128), "<= 196608"),
            ((A3,), fine, sized(index=torch.int64), "requires selection_kv_block_table in int32"),
            ((A3,), fine, sized(dtype=torch.float32), "requires selection_kv_cache in bfloat16"),
            (both, fine, three | {"selection_topk_indices": three["selection_topk_indices"].mT}, "as [B S 1 K]"),
        )
    ]  # fmt: skip


EDGES = edges()
