"""The facet of sparse attention for the source of its list of keys.

Listing         a list of keys behind a mask
GatheredRows    a list by which the model gathers the rows that it attends to
IndexedRows     a list of an indexer by which the model gathers the rows that it attends to
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
"""Visible keys where the list alone hides keys: all of them."""


@dataclass(frozen=True)
class Listing(Seen):
    """A list of keys, and a mask that shows some of them.

    Attributes:
        places: positions of the listed keys of each query.
        distinct: True if no row of `places` names a key twice.
        hidden: True for a key that the mask hides, listed or not, where no other attribute describes the mask.
        ends: True if in each list only hidden entries follow a hidden one.
        room: value of the entry that names key 0, and the number of keys; another entry names none. None if each names
            one.
        fixed: keys that are visible in addition to the listed ones.
    """

    places: Any = tensor("B S K")
    distinct: Any = attribute()
    room: Any = attribute()
    hidden: Any = tensor("B S T", optional=True)
    ends: Any = attribute()
    fixed: Any = FixedKeys

    def listed(self, p) -> Any:
        """Return the mask of the listed keys as `topk_mask`, whatever computes the list."""
        hidden = dict(hidden=self.hidden, ends=self.ends, room=self.room, **vars(self.fixed))
        return p.topk_mask(places=self.places, distinct=self.distinct, **hidden, **self.captures())

    def indexed(self, p, indexer: Indexer) -> Any:
        """Return the mask of the listed keys as `topk_mask` of a list that `indexer` computes under that mask."""
        places = p.lightning_indexer(places=self.places, **indexer.captures(p), **self.captures())
        return p.topk_mask(places=places, distinct=self.distinct, **self.captures())

    def refuse(self, seen: Any, indexer: Indexer | None, averaged: bool) -> None:
        """Refuse a query without keys if the result is neither the operator's 0 nor one that `restored` can give.

        `averaged` is True if the mean of all values can be computed.
        """
        require(seen.levels is None, "a query for which no key is left would see those that are lowered least")
        listed = self.hides_nothing() or indexer is not None  # then each listed key is visible
        left = seen.fully_masked_row == "zero" or (self.every_row_nonempty and listed)
        restored = indexer is not None and self._is_nan(seen)
        restored |= self._marks_empty_rows() and (self._is_nan(seen) or averaged)
        gives = "NaN" if seen.fully_masked_row == "nan" else "the mean of all values"
        why = "a query for which no key is left gives {gives}, the operator gives 0"
        require(left or restored, why, gives=gives)

    def _marks_empty_rows(self) -> bool:
        """Return True if `own` gives an empty list to each query without keys."""
        return self.hidden is not None or self.room is not None or self.segment is not None

    def _is_nan(self, seen: Any) -> bool:
        """Return True if a query may have no keys, and gives NaN then."""
        return seen.fully_masked_row == "nan" and not self.every_row_nonempty

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Return `Seen.lengths`; those of all keys if each query has a length of its own, to which its list is cut."""
        return Seen.lengths(self if self.row_lens is None else _EVERY, queries, keys, room)

    def is_distinct(self) -> bool:
        """Return True if the list for the operator names no key twice: `own` removes repetitions."""
        return True

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Return `queries` [B, S, N, C] and [B, S, N, Dr] unchanged."""
        return queries

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """Write NaN or the `mean`, as the model, over the results `y` [B, S, N, C] of empty lists [B, S, 1, K]."""
        if self._is_nan(seen):
            return y.masked_fill(listed[..., :1] < 0, torch.nan)
        averaged = self._marks_empty_rows() and not self.every_row_nonempty and seen.fully_masked_row == "mean"
        return torch.where(listed[..., :1] < 0, mean(), y) if averaged else y

    def own(self, seen: Any) -> Tensor:
        """Return the model's list for the operator, int32 [B, S, 1, K]: distinct visible keys, then -1.

        Keys that a causal order or a length of the sequence hides stay in the list: the operator hides them.
        """
        shown = self._marks_empty_rows() or not self._is_nan(seen)
        require(shown, "the model's own list does not say which queries see no key")
        places = self.places.to(torch.int32)
        if self.room is not None:
            first, keys = self.room
            places = places - first
            places = places.masked_fill((places < 0) | (places >= keys), -1)
        places = self.fixed.append_to(places)
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
        places: positions of rows; a negative one is a hidden entry.
        hidden: True for a further hidden entry.
        distinct: True if no row of `places` names a key twice.
        ends: True if in each list only hidden entries follow a hidden one.
        fully_masked_row: "zero", "nan" or "mean" (of the listed rows), the result of a query whose entries are all
            hidden.
    """

    places: Any = tensor("B S K")
    hidden: Any = tensor("B S K", optional=True)
    distinct: Any = attribute()
    ends: Any = attribute(True, False)
    fully_masked_row: Any = attribute()

    def gathered(self, p) -> dict[str, Any]:
        """Return the captures of the list, as `listed_attention` has them."""
        return dict(vars(self))

    def refuse(self, seen: Any, indexer: Indexer | None, averaged: bool) -> None:
        """Allow every result of a query without keys, as `posed` and `restored` give it."""

    def is_distinct(self) -> bool:
        """Return True if the list for the operator names no key twice."""
        return self.distinct

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Return mode and lengths of visible keys where the list alone hides keys."""
        return _EVERY.lengths(queries, keys, room)

    def segment_ends(self) -> Tensor | None:
        """Return None: a list names rows of all tokens, not of segments."""
        return None

    def own(self, seen: Any) -> Tensor:
        """Return the list for the operator, int32 [B, S, 1, K], with -1 for hidden entries, after all others.

        A row with hidden entries alone stays as it is if its query gives the mean of the listed rows.
        """
        places = self.places.to(torch.int32)
        if self.hidden is not None:
            hidden = self.hidden & ~self._all_hidden() if self.fully_masked_row == "mean" else self.hidden
            places = places.masked_fill(hidden, -1)
        return (places if self.ends else places.sort(dim=-1, descending=True).values).unsqueeze(2)

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Write 0 over queries whose entries are all hidden, if they give the mean.

        The scores of such a query are equal, and `own` hides none of its entries: the operator gives the mean of the
        listed rows.
        """
        if self.fully_masked_row != "mean":
            return queries
        return [each.masked_fill(self._all_hidden().unsqueeze(-1), 0) for each in queries]

    def _all_hidden(self) -> Tensor:
        """Return True for queries whose entries are all hidden, bool [B, S, 1]."""
        assert self.hidden is not None
        return self.hidden.all(-1, keepdim=True)

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """Write NaN over the results `y` [B, S, N, C] of empty lists, if the model gives NaN there."""
        return _without_keys(y, listed, self.fully_masked_row)


