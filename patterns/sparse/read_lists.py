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
from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from fusion.graph.dims import INDEX_DTYPES, but_ones
from fusion.graph.logic import constant, where
from patterns.attention.assumed import Assumed
from patterns.attention.masks import Empty, Masks, Term, unseen
from patterns.sparse.read import Indexed, indexed
from patterns.sparse.read_scores import NOT_A_SUM
from patterns.sparse.words import INDEXER_LIST

_FEW = (
    "a query may see fewer keys than are listed: topk lists hidden ones then, the operator -1, which the model does "
    "not write over their places"
)
_OTHERS = "-1 is not written over the places of keys that are hidden, and of these alone"


@reader(gives=(INDEXER_LIST,), needs=("listed_attention", "topk_mask"), refines=("listed_attention",))
def indexer_lists(graph: Graph) -> Iterator[Found]:
    """Lists that nodes compute, and those by which rows are gathered; why they are none of an indexer."""
    assumed, a = Assumed.of(graph), graph.algebra
    for root, attention in graph.readings.all("listed_attention"):
        said = attention.captures
        places = _shown(a, said["places"], said.get("hidden"))
        found = None if places is None or said["fully_masked_row"] == "mean" else listed(assumed, places)
        if places is not None and isinstance(found, Reading):
            captures = {name: each for name, each in said.items() if name != "hidden"}
            captures |= {"places": places, "ends": "indexer"}
            yield places, found
            yield root, Reading("listed_attention", captures, attention.relies | found.relies)
    lists = [each for each in graph.places if each.dtype in INDEX_DTYPES]
    written = {_places(each) for each in lists if each.op == "where"}
    for value in lists:
        found = listed(assumed, value)
        if isinstance(found, Reading):
            yield value, found
        elif found is not None and (value.op == "where" or (value.op == "largest_index" and value not in written)):
            yield value, Miss("indexer_topk", found)


def _shown(a: Algebra, places: Value, hidden: Value | None) -> Value | None:
    """A list with -1 where an entry is hidden."""
    return places if hidden is None else where(a, hidden, constant(a, -1, (), places.dtype), places, places.dtype)


def listed(assumed: Assumed, value: Value) -> Reading | str | None:
    """`value` as what an indexer lists; why it is no such list; None if it is not like one."""
    written = value.below("reshape", "cast")
    places = _places(written)
    if places is None or uncast(value, "reshape") is not uncast(written):
        return None
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
    return Reading(
        "indexer_list",
        {**found.captures, "dtype": value.dtype, "entries": value.shape[-1]},
        found.masks.positions.names(),
    )


def _places(written: Value) -> Value | None:
    """The places that a list consists of, below what is written over some of them."""
    sides = written.args[1:] if written.op == "where" else (written,)
    others = [uncast(each, "reshape") for each in sides]
    found = next((each for each in others if each.op == "largest_index"), None)
    return found if found is not None and math.prod(found.shape) == math.prod(written.shape) else None


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
    how, fill = ("drop", yes) if uncast(no, "reshape") is places else ("keep", no)
    number_of = fill.below("expand", "reshape", "cast")
    if (number_of.op, number_of.attrs) != ("full", (-1,)):
        return False
    if _is_lowest(condition, places, found.masks, how):
        return True
    rows = (*(1,) * max(0, 2 - written.rank), *written.shape)
    own = assumed.masks(rows, (Term(how, a.reshape(a.expand(condition, written.shape), rows), fill=-math.inf),), _SIZES)
    listed = own.positions.affine(a.reshape(places, rows), own.positions.origin)
    there = own.visible()
    wanted = _for_places(found, own, listed)
    keys = found.masks.sizes[3]
    return wanted is not None and _rest(there, listed, keys) == _rest(wanted, listed, keys)


_SIZES: Any = (1, 1, 1, 1)


def _rest(formula: Formula | str, listed: Affine, keys: Any) -> set[Formula]:
    """What a formula asks, but that places are those of keys, as all are."""
    always = (("le", listed.times(-1)), ("le", listed.plus(1 - keys)))
    return set(conjuncts(formula)) - set(always)


def _for_places(found: Indexed, own: Masks, listed: Affine) -> Formula | None:
    """Which keys can be seen, of a list at its own positions; None where the positions of both do not correspond."""
    rank, last = len(found.masks.positions.shape), len(own.positions.shape)
    axes: dict[int, Affine] = {place: number(0) for place in range(rank)}
    axes |= {rank - 1: listed, rank - 2: own.positions.axis(last - 2)}
    if rank > 2 and found.masks.positions.shape[0] != 1:
        if last < 3 or own.positions.shape[0] != found.masks.positions.shape[0]:
            return None
        axes[0] = own.positions.axis(0)
    same = own.positions.shape[last - 2] == found.masks.positions.shape[rank - 2]
    return moved(found.seen, axes) if same else None


def _is_lowest(condition: Value, places: Value, masks: Masks, how: str) -> bool:
    """Whether a condition asks for the scores of places that are -inf, which scores of hidden keys are."""
    if unseen(masks.positions, masks.terms, Empty("only infinite", None)) != "only infinite":
        return False
    below = condition.below("reshape", "expand")
    if below.op == "not":
        below, how = below.arg.below("reshape", "expand"), "keep" if how == "drop" else "drop"
    if below.op != "compare":
        return False
    (op,), sides = below.attrs, [each.below("reshape", "cast") for each in below.args]
    bound = [each.op == "full" and each.attrs == (-math.inf,) for each in sides]
    scores = [_are_scores(each, places) for each in sides]
    equal = (op == "eq" and how == "drop") or (op == "ne" and how == "keep")
    above = op == "lt" and how == "keep"
    below_or_equal = op == "le" and how == "drop"
    if above:
        return bound[0] and scores[1]
    if below_or_equal:
        return scores[0] and bound[1]
    return equal and ((bound[0] and scores[1]) or (scores[0] and bound[1]))


def _are_scores(x: Value, places: Value) -> bool:
    """Whether these are the scores of places, as `topk` gives them."""
    return x.op == "largest" and x.args == places.args and x.attrs == places.attrs
