"""Attention over rows that the model gathers by lists of its own (FlashMLA, 2025; DeepSeek-V3.2, 2025).

    out[i] = softmax(scale · q[i] · kv[places[i]] where an entry is not hidden) · kv[places[i], :C]

An entry counts as often as it is listed, as for the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fusion.analysis.affine import conjuncts
from fusion.analysis.consecutive_positions import wrapped
from fusion.analysis.intervals import bounds
from fusion.analysis.row_layout import Step, named, unwidened
from fusion.graph import Algebra, Miss, Reading, Value
from fusion.graph.comparisons import constant, where
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.core.empty_rows import Empty
from patterns.attention.masks.masks import Masks, unseen
from patterns.sparse.lists.gathered_rows import Gathered, distinct, gathered
from patterns.sparse.lists.list_entries import Entries, unclamped
from patterns.sparse.lists.page_slots import Tabled, by_table

ShowsOne = Callable[[Value], "frozenset[str] | None"]
"""Names the inputs that a proof relies on that each query sees an entry of its list; None without a proof."""

_LOWERED = (
    "softmax: a query that sees none of its list gives what depends on its scores; "
    "npu_sparse_flash_attention requires 0, NaN or the mean of the listed rows; replace hidden scores by "
    "-inf, or show each query an entry"
)


@dataclass(frozen=True)
class Operands:
    """Operands of attention for each list.

    Attributes:
        q: queries [*rows, D]; the first rows are the X · M lists, the others their N heads.
        k: keys [X, M, K, D].
        v: values [X, M, K, E].
        dtype: dtype of the result.
        finish: reshapes and permutes from [*rows, E] to the result.
    """

    q: Value
    k: Value
    v: Value
    dtype: torch.dtype | None
    finish: Sequence[Step]


@dataclass(frozen=True)
class _Listed:
    """Attention of queries [*rows, D] over rows of keys and values that the entries of lists name.

    Attributes:
        q: the queries.
        k: rows of keys, with the source that they are gathered from.
        v: rows of values, of a source with as many rows.
        entries: entries of the lists, and the mask that hides some of them.
        empty: "zero", "nan" or "mean", the result of a query without keys.
        scale: factor of the scores.
        operands: shapes of the gathered operands, and the steps after the attention.
        relies: inputs that are assumed to show each query an entry.
    """

    q: Value
    k: Gathered
    v: Gathered
    entries: Entries
    empty: str
    scale: float
    operands: Operands
    relies: frozenset[str] = frozenset()

    def paged(self, tabled: Tabled) -> _Listed:
        """Return the attention over the rows of the pages in `tabled.table`, with positions in them instead of
        slots.
        """
        a, entries = self.entries.masks.a, replace(self.entries, places=tabled.places)
        k, v = (Gathered(tabled.rows(a, each.source), tabled.places, tabled.counted_back) for each in (self.k, self.v))
        return replace(self, k=k, v=v, entries=entries if self.empty == "mean" else unclamped(a, entries))

    def relied_on(self, shows_one: ShowsOne) -> frozenset[str] | None:
        """Return the inputs on whose assumed masks a proof relies that each query sees an entry, by `shows_one`.

        It is asked of the lists [B, S, K], with -1 written over hidden entries. None without a proof, or without a
        `reading`.
        """
        reading = self.reading()
        if not isinstance(reading, Reading):
            return None
        return shows_one(shown(self.entries.masks.a, reading.captures["places"], reading.captures.get("hidden")))

    @proof
    def reading(self) -> Reading | Miss | None:
        """Build the `listed_attention` reading; a `Miss` if masks differ by head, None if sizes are not proven."""
        entries, empty, k = self.entries, self.empty, self.k
        masks, lists, (groups, size) = entries.masks, entries.lists, k.source.shape[:2]
        a, rows = masks.a, masks.positions.shape[:-1]
        # `GatheredRows.restored` takes a list that begins with -1 for one without keys, and gives NaN, never the mean
        is_unmasked = not entries.others(size if empty == "zero" else None) and empty != "mean"
        hidden = None if is_unmasked else masks.hidden_entries(lists)
        if hidden is None and not is_unmasked:
            return _miss(
                "mask: that of the listed rows differs from head to head; npu_sparse_flash_attention requires "
                "one for all heads"
            )
        places = entries.places
        counted_back = k.counted_back and not entries.least(places)
        places = wrapped(a, places, size) if counted_back else places
        positive = counted_back or bounds(places)[0] >= 0 or (places is k.places and not k.counted_back)
        batch, heads = _batch(groups, *self.operands.k.shape[:2]), prod(rows[lists:])
        view = proven(named((("permute", (0, 2, 1, 3)), *self.operands.finish), {batch[1]: "S", batch[0]: "B"}))
        captures: dict[str, Any] = {
            "q": a.permute(a.reshape(self.q, (*batch, heads, self.q.shape[-1])), (0, 2, 1, 3)),
            "k": a.reshape(k.source, (groups, 1, *k.source.shape[1:])),
            "v": a.reshape(self.v.source, (groups, 1, *self.v.source.shape[1:])),
            "places": a.reshape(places, (*batch, places.shape[-1])), "scale": self.scale, "fully_masked_row": empty,
            "distinct": distinct(places), "ends": positive if is_unmasked else entries.is_tail() and empty != "mean",
            "output_view": view,
        }  # fmt: skip
        if hidden is not None:
            captures["hidden"] = a.reshape(hidden, (*batch, places.shape[-1]))
        return Reading("listed_attention", captures, masks.positions.names() | self.relies)


@proof
def listed_attention(
    masks: Masks,
    operands: Operands,
    scale: float,
    softmax: Empty,
    beyond: str = "",
    shows_one: ShowsOne = lambda places: None,
) -> list[Reading | Miss] | None:
    """Read attention over rows that are gathered by one list of keys and values.

    Returns a `listed_attention` reading or a `Miss`, and, if the list names rows by their slots in pages, a second
    reading over the rows of a block table. None if keys and values are not gathered rows at the same places.

    Args:
        masks: masks of the scores, [*rows, K].
        operands: operands of the attention.
        scale: factor of the scores.
        softmax: result of the softmax for a row without a key.
        beyond: reason why other steps on the scores are not those of the operator, "" if there are none.
        shows_one: given lists [B, S, K], with -1 for hidden entries, names the inputs on whose assumed masks a proof
            relies that each query sees an entry; None without a proof.
    """
    a = masks.a
    k, v = (proven(gathered(a, each)) for each in (operands.k, operands.v))
    must((k.places, k.counted_back) == (v.places, v.counted_back) and k.source.shape[:2] == v.source.shape[:2])
    if beyond:
        return [_miss(beyond)]
    q = unwidened(a, operands.q)
    if len({q.dtype, k.source.dtype, v.source.dtype, operands.dtype}) != 1:
        return [
            _miss(
                "queries, listed rows, result: their dtypes differ; npu_sparse_flash_attention requires one dtype; "
                "cast them to one"
            )
        ]
    seen = masks.visible()
    if isinstance(seen, str):
        return [_miss(seen)]
    rows, count = masks.positions.shape[:-1], prod(operands.k.shape[:2])
    lists = proven(next((place for place in range(1, len(rows)) if prod(rows[:place]) == count), None))
    entries = Entries(masks, lists, k.places, conjuncts(seen))
    seeing = _Listed(q, k, v, unclamped(a, entries), "zero", scale, operands)
    empty = "zero" if seen is True else unseen(masks.positions, masks.terms, softmax)
    relies = seeing.relied_on(shows_one) if empty in ("", "mean") else None
    if relies is not None:
        listed = replace(seeing, relies=relies)
    elif not empty:
        return [_miss(_LOWERED)]
    else:
        listed = replace(seeing, entries=entries if empty == "mean" else seeing.entries, empty=empty)
    reading = proven(listed.reading())
    table = by_table(a, listed.entries.places, k.source.shape[1]) if k.groups == 1 else None
    paged = listed.paged(table).reading() if table is not None and isinstance(reading, Reading) else None
    return [reading, paged] if isinstance(paged, Reading) else [reading]


def shown(a: Algebra, places: Value, hidden: Value | None) -> Value:
    """Write -1 over the entries of `places` for which `hidden` is True; `places` if `hidden` is None."""
    return (
        places if hidden is None else proven(where(a, hidden, constant(a, -1, (), places.dtype), places, places.dtype))
    )


def _miss(reason: str) -> Miss:
    return Miss("sparse_attention", reason)


def _batch(groups: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Split `first` · `second` lists into B sequences of S queries, by the number of `groups` of rows; return B and S.

    Each group of rows is a sequence. Unproven if `groups` does not divide the number of lists.
    """
    if groups == 1:
        return 1, first * second
    if groups == first:
        return groups, second
    must(isinstance(groups, int) and isinstance(first, int) and isinstance(second, int))
    must(first * second % groups == 0)
    return groups, first * second // groups
