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
        """Return the term `topk_mask` of the mask that shows each query its listed keys, of any list `self.places`."""
        hidden = dict(hidden=self.hidden, ends=self.ends, room=self.room, **vars(self.fixed))
        return p.topk_mask(places=self.places, distinct=self.distinct, **hidden, **self.captures())

    def indexed(self, p, indexer: Indexer) -> Any:
        """Return the term `topk_mask` of a list that is the term `lightning_indexer` of `indexer`, under the same
        visible keys.
        """
        places = p.lightning_indexer(places=self.places, **indexer.captures(p), **self.captures())
        return p.topk_mask(places=places, distinct=self.distinct, **self.captures())

    def refuse(self, seen: Any, indexer: Indexer | None, averaged: bool) -> None:
        """Refuse a query without keys if the result is neither the operator's 0 nor one that `restored` can give.

        Args:
            seen: captures of the mask, see `Visibility`: `fully_masked_row` is the result of such a query in the model.
            indexer: the indexer that computes the list, None for the model's own list.
            averaged: True if the source of keys and values can give the mean of all values.
        """
        require(
            seen.levels is None,
            "mask: a query whose list has no visible key would see those that are lowered least; "
            "npu_sparse_flash_attention requires keys to be hidden for good; mask with -inf",
        )
        listed = self.hides_nothing() or indexer is not None  # then each listed key is visible
        left = seen.fully_masked_row == "zero" or (self.every_row_nonempty and listed)
        restored = indexer is not None and self._is_nan(seen)
        restored |= self._marks_empty_rows() and (self._is_nan(seen) or averaged)
        gives = "NaN" if seen.fully_masked_row == "nan" else "the mean of all values"
        why = (
            "mask: a query whose list has no visible key gives {gives}; npu_sparse_flash_attention gives 0 and "
            "requires that; replace its result by 0, or show each query a key"
        )
        require(left or restored, why, gives=gives)

    def _marks_empty_rows(self) -> bool:
        """Return True if `own` gives an empty list to each query without keys."""
        return self.hidden is not None or self.room is not None or self.segment is not None

    def _is_nan(self, seen: Any) -> bool:
        """Return True if a query may have no keys, and the model then gives NaN by `seen`."""
        return seen.fully_masked_row == "nan" and not self.every_row_nonempty

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Return the sparse mode and the lengths of keys for the operator, of the arguments of `Seen.lengths`.

        With `row_lens`, each list is already cut to the keys that its query sees: mode 0, and the lengths of all keys.
        """
        return Seen.lengths(self if self.row_lens is None else _EVERY, queries, keys, room)

    def is_distinct(self) -> bool:
        """Return True: the list for the operator names no key twice, as `own` removes repetitions and an indexer has
        none.
        """
        return True

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Return `queries` [B, S, N, C] and [B, S, N, Dr] unchanged."""
        return queries

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """Return `y` [B, S, N, C] with the model's NaN, or the result of `mean`, for each query whose list is empty.

        A list of `listed` [B, S, 1, K] is empty if it begins with -1.
        """
        if self._is_nan(seen):
            return y.masked_fill(listed[..., :1] < 0, torch.nan)
        averaged = self._marks_empty_rows() and not self.every_row_nonempty and seen.fully_masked_row == "mean"
        return torch.where(listed[..., :1] < 0, mean(), y) if averaged else y

    def own(self, seen: Any) -> Tensor:
        """Return the model's own list as the operator takes it, int32 [B, S, 1, K]: distinct visible keys, then -1.

        Keys that `mask_kind`, `kv_len` or `kv_lens` hide stay in the list: the operator hides them. With `segment`,
        keys are counted from the first one of the segment. `seen` has the model's result of a query without keys, see
        `_is_nan`.
        """
        shown = self._marks_empty_rows() or not self._is_nan(seen)
        require(
            shown,
            "list of keys: it does not say which queries see no key; npu_sparse_flash_attention requires -1 in "
            "the entries of such a query",
        )
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
        """Refuse nothing, whatever a query without keys gives: `posed` and `restored` give that result."""

    def is_distinct(self) -> bool:
        """Return `self.distinct`: True if the list for the operator names no key twice."""
        return self.distinct

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Return sparse mode 0 and the lengths of all keys, see `Seen.lengths`: only the list hides keys."""
        return _EVERY.lengths(queries, keys, room)

    def segment_ends(self) -> Tensor | None:
        """Return None: a list names rows of all tokens, not of segments."""
        return None

    def own(self, seen: Any) -> Tensor:
        """Return the model's list as the operator takes it, int32 [B, S, 1, K]: visible entries, then -1 for hidden
        ones.

        If a query whose entries are all hidden gives the mean of the listed rows, its list stays as the model has it.
        `seen` is not read.
        """
        places = self.places.to(torch.int32)
        if self.hidden is not None:
            hidden = self.hidden & ~self._all_hidden() if self.fully_masked_row == "mean" else self.hidden
            places = places.masked_fill(hidden, -1)
        return (places if self.ends else places.sort(dim=-1, descending=True).values).unsqueeze(2)

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Return `queries` [B, S, N, C] and [B, S, N, Dr], as 0 for each query whose entries are all hidden, if the
        model gives the mean of the listed rows for it.

        The scores of such a query are then equal, and `own` hides none of its entries: the operator gives that mean.
        """
        if self.fully_masked_row != "mean":
            return queries
        return [each.masked_fill(self._all_hidden().unsqueeze(-1), 0) for each in queries]

    def _all_hidden(self) -> Tensor:
        """Compute bool [B, S, 1], True for each query whose entries are all hidden."""
        assert self.hidden is not None
        return self.hidden.all(-1, keepdim=True)

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """Return `y` [B, S, N, C] with NaN for each empty list of `listed` [B, S, 1, K], if `fully_masked_row` is
        "nan".

        `seen` and `mean` are not read: `posed` has cared for the mean.
        """
        return _without_keys(y, listed, self.fully_masked_row)


def _without_keys(y: Tensor, listed: Tensor, given: str) -> Tensor:
    """Return `y` [B, S, N, C], with NaN for each list of `listed` [B, S, 1, K] that begins with -1 if `given` is
    "nan".
    """
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
        """Return True: an indexer names no key twice."""
        return True

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Return sparse mode 0 and the lengths of all keys, see `Seen.lengths`: only the list hides keys."""
        return _EVERY.lengths(queries, keys, room)

    refuse = GatheredRows.refuse
    posed = Listing.posed

    def restored(self, y: Tensor, listed: Tensor, seen: Any, mean: Callable[[], Tensor]) -> Tensor:
        """Return `y` [B, S, N, C] with NaN for each empty list of `listed` [B, S, 1, K], if `fully_masked_row` is
        "nan".

        `y` as it is if every query is proven to see a key. `seen` and `mean` are not read.
        """
        return y if self.every_row_nonempty else _without_keys(y, listed, self.fully_masked_row)

    def own(self, seen: Any) -> Tensor:
        """Refuse to take over the model's own list: the lowering `indexed` computes it by the operator of the
        indexer.
        """
        require(False, "list of keys: an indexer gives it; this call requires a list of the model")
        return self.kv_lens
