"""The facet of sparse attention that says where its list of keys comes from.

Listing         a list of keys behind a mask
GatheredRows    a list by which the model gathers the rows that it attends to
IndexedRows     the same of a list that an indexer makes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.sparse.indexer.indexer import Indexer, Seen
from patterns.sparse.lists.fixed_keys import FixedKeys

_EVERY = Seen(mask_kind="none", kv_len=None, kv_lens=None, row_lens=None, segment=None, segments=None)
"""Where a list says itself what is seen, every query may see all of the keys."""


@dataclass(frozen=True)
class Listing(Seen):
    """A list of keys, of which a mask shows those that can be seen at all.

    Attributes:
        places: numbers of keys, for each query.
        distinct: whether no row of them names a key twice.
        hidden: which keys are hidden besides, where there are no words for it.
        ends: whether an entry that it hides is followed by hidden ones alone.
        room: the entry that names the first key, and how many keys there are, where an entry may name none of them.
        fixed: keys that are seen whether they are listed or not.
    """

    places: Any = tensor("B S K")
    distinct: Any = attribute()
    room: Any = attribute()
    hidden: Any = tensor("B S T", optional=True)
    ends: Any = attribute()
    fixed: Any = FixedKeys

    def listed(self, p) -> Any:
        """The mask of keys that are listed in whatever way."""
        hidden = dict(hidden=self.hidden, ends=self.ends, room=self.room, **vars(self.fixed))
        return p.topk_mask(places=self.places, distinct=self.distinct, **hidden, **self.seen())

    def indexed(self, p, indexer: Indexer) -> Any:
        """The same of what an indexer finds behind the same mask."""
        places = p.lightning_indexer(places=self.places, **indexer.said(p), **self.seen())
        return p.topk_mask(places=places, distinct=self.distinct, **self.seen())

    def refuse(self, seen: Any, indexer: Indexer | None, averaged: bool) -> None:
        """Refuse a query that no key is left for, of which the operator gives 0, unless that is restored.

        `averaged` says whether the mean of all values can be had.
        """
        require(seen.levels is None, "a query for which no key is left would see those that are lowered least")
        listed = self.hides_nothing() or indexer is not None  # then what is listed is seen
        left = seen.fully_masked_row == "zero" or (self.every_row_nonempty and listed)
        restored = indexer is not None and self._is_nan(seen)
        restored |= self._tells_blind() and (self._is_nan(seen) or averaged)
        gives = "NaN" if seen.fully_masked_row == "nan" else "the mean of all values"
        why = "a query for which no key is left gives {gives}, the operator gives 0"
        require(left or restored, why, gives=gives)

    def _tells_blind(self) -> bool:
        """Whether the list that the operator is given is empty where a query sees no key."""
        return self.hidden is not None or self.room is not None or self.segment is not None

    def _is_nan(self, seen: Any) -> bool:
        """Whether a query that sees no key gives NaN; the list of an indexer, of which it is empty, says which do."""
        return seen.fully_masked_row == "nan" and not self.every_row_nonempty

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """A list says itself what its query sees, where each sees a number of keys of its own."""
        return Seen.lengths(self if self.row_lens is None else _EVERY, queries, keys, room)

    def is_distinct(self) -> bool:
        """Whether the list that the operator is given names no key twice: what is named again is left out of it."""
        return True

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Queries [B, S, N, C] and [B, S, N, Dr] for which the operator gives what the model does."""
        return queries

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """The result [B, S, N, C] over lists [B, S, 1, K] with what plain attention gives without a key."""
        if self._is_nan(seen):
            return y.masked_fill(listed[..., :1] < 0, torch.nan)
        blind = self._tells_blind() and not self.every_row_nonempty and seen.fully_masked_row == "mean"
        return torch.where(listed[..., :1] < 0, mean(), y) if blind else y

    def own(self, seen: Any) -> Tensor:
        """The list of the model as the operator takes it, [B, S, 1, K]: each key once, then -1.

        It leaves out what lies behind the mask itself.
        """
        shown = self._tells_blind() or not self._is_nan(seen)
        require(shown, "the model's own list does not say which queries see no key")
        places = self.places.to(torch.int32)
        if self.room is not None:
            first, keys = self.room
            places = places - first
            places = places.masked_fill((places < 0) | (places >= keys), -1)
        places = self.fixed.beside(places)
        if self.hidden is not None:
            there = places.to(torch.int64) if self.room is None else places.to(torch.int64).clamp(min=0)
            places = places.masked_fill(self.hidden.gather(-1, there), -1)
            ordered = self.ends and self.distinct
            places = places if ordered else places.sort(dim=-1, descending=True).values
        if self.segment is not None:
            there = torch.arange(places.shape[1], device=places.device)[:, None]
            places = (
                torch.where(places > there, -1, places - self.segment_starts()[:, None])
                .sort(dim=-1, descending=True)
                .values
            )
            places = places.clamp(min=-1)
        if self.row_lens is not None:
            places = places.masked_fill(places >= self.own_lengths(places.shape[1], None).unsqueeze(-1), -1)
            places = places.sort(dim=-1, descending=True).values
        if not self.distinct:
            ordered = places.sort(dim=-1).values
            again = ordered.diff(dim=-1, prepend=ordered[..., :1] - 1) == 0
            places = ordered.masked_fill(again, -1).sort(dim=-1, descending=True).values
        return places.unsqueeze(2)