def _without_keys(y: Tensor, listed: Tensor, given: str) -> Tensor:
    """Write NaN over the results `y` [B, S, N, C] of empty lists [B, S, 1, K], if `given` is "nan"."""
    return y.masked_fill(listed[..., :1] < 0, torch.nan) if given == "nan" else y


@dataclass(frozen=True)
class IndexedRows(Seen):
    """The list of an indexer, by which the model gathers the rows of keys that a query sees.

    Attributes:
        fully_masked_row: "zero" or "nan", the result of a query without keys.
        distinct: True if no row of the list names a key twice.
        dtype: dtype of the list.
        entries: length of the list.
    """

    fully_masked_row: Any = attribute()
    distinct: Any = attribute()
    dtype: Any = attribute()
    entries: Any = attribute()

    def gathered(self, p, indexer: Indexer) -> dict[str, Any]:
        """Return the captures of the list that `indexer` computes, as `listed_attention` has them."""
        places = p.indexer_list(dtype=self.dtype, entries=self.entries, **indexer.captures(p), **self.captures())
        rows = dict(fully_masked_row=self.fully_masked_row, distinct=self.distinct)
        return dict(places=places, ends="indexer", **rows)

    def is_distinct(self) -> bool:
        """Return True if the list for the operator names no key twice, as that of an indexer."""
        return True

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Return mode and lengths of visible keys where the list alone hides keys."""
        return _EVERY.lengths(queries, keys, room)

    refuse = GatheredRows.refuse
    posed = Listing.posed

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """Write NaN over the results `y` [B, S, N, C] of empty lists, if the model does and there may be any."""
        return y if self.every_row_nonempty else _without_keys(y, listed, self.fully_masked_row)

    def own(self, seen: Any) -> Tensor:
        """Refuse the model's own list, which an indexer computes anew."""
        require(False, "the list is that of an indexer")
        return self.kv_lens
