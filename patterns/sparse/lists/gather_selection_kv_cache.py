"""Rows of listed keys in a buffer on the device, of a cache that may be on the host: hits stay where they are.

    hit, slot = where status == id          new = slot where hit, else the next slot that has no key of the list
    buffer[table[new // Size], new % Size] = cache[full_table[id // Size], id % Size] unless hit
    status[new] = id, status[-1] = K

*Matches* a step that compares a list of keys with the keys in the slots of its buffer, and copies the rows that are new
to the buffer, of a latent and its rotated lanes or of packed rows in int8. *Replaces with*
`npu_gather_selection_kv_cache`, which is of a package of its own: the rule is opt-in. The kernel may choose other
slots, so readers of the buffer must go by the status alone. No status names a key twice, and no two lists share a page
of the buffer, in the model as well; the last number of a status that names keys is their number (lists of up to 32 keys
ask for it).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, tensor, variants


@dataclass(frozen=True)
class Selection(Group):
    """A list of keys `ids` [L, K], the status of its buffer, and the block tables of the buffer and of the full
    cache.
    """

    ids: Any = tensor("*L K")
    status: Any = tensor("*L H")
    table: Any = tensor("*L P")
    full_table: Any = tensor("*L F")

    def updated(self, p, cache, full, packed):
        """Return the term of the buffer `cache` after a step, which copies from `full` the rows that `cache` does not
        have yet.

        `packed` is True if rows are packed in int8, with the rotated lanes.
        """
        return p.kept_rows(cache=cache, full=full, packed=packed, **vars(self))

    def updated_status(self, p):
        """Return the term of the status after the step."""
        return p.kept_status(ids=self.ids, status=self.status)


@dataclass(frozen=True)
class Latent(Group):
    """Two buffers and the caches of all keys for each, of a latent and of its rotated lanes, in any order.

    The rotated lanes are the fewer ones.
    """

    first: Any = tensor("*A")
    full_first: Any = tensor("*B")
    second: Any = tensor("*C")
    full_second: Any = tensor("*D")
    packed: Any = attribute(False)

    def terms(self, p, selection):
        """Return the terms of `self.first` and `self.second` after the step of `selection`."""
        pairs = ((self.first, self.full_first), (self.second, self.full_second))
        return tuple(selection.updated(p, *each, self.packed) for each in pairs)

    @property
    def is_rope_first(self) -> bool:
        """Return True if `self.first` holds the rotated lanes: it has fewer lanes than `self.second`."""
        return prod(self.first.shape[2:]) < prod(self.second.shape[2:])

    def caches(self) -> tuple[Tensor, ...]:
        """Return both buffers, then both caches, as [Block, Size, C], rotated lanes before the latent."""
        both = ((self.first, self.second), (self.full_first, self.full_second))
        return tuple(_in_rows(x) for each in both for x in (each if self.is_rope_first else each[::-1]))

    def restored(self, rope: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        """Return the results `rope` and `kv` of the operator as `self.first` and `self.second`, in order and shape."""
        first, second = (rope, kv) if self.is_rope_first else (kv, rope)
        return first.reshape(self.first.shape), second.reshape(self.second.shape)


@dataclass(frozen=True)
class Packed(Group):
    """A buffer and a cache of packed rows in int8, which contain the rotated lanes."""

    rows: Any = tensor("*A")
    full: Any = tensor("*B")
    packed: Any = attribute(True)

    def terms(self, p, selection):
        """Return the term of `self.rows` after the step of `selection`, as a tuple of one."""
        return (selection.updated(p, self.rows, self.full, self.packed),)

    def caches(self) -> tuple[Tensor, ...]:
        """Return what `Latent.caches` does: an empty tensor and the buffer, then an empty tensor and the cache [Block,
        Size, C].

        The empty tensors stand for buffer and cache of rotated lanes, which packed rows contain.
        """
        return tuple(x for each in (self.rows, self.full) for x in (_no_rows(each), _in_rows(each)))

    def restored(self, rope: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        """Return `kv`, the buffer as the operator gives it, in the shape of `self.rows`; `rope` is an empty tensor."""
        return (kv.reshape(self.rows.shape),)


@dataclass(frozen=True)
class GatherSelectionKvCache(Rule):
    """Rows of listed keys, copied from the cache of all keys into free slots of a buffer, unless they are in it."""

    aliases = ("gather_selection",)

    opt_in = True

    def reference(self, ids: Tensor, status: Tensor, buffer: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Compute buffer [K, C] and status [K] after a step of one list `ids` [K] without pages, of `cache` [T, C]."""
        free = iter([slot for slot, each in enumerate(status.tolist()) if each not in ids.tolist()])
        slots = [status.tolist().index(each) if each in status else next(free) for each in ids.tolist()]
        rows = [buffer[slot] if status[slot] == each else cache[each] for slot, each in zip(slots, ids, strict=True)]
        return buffer.index_put((torch.tensor(slots),), torch.stack(rows)), status.scatter(0, torch.tensor(slots), ids)

    @pattern
    @variants(rows=(Latent, Packed))
    def updated(self, p, rows, selection: Any = Selection):
        """rows[new] = rows[slot] where hit, else full[id]; status[new] = id, status[-1] = K

        `hit`, `slot` and `new` are as at the head of this module; there are two buffers `rows`, or one of packed rows.
        """
        return (*rows.terms(p, selection), selection.updated_status(p))

    @lowering
    def run(self, rows: Any, selection: Selection):
        """Emit npu_gather_selection_kv_cache for all lists: the buffers and the status after the step.

        The operator is given lengths (T + 1 keys, 1 of them new) by which it reads all T rows of the full cache, and
        takes no key for one of the current step.
        """
        ids, status, table, full_table = (each.flatten(0, -2) for each in vars(selection).values())
        caches = rows.caches()
        require(
            all(each.is_contiguous() for each in (*caches, status)),
            "buffers: a cache, or the status, is not contiguous; npu_gather_selection_kv_cache requires "
            "contiguous ones; allocate them contiguous",
        )
        one = torch.ones(ids.shape[0], dtype=torch.int32, device=ids.device)
        seen = torch.full_like(one, full_table.shape[1] * caches[3].shape[1] + 1)
        result = torch.ops.custom.npu_gather_selection_kv_cache.functional(
            *caches[:2], table.int().clone(), status.unsqueeze(1), ids.int().unsqueeze(1), *caches[2:],
            full_table.int(), seen, one, selection_topk_block_size=1,
        )  # fmt: skip
        return *rows.restored(*result[1:3]), result[4].reshape(selection.status.shape)


def _in_rows(pages: Tensor) -> Tensor:
    """Reshape `pages` [Block, Size, ..] to [Block, Size, C]."""
    return pages.reshape(*pages.shape[:2], prod(pages.shape[2:]))


def _no_rows(pages: Tensor) -> Tensor:
    return torch.empty(0, dtype=pages.dtype, device=pages.device)
