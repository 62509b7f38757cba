"""Steps that keep the rows of listed keys in a buffer with a table and a status, and what is none of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import in_dtype, normal

Tables = tuple[Tensor, Tensor]
"""Of the buffer and of the cache, a row for each list."""


@dataclass(frozen=True)
class Setting:
    """Sizes; of the `listed` keys of each of `lists` some are held already."""

    lists: int = 3
    keys: int = 30
    listed: int = 10
    size: int = 4
    c: int = 16
    dr: int = 8
    held: int = 6
    index: torch.dtype = torch.int32
    int8: bool = False
    heads: tuple[int, ...] = ()
    turned: bool = False

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Fresh inputs: scores, what the slots hold, both tables, buffers and caches of rotated lanes and latents."""
        drawn = torch.Generator().manual_seed(5)
        own, whole = (-(-count // self.size) for count in (self.listed, self.keys))
        blocks = self.lists * own, self.lists * whole
        tables = [torch.randperm(count, generator=drawn).view(self.lists, -1).to(self.index) for count in blocks]
        status = torch.full((self.lists, self.listed + 1), -1, dtype=self.index)
        for row in status:
            row[: self.held] = torch.randperm(self.keys, generator=drawn)[: self.held]
            row[-1] = self.held
        rows = [
            normal(10 * number + width, count, self.size, *self.heads, width)
            for number, count in enumerate(blocks)
            for width in (self.dr, self.c)
        ]
        stored = [(each * 30).to(torch.int8) for each in rows] if self.int8 else rows
        stored = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in stored] if self.turned else stored
        return tuple(in_dtype(each, dtype) for each in (normal(1, self.lists, self.keys), status, *tables, *stored))


SETTING = Setting()


def entries_first(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether and where each entry stands in a slot, and which slots hold one."""
    same = ids.unsqueeze(-1) == held.unsqueeze(1)
    return same.any(-1), same.int().argmax(-1), same.any(1)


def slots_first(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, compared the other way."""
    same = held[:, :, None] == ids[:, None]
    return same.any(1), same.long().argmax(1), same.any(2)


def sorted_slots(used: Tensor) -> Tensor:
    """Free slots first, in their order."""
    return used.int().argsort(dim=-1, stable=True)


def next_free(found: Tensor, free: Tensor) -> Tensor:
    """The next free slot for each entry that is not found."""
    return free.gather(1, ((~found).cumsum(-1) - 1).clamp(min=0))


def by_table(table: Tensor, numbers: Tensor, size: int) -> Tables:
    """Pages and places of rows."""
    return table.gather(1, numbers // size), numbers % size


def by_row(table: Tensor, numbers: Tensor, size: int) -> Tables:
    """The same, by the number of the list."""
    return table[torch.arange(len(table))[:, None], numbers // size], numbers % size


def kept(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    """What is there stays."""
    buffer[at] = torch.where(found.reshape(*found.shape, *(1,) * (rows.dim() - 2)), buffer[at], rows)


def copied(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    """Every row is copied again."""
    buffer[at] = rows


def told(status: Tensor, new: Tensor, ids: Tensor) -> None:
    """The list by its slots, and its length."""
    listed = ids.shape[1]
    status[:, :listed] = status[:, :listed].scatter(1, new, ids.to(status.dtype))
    status[:, listed] = listed


def told_at_once(status: Tensor, new: Tensor, ids: Tensor) -> None:
    """The same in one copy."""
    held = status[:, :-1].scatter(1, new, ids.to(status.dtype))
    status.copy_(torch.cat((held, torch.full_like(status[:, -1:], ids.shape[1])), dim=1))


@dataclass(frozen=True)
class Model:
    """A step of each list; its parts in other ways are look-alikes."""

    compared: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = entries_first
    slots: Callable[[Tensor], Tensor] = sorted_slots
    placed: Callable[[Tensor, Tensor], Tensor] = next_free
    page: Callable[[Tensor, Tensor, int], Tables] = by_table
    write: Callable[[Tensor, Tables, Tensor, Tensor], None] = kept
    tell: Callable[[Tensor, Tensor, Tensor], None] = told
    listed: Callable[[Tensor, int], Tensor] = lambda scores, count: scores.topk(count, dim=-1).indices
    read: Callable[[Tensor, Tensor], Any] = lambda rows, new: rows.sum(1)
    rope: bool = True
    rope_first: bool = False

    def __call__(
        self, scores: Tensor, status: Tensor, table: Tensor, full_table: Tensor, rope: Tensor, kv: Tensor,
        full_rope: Tensor, full_kv: Tensor,
    ) -> Any:  # fmt: skip
        """Sums of the latents of each list, whatever slots they have."""
        ids = self.listed(scores, status.shape[1] - 1)
        found, slot, used = self.compared(ids, status[:, :-1])
        new = torch.where(found, slot, self.placed(found, self.slots(used)))
        at, source = (self.page(*each) for each in ((table, new, kv.shape[1]), (full_table, ids, full_kv.shape[1])))
        pairs = [(kv, full_kv), (rope, full_rope)][: 1 + self.rope]
        for buffer, cache in pairs[:: -1 if self.rope_first else 1]:
            self.write(buffer, at, found, cache[source])
        self.tell(status, new, ids)
        return self.read(kv[table].flatten(1, 2)[:, : ids.shape[1]], new)


def example(name: str, refusal: str = "", setting: Setting = SETTING, **parts: Any) -> Example:
    """A model of other parts."""
    return Example(name, Model(**parts), setting, refusal)


def never_full(status: Tensor, new: Tensor, ids: Tensor) -> None:
    """The list by its slots, and no length."""
    status[:, :-1] = status[:, :-1].scatter(1, new, ids.to(status.dtype))


def in_order(found: Tensor, free: Tensor) -> Tensor:
    """The slot of the entry's own number."""
    return torch.arange(found.shape[1]).expand_as(free) + free * 0


EXAMPLES = (
    example("a latent and its rotated lanes"),
    example("rotated lanes first", rope_first=True),
    example("slots first", compared=slots_first),
    example("the tables by the number of the list", page=by_row),
    example("a status in one copy", tell=told_at_once),
    example("one head", setting=replace(SETTING, heads=(1,))),
    example("int64", setting=replace(SETTING, index=torch.int64)),
    example("nothing held", setting=replace(SETTING, held=0)),
    example("all held", setting=replace(SETTING, held=10)),
    example("packed rows", rope=False, setting=replace(SETTING, int8=True)),
    example("every row again", "no list of the step before is compared with", write=copied),
    example("no length", "it does not become the list in the order of", tell=never_full),
    example("slots in the order of the list", "missing from it are written to other slots", placed=in_order),
    example("slots that are read", "something else than the buffers", read=lambda rows, new: (rows.sum(1), new)),
    example("pages that lie otherwise", "is not contiguous", setting=replace(SETTING, turned=True)),
    example("floats without rotated lanes", "there is no buffer of rotated lanes", rope=False),
    example("an order that nothing proves", "may be no key, or one that the list names twice",
            listed=lambda scores, count: scores[:, :count].abs().long()),
)  # fmt: skip
TRIED = {"gather_selection_kv_cache": EXAMPLES}
