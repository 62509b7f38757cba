"""Readings of writes: values that are a cache in which some rows are replaced.

A slot is the index of a row among the rows of all pages; a reading has no slots where a place is not proven to be
inside of its page. Ops that write otherwise into an input are reported with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusion import reader, word
from fusion.analysis.affine import Affine, Formula, Leaf, negation
from fusion.analysis.consecutive_positions import wrapped
from fusion.analysis.constant_folding import Folder
from fusion.analysis.intervals import bounds
from fusion.analysis.mask_formulas import Positions
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value, broadcast, but_ones, unviewed
from patterns.cache.sequence_writes import chain_of, joined, single_write

_ELEMENT_WRITES = (
    "aten.index_copy.default", "aten.index_put.default", "aten._unsafe_index_put.default", "aten.slice_scatter.default",
    "aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.index_add.default",
    "aten.masked_scatter.default",
)  # fmt: skip
"""Ops that change some elements of their first argument and have no canonical form."""

_PUT = ("aten.index_put.default", "aten._unsafe_index_put.default", "add_rows")
"""Ops that remain after canonicalisation if they index by a boolean mask, or accumulate."""

WRITES = ("write", "write_rows", "write_lines", "write_within")
"""Canonical writes of rows; the first argument of each is the cache."""

_VIEWS = ("slice", "reshape", "permute", "expand")

Outcome = Reading | str | None

_STEP = "positions: every {step}th is written; scatter_update requires consecutive ones; write a run of positions"
_MULTIPLIED = (
    "cache: what is replaced is multiplied by 0, which keeps infinities and NaN; a write requires a choice; "
    "write torch.where(mask, row, cache)"
)
_ADDED = (
    "rows: they are added to the cache, or chosen by a boolean mask; scatter_update requires that rows replace "
    "those at given positions; write cache.index_copy(dim, positions, rows)"
)
_NO_FORM = (
    "positions: they are not proven to be distinct along one dim, or slots of pages; npu_scatter_nd_update "
    "requires one index for each row; write index_copy, or cache[slot // Size, slot % Size] = rows"
)
_ITS_OWN = (
    "rows: they are read from the cache that they are written to; an operator in place requires rows from "
    "elsewhere; clone them first"
)
_SEVERAL = (
    "mask of the write: it is {why}; scatter_update requires torch.arange(T) == position, one position for "
    "every sequence; write that comparison, or index_copy"
)

_WRITE = {"cache": "before the write", "rows": "the new rows", "axis": "the dim of positions"}
_PLACE = {
    "start": "the first of consecutive positions, [] or [B] for each sequence",
    "number": "a constant first position",
    "index": "the positions [S]",
}

WRITE = word(
    "write",
    "cache[.., positions, ..] = rows along `axis`, positions given by one of start, number, index, position",
    **_WRITE, **_PLACE, inner="[S]: with `index`, positions along the dim after `axis`",
    position="[] or [B]: the position of one row; outside of the cache nothing is written",
)  # fmt: skip
WRITE_PAGES = word(
    "write_pages",
    "cache[slot // Size, slot % Size] = row",
    cache="[Block, Size, ..], or in NZ [Block, .., A, Size, L] where a row is A lines", rows="the new rows",
    slots="[Rows], absent where a place is not proven to be inside of its page",
    nz_block="L, None for pages in rows",
)  # fmt: skip
WRITE_SEQUENCES = word(
    "write_sequences",
    "cache[sequence + b, .., positions, ..] = rows[b] along `axis`, positions given by one of start, number, index",
    **_WRITE, sequence="the first sequence that is written", **_PLACE,
)  # fmt: skip
SLIDE = word("slide", "cat(cache[.., S:, ..], rows) along `axis`, of S rows", **_WRITE)


@reader(gives=(WRITE, WRITE_PAGES, WRITE_SEQUENCES, SLIDE))
def cache_writes(graph: Graph) -> Iterator[Annotation]:
    """Read every write into a cache; report why other writes into an input are not read."""
    writes = Writes(graph.algebra, graph.shared(Folder), graph.written, graph.places)
    return ((value, each) for value in list(graph.places) for each in writes.read(value))


class Writes:
    """A reader of the writes of one graph, whose values are read in order: a cache may be written more than once.

    Args:
        a: the values of the graph.
        folder: the constants among them.
        written: the inputs that the graph changes.
        places: the nodes of each value.
    """

    def __init__(
        self, a: Algebra, folder: Folder, written: Collection[Value], places: Mapping[Value, Sequence[fx.Node]]
    ) -> None:
        self._algebra, self._folder, self._caches, self._places = a, folder, set(written), places
        self._on_device: dict[torch.device, Value] = {}  # the first cache, on whose device positions are built

    def read(self, value: Value) -> Iterator[Reading | Miss]:
        """Yield the readings of `value` as a write, or the reason why it is none; call it in the order of the graph."""
        for outcome in self._outcomes(value):
            if isinstance(outcome, Reading) and outcome.over is not None:
                self._caches.add(value)
                outcome = _ITS_OWN if _reads_what_it_writes(outcome) else outcome
            if outcome is not None:
                yield Miss("cache_write", outcome) if isinstance(outcome, str) else outcome

    def _outcomes(self, value: Value) -> Sequence[Outcome]:
        readers = {"slice_scatter": self._slice, "cat": _slide, "where": self._chosen, "add": self._blended}
        written = (*self._sequences_in(value), *self._written(value))
        if value.op == "reshape" and self._is_back(value):
            alone = () if value.arg in self._places else self._written(value.arg)
            return (*written, *self._pages(value), *alone)
        if written or value.op in readers:
            return written or (readers[value.op](value),)
        added = (_ADDED,) if value.op in _PUT and unviewed(value.arg).op == "input" else ()
        return (*added, *((_NO_FORM,) if value.op in _ELEMENT_WRITES and self._is_cache(value.arg) else ()))

    def _written(self, value: Value) -> Sequence[Outcome]:
        """Return the readings of a canonical write op; () for other ops."""
        match value.op:
            case "write":
                cache, rows, start = value.args
                return (_write(cache, rows, value.attrs[0], start=start),)
            case "write_rows":
                return self._rows(*value.args, axis=value.attrs[0])
            case "write_lines":
                return (self._lines(value),)
            case "write_within":
                (cache, rows, *index), (axis, first, where, *number) = value.args, value.attrs
                how = {"cache": cache, "rows": rows, "axis": axis, "sequence": first, where: (*index, *number)[0]}
                return (Reading("write_sequences", how, over=cache),)
            case _:
                return ()

    def _sequences_in(self, value: Value) -> Sequence[Outcome]:
        """Return the readings of a chain of writes into the sequences of a cache that the graph changes."""
        chain = value.below("reshape")
        if chain.op != "write_within" or (value.op == "reshape" and chain in self._places):
            return ()
        device = self._places[value][0].meta["val"].device
        like = self._on_device.setdefault(device, chain_of(chain)[0])
        return joined(self._algebra, value, like) or single_write(self._algebra, value, like) or ()

    def _is_back(self, value: Value) -> bool:
        """Return True if `value` reshapes a written cache to the shape that the cache had before it was reshaped for
        the write.
        """
        viewed = value.arg.below(*WRITES)
        return viewed.op == "reshape" and viewed.arg.shape == value.shape

    def _is_cache(self, value: Value) -> bool:
        """Return True if `value` views all of an input that the graph changes, or of a write into one."""
        return unviewed(value) in self._caches

    def _rows(self, cache: Value, rows: Value, index: Value, *inner: Value, axis: int) -> Sequence[Reading]:
        """Read a write of `rows` into `cache` at positions `index` along `axis`.

        With positions `inner` along the next dim, also read it as a write of rows at slots of pages.
        """
        if not inner:
            return (_write(cache, rows, axis, index=index),)
        slots = page_slots(self._algebra, cache.shape[:2], index, *inner)
        return _write(cache, rows, axis, index=index, inner=inner[0]), _to_pages(cache, rows, slots)

    def _lines(self, value: Value) -> Outcome:
        """Read rows of pages in NZ [Block, .., A, Size, L], each of which has A lines."""
        cache, rows, block, place = value.args
        slots = page_slots(self._algebra, (cache.shape[0], cache.shape[-2]), block, place)
        if slots is None:
            return _NO_FORM if self._is_cache(cache) else None
        return _to_pages(cache, rows, slots, cache.shape[-1])

    def _slice(self, value: Value) -> Outcome:
        cache, rows = value.args
        axis, start, _, step = value.attrs
        if axis in (0, value.rank - 1) and not self._is_cache(cache):
            return None  # an intermediate buffer, not a cache
        if step != 1:
            return _STEP.format(step=step) if self._is_cache(cache) else None
        return _write(cache, rows, axis, number=start)

    def _pages(self, value: Value) -> Sequence[Reading]:
        """Read cache.view(-1, N, D)[slots] = rows, viewed as [.., Block, Size, N, D] again.

        Dims of size 1 may be added and removed.
        """
        flat = value.arg
        if flat.attrs != (0,):  # a write of lines, or along another axis
            return ()
        cache, rows, index, *inner = flat.args
        if inner:
            is_same_shape = cache.shape[:2] == value.shape[:2] and but_ones(cache.shape) == but_ones(value.shape)
            slots = page_slots(self._algebra, cache.shape[:2], index, *inner)
            return (_to_pages(self._algebra.reshape(cache, value.shape), rows, slots),) if is_same_shape else ()
        row = next(
            (axis for axis in range(2, value.rank) if but_ones(cache.shape[1:]) == but_ones(value.shape[axis:])), None
        )
        if row is None or (flat.op == "write" and rows.shape[0] != 1):
            return ()
        pages = self._algebra.reshape(cache, (math.prod(value.shape[: row - 1]), *value.shape[row - 1 :]))
        return (_to_pages(pages, rows, self._algebra.reshape(index, rows.shape[:1])),)

    def _chosen(self, value: Value) -> Outcome:
        """Read where(positions == position, rows, cache), or where(positions != position, cache, rows)."""
        condition, *sides = value.args
        cache = next((each for each in reversed(sides) if self._is_cache(each) and each.shape == value.shape), None)
        if cache is None:
            return None
        condition = _truth(self._algebra, condition) or condition
        places = Positions(value.shape, self._folder)
        formula = places.truth(condition, places.of(condition))
        rows, formula = (sides[0], formula) if cache is sides[1] else (sides[1], negation(formula))
        place = self._position(value, formula)
        if isinstance(place, str):
            return _SEVERAL.format(why=place)
        position, axis = place
        size = value.shape[axis]
        rows = rows.arg if rows.op == "expand" else rows
        one = (*value.shape[:axis], 1, *value.shape[axis + 1 :])
        if broadcast(rows.shape, one) != one:
            return _SEVERAL.format(why="of rows for every position")
        rows = self._algebra.expand(rows, one)
        if isinstance(position, int):
            inside = position >= 0 and isinstance(size, int) and position < size
            return _write(cache, rows, axis, number=position) if inside else None
        low, high = bounds(position)
        inside = low >= 0 and isinstance(size, int) and high < size
        return _write(cache, rows, axis, **{"start" if inside else "position": position})

    def _position(self, value: Value, formula: Formula) -> tuple[Value | int, int] | str:
        """Read `formula` as "the position along an axis equals a number": return the number, of a value or constant,
        and the axis.

        Return as text what else `formula` is. `value` is the mask, whose batch the number may depend on.
        """
        if isinstance(formula, bool) or formula[0] != "eq":
            return "not an equality of positions"
        terms = formula[1].terms
        axes = [each for each in terms if isinstance(each, int)]
        leaves = [each for each in terms if isinstance(each, Leaf)]
        if len(axes) != 1 or abs(terms[axes[0]]) != 1:
            return "not an equality of positions along one axis"
        (axis,) = axes
        if not leaves:
            return int(-formula[1].constant * terms[axis]), axis
        leaf = leaves[0]
        if len(leaves) != 1 or terms[axis] != -terms[leaf]:
            return "not the difference of a position and one number"
        position = self._as_batch(leaf, value)
        if position is None or (axis == 0 and position.rank):
            return "a position that differs along more than the batch"
        offset = formula[1].constant * terms[axis]
        return self._algebra.shift(self._algebra.cast(position, torch.int64), -offset), axis

    def _as_batch(self, leaf: Leaf, value: Value) -> Value | None:
        """Return the tensor of `leaf` as [] or, if it varies along the batch of `value` alone, as [B]; else None."""
        batch = Affine({0: 1})
        count = math.prod(leaf.value.shape)
        if count == 1:
            return self._algebra.reshape(leaf.value, ())
        varying = [each for each in leaf.index if each.terms]
        return self._algebra.reshape(leaf.value, (count,)) if count == value.shape[0] and varying == [batch] else None

    def _blended(self, value: Value) -> str | None:
        """Return the reason if `value` is cache · (1 - onehot) + rows · onehot; None for others."""
        factors = [each for product in value.args if product.op == "mul" for each in product.args]
        if len(factors) != 4 or not any(self._is_cache(each) and each.shape == value.shape for each in factors):
            return None
        masks = sum(_is_mask(self._algebra, each) for each in factors)
        return _MULTIPLIED if masks == 2 else None


def _truth(a: Algebra, x: Value) -> Value | None:
    """Return the booleans below the casts of `x`, with its views and negations applied; None if there are none."""
    if x.op not in ("cast", "reshape", "expand", "not"):
        return x if x.dtype is torch.bool else None
    below = _truth(a, x.arg)
    if below is None or x.op == "cast":
        return below
    return a.make("not", (below,), (), x.shape, torch.bool) if x.op == "not" else a.seen_as(below, x)


def _is_mask(a: Algebra, x: Value) -> bool:
    """Return True if `x` is a boolean mask cast to numbers, or a linear function of one such as 1 - mask."""
    return _truth(a, x.below("shift", "scale")) is not None


def _write(cache: Value, rows: Value, axis: int, **place: Any) -> Reading:
    return Reading("write", {"cache": cache, "rows": rows, "axis": axis, **place}, over=cache)


def _reads_what_it_writes(write: Reading) -> bool:
    """Return True if the rows of `write` are a view of its cache."""
    base, source = (write.captures[name].below(*_VIEWS) for name in ("cache", "rows"))
    return source is base


def _to_pages(cache: Value, rows: Value, slots: Value | None, nz_block: Any = None) -> Reading:
    known = {} if slots is None else {"slots": slots}
    return Reading("write_pages", {"cache": cache, "rows": rows, **known, "nz_block": nz_block}, over=cache)


def page_slots(a: Algebra, sizes: Sequence[Any], block: Value, place: Value) -> Value | None:
    """Return the slots `block` · Size + `place` [T] if every place is proven to be inside of its page, else None.

    For block = slot // Size and place = slot % Size the result is slot. `sizes` are the number of blocks and Size.
    """
    blocks, size = sizes
    if not isinstance(size, int) or not 0 <= bounds(place)[0] <= bounds(place)[1] < size:
        return None
    source = (block.arg if block.op == "wrap" else block).below("reshape")
    rest = place.below("reshape")
    is_split = (source.op, rest.op) == ("floor_divide", "remainder") and source.attrs == rest.attrs == (size,)
    if is_split and source.arg is rest.arg:
        return wrapped(a, a.reshape(source.arg, block.shape), blocks * size)
    is_safe = block.dtype == place.dtype and isinstance(blocks, int) and blocks * size <= 2**31
    block, place = (each if is_safe else a.cast(each, torch.int64) for each in (block, place))
    return a.add(a.scale(block, size), place)


def _slide(value: Value) -> Reading | None:
    """Read `value` as the last T - S positions of a cache of T positions, then S new rows."""
    if len(value.args) != 2 or value.args[0].op != "slice":
        return None
    (retained, rows), axis = value.args, value.attrs[0]
    cache, size = retained.arg, value.shape[axis]
    slid = retained.attrs == (axis, rows.shape[axis], size, 1) and cache.shape == value.shape
    return Reading("slide", {"cache": cache, "rows": rows, "axis": axis}) if slid and axis < value.rank - 1 else None
