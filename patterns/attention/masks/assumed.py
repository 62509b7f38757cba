"""What is known of masks: what the user says of one that is passed in, and which keys the model itself writes.

The former is a formula over its positions, which `fusion.inputs.assumptions` checks. Counted from the mask itself is
only how many keys the first query of each sequence sees; where there are as many queries as keys, not even that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, conjunction, number
from fusion.analysis.constant_folding import Folder
from fusion.analysis.dtypes import is_integer
from fusion.analysis.predicates import Positions
from fusion.analysis.rounded_later import RoundedLater
from fusion.analysis.rounding import is_float
from fusion.analysis.runs import run
from fusion.facts import LOWERED, ONES, plain, window
from fusion.graph import Algebra, Graph, Value
from patterns.attention.masks.mask_terms import Term
from patterns.attention.masks.masks import Masks, Sizes
from patterns.attention.masks.visible import hidden
from patterns.sparse.lists.rows import sorted_by_scores


@dataclass(frozen=True)
class Assumed:
    """What is known of one graph.

    Attributes:
        algebra: its values.
        folder: its constants.
        kinds: the assumptions about its inputs, by name: "causal", "window:n" or "padding".
        written: the writes of rows that it makes.
        weights: the names of inputs that hold Parameters.
        rounded: the dtype to which all that reads a value rounds it first, None where something does not.
        computed: the values that nodes compute.
        sorted_by_scores: whether a list of the largest of some scores is sorted by them.
    """

    algebra: Algebra
    folder: Folder = field(default_factory=Folder)
    kinds: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    written: Sequence[Value] = ()
    weights: frozenset[str] = frozenset()
    rounded: Callable[[Value], torch.dtype | None] = lambda value: None
    computed: Container[Value] = frozenset()
    sorted_by_scores: Callable[[Value], bool] = lambda places: False

    @classmethod
    def of(cls, graph: Graph) -> Assumed:
        """What is known of a graph."""
        written = [value for value in graph.places if value.op in ("write", "write_rows")]
        rounded, facts = RoundedLater(graph).dtype, graph.facts
        kept = graph.shared(Folder), facts.assumed, written, facts.parameters, rounded, graph.places
        return cls(graph.algebra, *kept, partial(sorted_by_scores, graph))

    def masks(
        self,
        shape: Sequence[Any],
        terms: Sequence[Term],
        sizes: Sizes,
        keep_lists: bool = False,
        suppose: bool = False,
    ) -> Masks:
        """These masks of scores [*rows, T]; `keep_lists` as of `Positions`, `suppose` as `Positions.supposing` does."""
        positions = Positions(shape, self.folder, self.visible, keep_lists, self.holds_ones)
        positions = positions.supposing() if suppose else positions
        return Masks(self.algebra, positions, terms, sizes, self._begins(positions, *sizes[2:]), self.may_be_lowered)

    def _begins(self, positions: Positions, queries: Any, keys: Any) -> frozenset[Affine]:
        """Where the model writes as many rows as there are queries, into no more places than there are keys.

        A write beyond the end is an error for the model: so these rows, and queries that stand where they do, are
        inside.
        """
        if queries == 1 or not isinstance(keys, int):
            return frozenset()
        starts: dict[Value, list[Affine]] = {}
        for write in self.written:
            start, axis = _start(self.algebra, write, queries)
            size = write.shape[axis]
            if start is not None and isinstance(size, int) and size <= keys:
                starts[start] = [number(0) if size == 1 else positions.axis(0) for size in start.shape]
        return frozenset(positions.affine(start, at) for start, at in starts.items())

    def visible(self, mask: Value, at: Sequence[Affine]) -> Formula | None:
        """Read where a mask [B | 1, N | 1, S, T], [B | 1, S, T], [S, T] or [B, T] shows a key; None if not assumed."""
        kind = self._kind(mask)
        if kind is None or mask.rank not in (2, 3, 4):
            return None
        last = None if kind == "padding" else self._last(mask, at)
        if last is None:  # then all that is said is what its numbers mean, as those of booleans and whole ones do
            return ("is", Leaf(mask, tuple(at))) if is_float(mask) or self._is_of_keys(mask) else None
        ahead = at[-1] + at[-2].times(-1) + last.times(-1)
        keys = window(kind)
        if keys is None:
            return ("le", ahead)
        return conjunction(("le", ahead), ("le", ahead.times(-1).plus(1 - keys)))

    def holds_ones(self, mask: Value) -> bool:
        """True if a mask of numbers holds 1 where a key is seen, and 0 where it is hidden."""
        floats = is_float(mask) and mask.op == "input"
        return is_integer(mask) or (floats and (self._is_of_keys(mask) or self._said(mask).endswith(ONES)))

    def may_be_lowered(self, mask: Value) -> bool:
        """True if a mask may hide every key of a query by finite numbers, or by -inf."""
        return self._said(mask).endswith(LOWERED)

    def _said(self, mask: Value) -> str:
        return self.kinds.get(mask.attrs[0], "") if mask.op == "input" and mask.attrs[1] == 0 else ""

    def _kind(self, mask: Value) -> str | None:
        return plain(self._said(mask)) or None

    def _is_of_keys(self, mask: Value) -> bool:
        """True if a mask is [B, T], which says of each key whether it is padding."""
        return mask.rank == 2 and self._kind(mask) == "padding"

    def _last(self, mask: Value, at: Sequence[Affine]) -> Affine | None:
        """The last key that query 0 sees: L_b − S; None where it cannot be counted."""
        queries, keys = mask.shape[-2:]
        if queries == keys:
            return Affine()
        if window(self.kinds[mask.attrs[0]]) is not None:
            return None
        count = self._count(mask)
        if count is None:
            return None
        return Affine(MappingProxyType({Leaf(count, tuple(at[: min(mask.rank - 2, 1)])): 1}), -1)

    def _count(self, mask: Value) -> Value | None:
        """How many keys the first query sees: [B | 1], or one number [] for a mask without B; None if there may be no
        first query.
        """
        a = self.algebra
        row: Any = mask
        lead = mask.shape[: min(mask.rank - 2, 1)]
        for axis in range(len(lead), mask.rank - 1):
            row = row and a.slice(row, axis, 0, 1)
        if row is None:
            return None
        return a.make(
            "count", (_shown(a, a.reshape(row, (*lead, mask.shape[-1])), self.holds_ones(mask)),), (), lead, torch.int64
        )


def _start(a: Algebra, write: Value, rows: Any) -> tuple[Value | None, int]:
    """Where so many consecutive rows of every sequence are written, and along which axis."""
    _, source, index, *inner = write.args
    axis = 1 if inner else write.attrs[0]
    if write.op == "write":
        return index if source.shape[axis] == rows else None, axis
    places = inner[0] if inner else index
    while places.op == "wrap" or (places.op in ("reshape", "expand") and places.shape[-1:] != (rows,)):
        places = places.arg
    found = run(a, places) if places.shape[-1:] == (rows,) else None
    return None if found is None or found.start is None else a.shift(found.start, found.offset), axis


def _shown(a: Algebra, mask: Value, of_ones: bool) -> Value:
    """Build the mask as booleans, true where a key is seen: floats are added to scores but `of_ones`."""
    if of_ones or not is_float(mask):
        return a.cast(mask, torch.bool)
    return a.make("not", (hidden(a, mask),), (), mask.shape, torch.bool)
