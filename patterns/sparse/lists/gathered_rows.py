"""Rows that are gathered by a list of places: x[r, :] = source[g(r), places[r], :].

    source[:, places]    source[arange(B)[:, None], places]    source.index_select(0, places)    source.gather(1, ..)

Pages that a block table gathers are a source too, and so is [Block, Size, D], with places block · Size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fusion.analysis.consecutive_positions import Run, run, wrapped
from fusion.graph import Algebra, Value
from fusion.graph.algebra import widens
from fusion.graph.proof_steps import must, proof, proven
from patterns.quant.read_unpacked_rows import latent, unpacked
from patterns.sparse.lists.flat_row_numbers import split


@dataclass(frozen=True)
class Gathered:
    """Rows of a source [G, T, D] at places [*R].

    In row-major order the first R / G places are of the first group, the next ones of the second. `counted_back` is
    True if a negative place counts from the end of the source; otherwise there is none.
    """

    source: Value
    places: Value
    counted_back: bool

    @property
    def groups(self) -> Any:
        """Number of groups of rows."""
        return self.source.shape[0]


@proof
def gathered(a: Algebra, x: Value) -> Gathered | None:
    """Read `x` [*R, D] as rows that are gathered from a source [G, T, D], below widening casts, slices of lanes and
    views.

    None if `x` is anything else; the lanes of a row are never mixed with those of another.
    """
    match x.op:
        case "cast" | "reshape" if (packed := latent(a, x)) is not None:
            below = proven(gathered(a, packed.rows))
            source = unpacked(a, packed, below.source, x.dtype)
            return Gathered(source, a.reshape(below.places, x.shape[:-1]), below.counted_back)
        case "bits":
            below = proven(gathered(a, x.arg))
            source = a.make("bits", (below.source,), (), (*below.source.shape[:-1], x.shape[-1]), x.dtype)
            return Gathered(source, below.places, below.counted_back)
        case "cast" | "reshape" | "permute" | "expand":
            return _viewed(a, x, proven(gathered(a, x.arg)))
        case "slice" if x.attrs[0] == x.rank - 1:
            below = proven(gathered(a, x.arg))
            return Gathered(proven(a.slice(below.source, 2, *x.attrs[1:])), below.places, below.counted_back)
        case "cat" if x.attrs == (x.rank - 1,):
            return _joined(a, [proven(gathered(a, each)) for each in x.args])
        case "take":
            return _taken(a, x)
        case "index":
            return _indexed(a, x)
        case _:
            return None


def _viewed(a: Algebra, x: Value, below: Gathered) -> Gathered:
    """Return `below`, the rows that the argument of `x` is gathered as, as rows for `x`: a widening cast or a view of
    rows.

    Unproven if `x` changes the lanes of a row, or the order of the groups.
    """
    if x.op == "cast":
        must(widens(x.arg.dtype, x.dtype))
        return below
    must(x.shape[-1] == x.arg.shape[-1])
    if x.op == "reshape":
        return Gathered(below.source, a.reshape(below.places, x.shape[:-1]), below.counted_back)
    must(below.groups == 1 or x.arg.shape[0] == below.groups == x.shape[0])
    if x.op == "expand":
        return Gathered(below.source, a.expand(below.places, x.shape[:-1]), below.counted_back)
    must(x.attrs[-1] == x.rank - 1 and (below.groups == 1 or x.attrs[0] == 0))
    return Gathered(below.source, a.permute(below.places, x.attrs[:-1]), below.counted_back)


def _joined(a: Algebra, parts: list[Gathered]) -> Gathered:
    """Concatenate along the lanes `parts`, gathered at the same places of several sources; unproven for other
    places.
    """
    first = parts[0]
    for each in parts[1:]:
        must((each.places, each.counted_back) == (first.places, first.counted_back))
        must(each.source.shape[:2] == first.source.shape[:2])
    return Gathered(a.cat([each.source for each in parts], 2), first.places, first.counted_back)


def _rows(a: Algebra, source: Value, lead: int) -> Value:
    """Reshape `source` [*groups, T, 1 .., D], of which the first `lead` dims are groups, to [G, T, D].

    Unproven if a dim between T and D has more than one entry, as a place would name several rows.
    """
    must(source.rank > lead + 1 and all(size == 1 for size in source.shape[lead + 1 : -1]))
    return a.reshape(source, (prod(source.shape[:lead]), source.shape[lead], source.shape[-1]))


def _taken(a: Algebra, x: Value) -> Gathered:
    """Read the "take" `x`: rows of each group of a source, at places of the group's own."""
    source, places = x.args
    lead = source.rank - (x.rank - places.rank) - 1
    return Gathered(_rows(a, source, lead), a.reshape(places, x.shape[:-1]), counted_back=False)