@dataclass(frozen=True)
class GatheredRows(Group):
    """A list of rows that the model gathers, each of which counts as often as it is listed.

    Attributes:
        places: numbers of rows, negative ones of entries that are hidden.
        hidden: which entries are hidden besides.
        distinct: whether no row of them names a key twice.
        ends: whether behind a hidden entry there are hidden ones alone.
        fully_masked_row: what a query without keys gives.
    """

    places: Any = tensor("B S K")
    hidden: Any = tensor("B S K", optional=True)
    distinct: Any = attribute()
    ends: Any = attribute(True, False)
    fully_masked_row: Any = attribute()

    def gathered(self, p) -> dict[str, Any]:
        """As the reader says it."""
        return dict(vars(self))

    def refuse(self, seen: Any, indexer: Indexer | None, averaged: bool) -> None:
        """What a query without keys gives is restored."""

    def is_distinct(self) -> bool:
        """Whether the list that the operator is given names no key twice."""
        return self.distinct

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Every query may see all of the keys: the list says itself what is seen."""
        return _EVERY.lengths(queries, keys, room)

    def segment_ends(self) -> Tensor | None:
        """A list names rows of all tokens."""
        return None

    def own(self, seen: Any) -> Tensor:
        """The list as the operator takes it, [B, S, 1, K]: it ends at the first negative entry."""
        places = self.places.to(torch.int32)
        if self.hidden is not None:
            hidden = self.hidden & ~self._blind() if self.fully_masked_row == "mean" else self.hidden
            places = places.masked_fill(hidden, -1)
        return (places if self.ends else places.sort(dim=-1, descending=True).values).unsqueeze(2)

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Queries that are 0 where all of their list is hidden, and seen so: they give the mean of what it names."""
        if self.fully_masked_row != "mean":
            return queries
        return [each.masked_fill(self._blind().unsqueeze(-1), 0) for each in queries]

    def _blind(self) -> Tensor:
        """Which queries see nothing, [B, S, 1]."""
        assert self.hidden is not None
        return self.hidden.all(-1, keepdim=True)

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """The result [B, S, N, C] with NaN where all of a list is hidden, if that is what the model gives."""
        return _without_keys(y, listed, self.fully_masked_row)


def _without_keys(y: Tensor, listed: Tensor, given: str) -> Tensor:
    """A result [B, S, N, C] with what the model gives, where that is NaN, of queries whose list is empty."""
    return y.masked_fill(listed[..., :1] < 0, torch.nan) if given == "nan" else y


@dataclass(frozen=True)
class IndexedRows(Seen):
    """The list of an indexer, by which the model gathers the rows of keys that a query sees.

    Attributes:
        fully_masked_row: what a query without keys gives.
        dtype, entries: of the list, and how many each query has.
        distinct: whether no row of it names a key twice.
    """

    fully_masked_row: Any = attribute()
    distinct: Any = attribute()
    dtype: Any = attribute()
    entries: Any = attribute()

    def gathered(self, p, indexer: Indexer) -> dict[str, Any]:
        """As the reader says it."""
        places = p.indexer_list(dtype=self.dtype, entries=self.entries, **indexer.said(p), **self.seen())
        rows = dict(fully_masked_row=self.fully_masked_row, distinct=self.distinct)
        return dict(places=places, ends="indexer", **rows)

    def is_distinct(self) -> bool:
        """An indexer names no key twice."""
        return True

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """The list says itself what is seen."""
        return _EVERY.lengths(queries, keys, room)

    refuse = GatheredRows.refuse
    posed = Listing.posed

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """The same of rows that are gathered, unless every query is known to see a key."""
        return y if self.every_row_nonempty else _without_keys(y, listed, self.fully_masked_row)

    def own(self, seen: Any) -> Tensor:
        """The model's list is not built."""
        require(False, "the list is that of an indexer")
        return self.kv_lens
