"""Facts about the masks of a graph: assumptions of the user on inputs, and the rows that the model writes to caches.

An assumption is a formula over the positions of the mask, which `fusion.inputs.assumptions` checks at run time. The
number of keys that the first query of each sequence sees is counted from the mask; where S = T, it is taken as 1.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, conjunction, number
from fusion.analysis.consecutive_positions import run
from fusion.analysis.constant_folding import Folder
from fusion.analysis.dtypes import is_integer
from fusion.analysis.mask_formulas import Positions
from fusion.analysis.node_predicates import sorted_by_scores
from fusion.analysis.rounded_before_use import RoundedLater
from fusion.analysis.rounding import is_float
from fusion.facts import LOWERED, ONES, plain, window
from fusion.graph import Algebra, Graph, Value
from patterns.attention.masks.mask_terms import Term
from patterns.attention.masks.masks import Masks, Sizes
from patterns.attention.masks.visible import hidden


@dataclass(frozen=True)
class Assumed:
    """Facts about the masks of one graph.

    Attributes:
        algebra: the algebra of the graph.
        folder: the memo of constant folding.
        kinds: the assumption on each input, by name: "causal", "window:n" or "padding", perhaps with a suffix.
        written: the values "write" and "write_rows" of the graph.
        weights: the names of inputs that hold Parameters.
        rounded: the dtype to which every user of a value rounds it first; None if some user does not.
        computed: the values that nodes of the graph compute.
        sorted_by_scores: true if a list of the largest scores is sorted by them.
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
        """Collect the facts about `graph`."""
        written = [value for value in graph.places if value.op in ("write", "write_rows")]
        rounded, facts = RoundedLater(graph).dtype, graph.facts
        state = graph.shared(Folder), facts.assumed, written, facts.parameters, rounded, graph.places
        return cls(graph.algebra, *state, partial(sorted_by_scores, graph))

    def masks(
        self,
        shape: Sequence[Any],
        terms: Sequence[Term],
        sizes: Sizes,
        keep_lists: bool = False,
        suppose: bool = False,
    ) -> Masks:
        """Build the `Masks` of scores `shape` [*rows, T] from `terms`.

        Args:
            shape: the dims of the scores.
            terms: the masks, the outermost first.
            sizes: B, N, S and T.
            keep_lists: passed to `Positions`.
            suppose: True to take integer inputs for masks of 0 and 1, by `Positions.supposing`.
        """
        positions = Positions(shape, self.folder, self.visible, keep_lists, self.holds_ones)
        positions = positions.supposing() if suppose else positions
        begins = self._begins(positions, *sizes[2:])
        return Masks(self.algebra, positions, terms, sizes, begins, self.may_be_lowered, self.shows_some)

    def _begins(self, positions: Positions, queries: Any, keys: Any) -> frozenset[Affine]:
        """Return the positions from which the model writes `queries` rows into buffers of at most `keys` rows.

        As the model itself fails on a write beyond the end of a buffer, each such position is at most `keys` -
        `queries`. Empty for one query, or a symbolic number of keys.
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
        """Return the formula of the positions `at` where a mask shows a key; None if nothing is assumed of it.

        Masks are [B | 1, N | 1, S, T], [B | 1, S, T], [S, T] or [B, T].
        """
        kind = self._kind(mask)
        if kind is None or mask.rank not in (2, 3, 4):
            return None
        last = None if kind == "padding" else self._last(mask, at)
        if last is None:  # the assumption only fixes how floats are read; booleans and integers are read alike
            return ("is", Leaf(mask, tuple(at))) if is_float(mask) or self._is_of_keys(mask) else None
        ahead = at[-1] + at[-2].times(-1) + last.times(-1)
        keys = window(kind)
        if keys is None:
            return ("le", ahead)
        return conjunction(("le", ahead), ("le", ahead.times(-1).plus(1 - keys)))

    def holds_ones(self, mask: Value) -> bool:
        """Return True if `mask` is an integer or float mask with 1 at visible keys and 0 at hidden ones."""
        floats = is_float(mask) and mask.op == "input"
        return is_integer(mask) or (floats and (self._is_of_keys(mask) or self._assumption(mask).endswith(ONES)))

    def may_be_lowered(self, mask: Value) -> bool:
        """Return True if the assumed `mask` may hide every key of a query, by finite numbers or by -inf."""
        return self._assumption(mask).endswith(LOWERED) and not self._is_of_keys(mask)

    def shows_some(self, mask: Value) -> bool:
        """Return True if `mask` is assumed to be a padding mask [B, T] with a visible key in each sequence."""
        return self._is_of_keys(mask) and not self._assumption(mask).endswith(LOWERED)

    def _assumption(self, mask: Value) -> str:
        return self.kinds.get(mask.attrs[0], "") if mask.op == "input" and mask.attrs[1] == 0 else ""

    def _kind(self, mask: Value) -> str | None:
        return plain(self._assumption(mask)) or None

    def _is_of_keys(self, mask: Value) -> bool:
        """Return True if `mask` is a padding mask [B, T]."""
        return mask.rank == 2 and self._kind(mask) == "padding"

    def _last(self, mask: Value, at: Sequence[Affine]) -> Affine | None:
        """Return the last key that query 0 sees under the assumed `mask`: 0 where S = T, else the counted keys - 1.

        `at` are the positions of the mask, of which the sequence selects its count. None if the keys cannot be counted.
        """
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
        """Count the keys that the first query sees, as int64 [B | 1], or [] for a mask without B.

        None if the mask may have no row.
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
    """Return the first position of the `rows` consecutive rows that `write` writes in each sequence, and their dim.

    The position is None if the rows are not consecutive, or if their number is not `rows`.
    """
    _, source, index, *inner = write.args
    axis = 1 if inner else write.attrs[0]
    if write.op == "write":
        return index if source.shape[axis] == rows else None, axis
    places = inner[0] if inner else index
    while places.op == "wrap" or (places.op in ("reshape", "expand") and places.shape[-1:] != (rows,)):
        places = places.arg
    consecutive = run(a, places) if places.shape[-1:] == (rows,) else None
    return None if consecutive is None or consecutive.start is None else a.shift(
        consecutive.start, consecutive.offset
    ), axis


def _shown(a: Algebra, mask: Value, is_ones: bool) -> Value:
    """Return `mask` as booleans, true where a key is visible; floats are additive unless `is_ones`."""
    if is_ones or not is_float(mask):
        return a.cast(mask, torch.bool)
    return a.make("not", (hidden(a, mask),), (), mask.shape, torch.bool)
