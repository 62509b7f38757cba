"""Lists of keys that a model uses itself, of a lightning indexer: returned, or to gather rows by.

Where a query sees fewer keys than are listed, `topk` gives places of hidden keys, in any order, and the operator -1. So
the two are the same where every query surely sees as many, or where the model writes -1 over such places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fusion import reader
from fusion.analysis.affine import Affine, Formula, conjuncts, moved, number
from fusion.analysis.intervals import is_exact, uncast
from fusion.analysis.nodes import is_handed_out
from fusion.graph import Found, Graph, Miss, Reading, Value
from fusion.graph.dims import INDEX_DTYPES, but_ones
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import hides_below
from patterns.attention.masks.masks import Masks, Term
from patterns.sparse.attention.listed import shown
from patterns.sparse.indexer.read import Indexed, indexed
from patterns.sparse.indexer.read_scores import NOT_A_SUM
from patterns.sparse.indexer.score_tests import asks_for_hidden
from patterns.sparse.lists.entries import grows
from patterns.sparse.words import INDEXER_LIST

_FEW = (
    "a query may see fewer keys than are listed: topk lists hidden ones then, the operator -1, which the model does "
    "not write over their places"
)
_OTHERS = "-1 is not written over the places of keys that are hidden, and of these alone"


@reader(gives=(INDEXER_LIST,), needs=("listed_attention", "lightning_indexer"), refines=("listed_attention",))
def indexer_lists(graph: Graph) -> Iterator[Found]:
    """Give lists that nodes compute, and those by which rows are gathered; or why they are none of an indexer.

    Of a list that is read behind a mask, nothing more is said of the places that are listed without it.
    """
    assumed, a = Assumed.of(graph), graph.algebra
    read = {value.below("reshape", "expand", "cast") for value, _ in graph.readings.all("lightning_indexer")}
    for root, attention in graph.readings.all("listed_attention"):
        said = attention.captures
        places = shown(a, said["places"], said.get("hidden"))
        found = None if said["fully_masked_row"] == "mean" else listed(assumed, places)
        if isinstance(found, Reading) and "offset" not in found.captures:
            captures = {name: each for name, each in said.items() if name != "hidden"}
            captures |= {"places": places, "ends": "indexer"}
            yield places, found
            yield root, Reading("listed_attention", captures, attention.relies | found.relies)
        chosen = _places(places.below("reshape", "cast"))
        read |= {chosen[0]} if chosen is not None and isinstance(found, Reading) else set()
        if chosen is not None and indexed(assumed, chosen[0]) == NOT_A_SUM:
            yield chosen[0], Miss("indexer_topk", NOT_A_SUM)
    lists = [each for each in graph.places if each.dtype in INDEX_DTYPES]
    read |= {found[0] for each in lists if each.op == "where" and (found := _places(each))}

    def is_wanted(value: Value) -> bool:
        """True if a list is read as it is: by no mask or gather that is read, or by the caller."""
        return value not in read or any(map(is_handed_out, graph.places[value]))

    for value in lists:
        found = listed(assumed, value)
        if isinstance(found, Reading):
            yield value, found
        elif found is not None and (value.op == "where" or (value.op == "largest_index" and is_wanted(value))):
            yield value, Miss("indexer_topk", found)


def shows_one(assumed: Assumed, places: Value) -> frozenset[str] | None:
    """Name what it relies on that each query sees an entry of `places`, the list of an indexer; None if it may not."""
    found = listed(assumed, places)
    return found.relies if isinstance(found, Reading) and found.captures["every_row_nonempty"] else None


def listed(assumed: Assumed, value: Value) -> Reading | str | None:
    """`value` as what an indexer lists; why it is no such list; None if it is not like one."""
    written = value.below("reshape", "cast")
    chosen = _places(written)
    if chosen is None or uncast(value, "reshape") is not uncast(written):
        return None
    places, offset = chosen
    found = indexed(assumed, places)
    if isinstance(found, str):
        return None if found == NOT_A_SUM else found
    rows = (*found.captures["query"].shape[:2], places.shape[-1])
    if value.shape[-1:] != places.shape[-1:] or but_ones(value.shape) != but_ones(rows):
        return None
    if written.op == "where":
        same = _hides(assumed, written, places, found)
    else:
        same = _all_see(found.masks, found.seen, places.attrs[0])
    if not same:
        return _OTHERS if written.op == "where" else _FEW
    said = {**found.captures, "dtype": value.dtype, "entries": value.shape[-1]}
    return Reading("indexer_list", said | ({"offset": offset} if offset else {}), found.masks.positions.names())


def _places(written: Value) -> tuple[Value, int] | None:
    """The places that a list consists of, below what is written over some of them, and what is added to the others."""
    sides = written.args[1:] if written.op == "where" else (written,)
    others = [_unmoved(each) if written.op == "where" else (uncast(each, "reshape"), 0) for each in sides]
    found = next((each for each in others if each[0].op == "largest_index"), None)
    return found if found is not None and math.prod(found[0].shape) == math.prod(written.shape) else None


def _unmoved(x: Value) -> tuple[Value, int]:
    """Places before a number that is not negative is added to them, and that number."""
    x = uncast(x, "reshape")
    moved = x.op == "shift" and x.attrs[0] > 0 and is_exact(x)
    return (uncast(x.arg, "reshape"), int(x.attrs[0])) if moved else (x, 0)


def _all_see(masks: Masks, seen: Formula, count: Any) -> bool:
    """Whether every query sees so many keys, of which there are as many at least."""
    bounds = masks.limits(seen)
    if bounds.rest or bounds.low is not None:
        return False
    first = bounds.high
    if first is None:
        return True
    known = not first.terms and isinstance(first.constant, int) and isinstance(count, int)
    return known and first.constant + 1 >= count


def _hides(assumed: Assumed, written: Value, places: Value, found: Indexed) -> bool:
    """Whether -1 is written over the places of hidden keys, and of these alone."""
    a, (condition, yes, no) = assumed.algebra, written.args
    how, fill = ("drop", yes) if _unmoved(no)[0] is places else ("keep", no)
    number_of = fill.below("expand", "reshape", "cast")
    if (number_of.op, number_of.attrs) != ("full", (-1,)):
        return False
    if asks_for_hidden(condition, places, found.masks, how == "drop"):
        return True
    rows = (*(1,) * max(0, 2 - written.rank), *written.shape)
    own = assumed.masks(rows, (Term(how, a.reshape(a.expand(condition, written.shape), rows), fill=-math.inf),), _SIZES)
    listed = own.positions.affine(a.reshape(places, rows), own.positions.origin)
    there = own.visible()
    keys = found.masks.sizes[3]
    wanted = _for_places(found, own, listed)
    if wanted is not None and _rest(there, listed, keys) == _rest(wanted, listed, keys):
        return True
    entry = own.positions.axis(len(own.positions.shape) - 1)
    counted = _for_places(found, own, entry) if _are_counted(assumed, places, found) else None
    return counted is not None and set(conjuncts(there)) == set(conjuncts(counted))


def _are_counted(assumed: Assumed, places: Value, found: Indexed) -> bool:
    """Whether entry e of a list names a hidden key just where key e is hidden: best first, of keys up to a last one."""
    last, masks = len(found.masks.positions.shape) - 1, found.masks
    first_ones = all(grows(each, last) for each in conjuncts(found.seen))
    return first_ones and assumed.sorted_by_scores(places) and all(hides_below(masks.positions, t) for t in masks.terms)


_SIZES: Any = (1, 1, 1, 1)


def _rest(formula: Formula | str, listed: Affine, keys: Any) -> set[Formula]:
    """What a formula asks, but that places are those of keys, as all are."""
    always = (("le", listed.times(-1)), ("le", listed.plus(1 - keys)))
    return set(conjuncts(formula)) - set(always)


def _for_places(found: Indexed, own: Masks, listed: Affine) -> Formula | None:
    """Which keys can be seen, of a list at its own positions; None where the positions of both do not correspond."""
    seen, lists = found.masks.positions.shape, own.positions.shape
    rank, last = len(seen), len(lists)
    row = own.positions.axis(last - 2)
    axes: dict[int, Affine] = {place: number(0) for place in range(rank)} | {rank - 1: listed}
    if rank > 2 and seen[0] != 1:
        if seen[rank - 2] == 1 and lists[last - 2] == seen[0]:  # [B, K], of one query of each sequence
            return moved(found.seen, axes | {0: row})
        if last < 3 or lists[0] != seen[0]:
            return None
        axes[0] = own.positions.axis(0)
    return moved(found.seen, axes | {rank - 2: row}) if lists[last - 2] == seen[rank - 2] else None