def _indexed(a: Algebra, x: Value) -> Gathered | None:
    """Read the "index" `x` as source[places], source[:, places] or source[index, places]; None for other indexed
    dims.
    """
    source, *index = x.args
    match x.attrs:
        case (0,):
            return _by_one(a, x, source, index[0])
        case (1,):
            batch = source.shape[:1]
            every = a.expand(a.reshape(index[0], (1, *index[0].shape)), (*batch, *index[0].shape))
            return Gathered(_rows(a, source, 1), a.reshape(every, x.shape[:-1]), counted_back=True)
        case (0, 1):
            return _by_two(a, x, source, *index)
        case _:
            return None


def _by_one(a: Algebra, x: Value, source: Value, index: Value) -> Gathered:
    """Read `x` = `source`[`index`] as rows of G groups if `index` is proven to be g · T + place, else as rows of one
    group.
    """
    flat, numbers = _rows(a, source, 0), split(a, index)
    if numbers is None or flat.shape[1] != numbers.groups * numbers.size:
        return Gathered(flat, a.reshape(index, x.shape[:-1]), counted_back=True)
    grouped = a.reshape(flat, (numbers.groups, numbers.size, flat.shape[-1]))
    return Gathered(grouped, a.reshape(numbers.places, x.shape[:-1]), counted_back=False)


def _by_two(a: Algebra, x: Value, source: Value, first: Value, second: Value) -> Gathered:
    """Read `x` = `source`[`first`, `second`] of a `source` [G, T, .., D] as gathered rows.

    If G is 1, or `first` is arange(G) as a column, `second` are places in each group; else `first` are pages and
    `second` rows in them, which together are places in the one group of G · T rows.
    """
    dims = x.shape[: x.rank - source.rank + 2]
    groups, size = source.shape[:2]
    if groups == 1 or counts(a, first, groups, len(dims)):
        return Gathered(_rows(a, source, 1), a.reshape(a.expand(second, dims), x.shape[:-1]), counted_back=True)
    must(isinstance(groups, int) and isinstance(size, int))
    page, offset = (a.cast(wrapped(a, each, many), torch.int64) for each, many in ((first, groups), (second, size)))
    places = a.expand(proven(a.add(a.scale(page, int(size)), offset)), dims)
    flat = a.reshape(source, (groups * size, *source.shape[2:]))
    return Gathered(_rows(a, flat, 0), a.reshape(places, x.shape[:-1]), counted_back=False)


def counts(a: Algebra, index: Value, groups: Any, rank: int) -> bool:
    """Return True if `index` is arange(`groups`) reshaped to (`groups`, 1, ..), of `rank` dims."""
    is_column = index.rank == rank and index.shape == (groups, *[1] * (rank - 1))
    return is_column and run(a, a.reshape(index, (groups,))) == Run(None, 0)


def distinct(places: Value) -> bool:
    """Return True if no list of `places` [.., K] names a place twice: it is the result of a top-k, viewed list by
    list.
    """
    while places.op in ("cast", "reshape", "permute", "expand", "slice"):
        is_row = places.op == "slice" or places.shape[-1:] == places.arg.shape[-1:]
        moved = places.op == "permute" and places.attrs[-1] != places.rank - 1
        if not is_row or moved or places.dtype not in (torch.int32, torch.int64):
            return False
        places = places.arg
    return places.op == "largest_index"
