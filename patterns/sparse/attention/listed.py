"""Attention over rows that the model gathers by lists of its own (FlashMLA, 2025; DeepSeek-V3.2, 2025).

    out[i] = softmax(scale · q[i] · kv[places[i]] where an entry is not hidden) · kv[places[i], :C]

An entry counts as often as it stands in a list, as for the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fusion.analysis.affine import conjuncts
from fusion.analysis.intervals import bounds
from fusion.analysis.row_layout import Step, named, uncast
from fusion.analysis.runs import wrapped
from fusion.graph import Algebra, Miss, Reading, Value
from fusion.graph.logic import constant, where
from fusion.graph.proof import must, proof, proven
from patterns.attention.core.empty_rows import Empty
from patterns.attention.masks.masks import Masks, unseen
from patterns.sparse.lists.entries import Entries, unclamped
from patterns.sparse.lists.rows import Gathered, distinct, gathered
from patterns.sparse.lists.slots import Tabled, by_table

ShowsOne = Callable[[Value], "frozenset[str] | None"]
"""Names the inputs that a proof relies on that each query sees an entry of its list; None where there is no proof."""

_LOWERED = (
    "softmax: a query that sees none of its list gives what depends on its scores; npu_sparse_flash_attention requires "
    "0, NaN or the mean of the listed rows; replace hidden scores by -inf, or show each query an entry"
)


@dataclass(frozen=True)
class Operands:
    """Attention of heads for each list: q [*rows, D], k [X, M, K, D], v [X, M, K, E], and the result.

    The first rows are the X · M lists, the others their N heads. `finish` is how [*rows, E] becomes the result of
    `dtype`.
    """

    q: Value
    k: Value
    v: Value
    dtype: torch.dtype | None
    finish: Sequence[Step]


@dataclass(frozen=True)
class _Listed:
    """Attention of queries [*rows, D] over the rows of keys and values that the entries of lists name.

    `empty` is what a query without keys gives; `relies` names the inputs of which that takes something as given.
    """

    q: Value
    k: Gathered
    v: Gathered
    entries: Entries
    empty: str
    scale: float
    of: Operands
    relies: frozenset[str] = frozenset()

    def paged(self, by: Tabled) -> _Listed:
        """The same over rows that a block table names."""
        a, entries = self.entries.masks.a, replace(self.entries, places=by.places)
        k, v = (Gathered(by.rows(a, each.source), by.places, by.counted_back) for each in (self.k, self.v))
        return replace(self, k=k, v=v, entries=entries if self.empty == "mean" else unclamped(a, entries))

    def relied_on(self, shows_one: ShowsOne) -> frozenset[str] | None:
        """Apply `shows_one` to the lists, with -1 where entries are hidden; None if there are no such lists."""
        found = self.reading()
        if not isinstance(found, Reading):
            return None
        return shows_one(shown(self.entries.masks.a, found.captures["places"], found.captures.get("hidden")))

    @proof
    def reading(self) -> Reading | Miss | None:
        """What it means; why the operator does nothing like it."""
        entries, empty, k = self.entries, self.empty, self.k
        masks, lists, (groups, size) = entries.masks, entries.lists, k.source.shape[:2]
        a, rows = masks.a, masks.positions.shape[:-1]
        told = not entries.others(size if empty == "zero" else None) and empty != "mean"  # a list of -1 alone gives NaN
        hidden = None if told else masks.hidden_entries(lists)
        if hidden is None and not told:
            return _miss("the mask of the rows that are listed differs from head to head")
        places = entries.places
        counted_back = k.counted_back and not entries.least(places)
        places = wrapped(a, places, size) if counted_back else places
        positive = counted_back or bounds(places)[0] >= 0 or (places is k.places and not k.counted_back)
        batch, heads = _batch(groups, *self.of.k.shape[:2]), prod(rows[lists:])
        view = proven(named((("permute", (0, 2, 1, 3)), *self.of.finish), {batch[1]: "S", batch[0]: "B"}))
        said: dict[str, Any] = {
            "q": a.permute(a.reshape(self.q, (*batch, heads, self.q.shape[-1])), (0, 2, 1, 3)),
            "k": a.reshape(k.source, (groups, 1, *k.source.shape[1:])),
            "v": a.reshape(self.v.source, (groups, 1, *self.v.source.shape[1:])),
            "places": a.reshape(places, (*batch, places.shape[-1])), "scale": self.scale, "fully_masked_row": empty,
            "distinct": distinct(places), "ends": positive if told else entries.is_tail() and empty != "mean",
            "output_view": view,
        }  # fmt: skip
        if hidden is not None:
            said["hidden"] = a.reshape(hidden, (*batch, places.shape[-1]))
        return Reading("listed_attention", said, masks.positions.names() | self.relies)


@proof
def listed_attention(
    masks: Masks,
    of: Operands,
    scale: float,
    softmax: Empty,
    beyond: str = "",
    shows_one: ShowsOne = lambda places: None,
) -> list[Reading | Miss] | None:
    """Read attention over listed rows, or why there is none; None if rows are not gathered by one list.

    Rows that a list names by their slots in pages are read as those of a block table besides.

    Args:
        masks: those of its scores, [*rows, K].
        of: its operands.
        scale: what the scores are multiplied by.
        softmax: what the softmax makes of a row without a key.
        beyond: what else is done to the scores, of which the operator knows nothing.
        shows_one: of lists [B, S, K] with -1 for hidden entries, by which each query is known to see one.
    """
    a = masks.a
    k, v = (proven(gathered(a, each)) for each in (of.k, of.v))
    must((k.places, k.counted_back) == (v.places, v.counted_back) and k.source.shape[:2] == v.source.shape[:2])
    if beyond:
        return [_miss(beyond)]
    q = uncast(a, of.q)
    if len({q.dtype, k.source.dtype, v.source.dtype, of.dtype}) != 1:
        return [_miss("queries, listed rows and result have different dtypes")]
    seen = masks.visible()
    if isinstance(seen, str):
        return [_miss(seen)]
    rows, count = masks.positions.shape[:-1], prod(of.k.shape[:2])
    lists = proven(next((place for place in range(1, len(rows)) if prod(rows[:place]) == count), None))
    entries = Entries(masks, lists, k.places, conjuncts(seen))
    seeing = _Listed(q, k, v, unclamped(a, entries), "zero", scale, of)
    empty = "zero" if seen is True else unseen(masks.positions, masks.terms, softmax)
    relies = seeing.relied_on(shows_one) if empty in ("", "mean") else None
    if relies is not None:
        listed = replace(seeing, relies=relies)
    elif not empty:
        return [_miss(_LOWERED)]
    else:
        listed = replace(seeing, entries=entries if empty == "mean" else seeing.entries, empty=empty)
    found = proven(listed.reading())
    table = by_table(a, listed.entries.places, k.source.shape[1]) if k.groups == 1 else None
    paged = listed.paged(table).reading() if table is not None and isinstance(found, Reading) else None
    return [found, paged] if isinstance(paged, Reading) else [found]


def shown(a: Algebra, places: Value, hidden: Value | None) -> Value:
    """Build a list with -1 where an entry is hidden."""
    return (
        places if hidden is None else proven(where(a, hidden, constant(a, -1, (), places.dtype), places, places.dtype))
    )


def _miss(reason: str) -> Miss:
    return Miss("sparse_attention", reason)


def _batch(groups: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """B and S of first · second lists in so many groups."""
    if groups == 1:
        return 1, first * second
    if groups == first:
        return groups, second
    must(isinstance(groups, int) and isinstance(first, int) and isinstance(second, int))
    must(first * second % groups == 0)
    return groups, first * second // groups
