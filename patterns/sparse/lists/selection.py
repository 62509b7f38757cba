"""Rows of listed keys in a buffer on the device, of a cache that may lie on the host: hits stay where they are.

    found, slot = where status == id        new = slot where found, else the next slot that holds none of the list
    buffer[table[new // Size], new % Size] = cache[full_table[id // Size], id % Size] unless found
    status[new] = id, status[-1] = K

*Matches* a step that compares a list of keys with what the slots of its buffer hold, and copies what is new to it, of
a latent and its rotated lanes or of packed rows in int8. *Replaces with* `npu_gather_selection_kv_cache`, which is of a
package of its own: the rule is opt-in. What reads the buffer may go by the status alone: a kernel may choose other
slots. No status names a key twice, and no two lists have a page of the buffer in common, for the model as well; the
last number of a status that names keys is how many (lists of up to 32 keys ask for it).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, tensor, variants


@dataclass(frozen=True)
class Selection(Group):
    """A list of keys, what the slots of its buffer hold, and the tables of both caches."""

    ids: Any = tensor("*L K")
    status: Any = tensor("*L H")
    table: Any = tensor("*L P")
    full_table: Any = tensor("*L F")

    def kept(self, p, cache, full, packed):
        """The write into one buffer."""
        return p.kept_rows(cache=cache, full=full, packed=packed, **vars(self))

    def told(self, p):
        """What the slots hold afterwards."""
        return p.kept_status(ids=self.ids, status=self.status)


@dataclass(frozen=True)
class Latent(Group):
    """Buffers and caches of a latent and of its rotated lanes, which are the fewer ones, in any order."""

    first: Any = tensor("*A")
    full_first: Any = tensor("*B")
    second: Any = tensor("*C")
    full_second: Any = tensor("*D")
    packed: Any = attribute(False)

    def terms(self, p, selection):
        """Both writes."""
        both = ((self.first, self.full_first), (self.second, self.full_second))
        return tuple(selection.kept(p, *each, self.packed) for each in both)

    @property
    def is_rope_first(self) -> bool:
        """Whether the first rows have fewer lanes than the second ones."""
        return prod(self.first.shape[2:]) < prod(self.second.shape[2:])

    def caches(self) -> tuple[Tensor, ...]:
        """Both buffers, then both caches, rotated lanes before latents."""
        both = ((self.first, self.second), (self.full_first, self.full_second))
        return tuple(_in_rows(x) for each in both for x in (each if self.is_rope_first else each[::-1]))

    def restored(self, rope: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        """The results as the model has them."""
        first, second = (rope, kv) if self.is_rope_first else (kv, rope)
        return first.reshape(self.first.shape), second.reshape(self.second.shape)


@dataclass(frozen=True)
class Packed(Group):
    """A buffer and a cache of rows in int8 that hold the rotated lanes too."""

    rows: Any = tensor("*A")
    full: Any = tensor("*B")
    packed: Any = attribute(True)

    def terms(self, p, selection):
        """The only write."""
        return (selection.kept(p, self.rows, self.full, self.packed),)

    def caches(self) -> tuple[Tensor, ...]:
        """The same, without rotated lanes."""
        return tuple(x for each in (self.rows, self.full) for x in (_no_rows(each), _in_rows(each)))

    def restored(self, rope: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        """The result as the model has it."""
        return (kv.reshape(self.rows.shape),)


@dataclass(frozen=True)
class GatherSelectionKvCache(Rule):
    """Rows of listed keys that a buffer does not hold yet, copied from the cache of all keys into its free slots."""

    aliases = ("gather_selection",)

    opt_in = True

    def reference(self, ids: Tensor, held: Tensor, buffer: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The meaning of one list without pages: ids [K], held [K], buffer [K, C], cache [T, C] → buffer, held."""
        free = iter([slot for slot, each in enumerate(held.tolist()) if each not in ids.tolist()])
        slots = [held.tolist().index(each) if each in held else next(free) for each in ids.tolist()]
        rows = [buffer[slot] if held[slot] == each else cache[each] for slot, each in zip(slots, ids, strict=True)]
        return buffer.index_put((torch.tensor(slots),), torch.stack(rows)), held.scatter(0, torch.tensor(slots), ids)

    @pattern
    @variants(rows=(Latent, Packed))
    def kept(self, p, rows, selection: Any = Selection):
        """Both caches, or one."""
        return (*rows.terms(p, selection), selection.told(p))

    @lookalike("{reason}")
    def unkept(self, p, reason=attribute()):
        """What lacks a part of that, as it was read."""
        return p.unkept_rows(reason=reason)

    @lowering
    def run(self, rows: Any, selection: Selection):
        """One call for all buffers; every number of a row is seen, and none of them is new."""
        ids, status, table, full_table = (each.flatten(0, -2) for each in vars(selection).values())
        caches = rows.caches()
        require(all(each.is_contiguous() for each in (*caches, status)), "rows of a buffer have gaps or another order")
        one = torch.ones(ids.shape[0], dtype=torch.int32, device=ids.device)
        seen = torch.full_like(one, full_table.shape[1] * caches[3].shape[1] + 1)
        result = torch.ops.custom.npu_gather_selection_kv_cache.functional(
            *caches[:2], table.int().clone(), status.unsqueeze(1), ids.int().unsqueeze(1), *caches[2:],
            full_table.int(), seen, one, selection_topk_block_size=1,
        )  # fmt: skip
        return *rows.restored(*result[1:3]), result[4].reshape(selection.status.shape)


def _in_rows(pages: Tensor) -> Tensor:
    """Pages [Blocks, Size, ..] as the operator has them, [Blocks, Size, C]."""
    return pages.reshape(*pages.shape[:2], prod(pages.shape[2:]))


def _no_rows(pages: Tensor) -> Tensor:
    """No rows at all."""
    return torch.empty(0, dtype=pages.dtype, device=pages.device)
