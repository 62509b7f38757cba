"""Lists of a lightning indexer that a model itself uses: returned, or to gather rows by.

Where a query sees fewer keys than are listed, `topk` lists hidden keys, in any order, and the operator writes -1. The
two agree only if every query is proven to see as many keys, or if the model writes -1 over the places of hidden keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fusion import reader
from fusion.analysis.affine import Affine, Formula, conjuncts, moved, number
from fusion.analysis.intervals import is_exact, uncast
from fusion.analysis.node_predicates import is_handed_out
from fusion.graph import Annotation, Graph, Miss, Reading, Value
from fusion.graph.dims import INDEX_DTYPES, but_ones
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import hides_below
from patterns.attention.masks.masks import Masks, Term
from patterns.sparse.attention.gathered_attention import shown
from patterns.sparse.indexer.read import Indexed, indexed
from patterns.sparse.indexer.read_scores import NOT_A_SUM
from patterns.sparse.indexer.score_tests import asks_for_hidden
from patterns.sparse.lists.list_entries import grows
from patterns.sparse.words import INDEXER_LIST

_FEW = (
    "list of keys: a query may see fewer keys than topk lists, so that hidden ones are listed; "
    "npu_lightning_indexer writes -1 there and requires that of the model; write "
    "torch.where(hidden.gather(-1, places), -1, places)"
)
_OTHERS = (
    "list of keys: -1 is written over other entries than those of hidden keys; npu_lightning_indexer requires "
    "it over these alone; write torch.where(hidden.gather(-1, places), -1, places)"
)


@reader(gives=(INDEXER_LIST,), needs=("listed_attention", "lightning_indexer"), refines=("listed_attention",))
def indexer_lists(graph: Graph) -> Iterator[Annotation]:
    """Yield an `indexer_list` reading for every list of an indexer that the model uses, or a `Miss` with the reason.

    Such a list is a value of the graph, or the `places` of a `listed_attention`, which is read anew by that list. A
    list that only a `topk_mask` reads gives no `Miss`.
    """
    assumed, a = Assumed.of(graph), graph.algebra
    read = {value.below("reshape", "expand", "cast") for value, _ in graph.readings.all("lightning_indexer")}
    for root, attention in graph.readings.all("listed_attention"):
        captures = attention.captures
        places = shown(a, captures["places"], captures.get("hidden"))
        result = None if captures["fully_masked_row"] == "mean" else listed(assumed, places)
        if isinstance(result, Reading) and "offset" not in result.captures:
            rewritten = {name: each for name, each in captures.items() if name != "hidden"}
            rewritten |= {"places": places, "ends": "indexer"}
            yield places, result
            yield root, Reading("listed_attention", rewritten, attention.relies | result.relies)
        chosen = _places(places.below("reshape", "cast"))
        read |= {chosen[0]} if chosen is not None and isinstance(result, Reading) else set()
        if chosen is not None and indexed(assumed, chosen[0]) == NOT_A_SUM:
            yield chosen[0], Miss("indexer_topk", NOT_A_SUM)
    lists = [each for each in graph.places if each.dtype in INDEX_DTYPES]
    read |= {result[0] for each in lists if each.op == "where" and (result := _places(each))}

    def is_wanted(value: Value) -> bool:
        """Return True if `value` is a result of the graph, or is a list of which no other reading takes account."""
        return value not in read or any(map(is_handed_out, graph.places[value]))

    for value in lists:
        result = listed(assumed, value)
        if isinstance(result, Reading):
            yield value, result
        elif result is not None and (value.op == "where" or (value.op == "largest_index" and is_wanted(value))):
            yield value, Miss("indexer_topk", result)


def shows_one(assumed: Assumed, places: Value) -> frozenset[str] | None:
    """Return the inputs on whose assumed masks it relies that each query sees an entry of `places`, a list of an
    indexer.

    None if `places` is no such list, or if it is not proven for every query.
    """
    result = listed(assumed, places)
    return result.relies if isinstance(result, Reading) and result.captures["every_row_nonempty"] else None


def listed(assumed: Assumed, value: Value) -> Reading | str | None:
    """Read `value` [.., K] as the list of an indexer: an `indexer_list` reading, or the reason if it is not quite one.

    None if `value` is not made from the indices of a top-k over scores of an indexer.
    """
    written = value.below("reshape", "cast")
    chosen = _places(written)
    if chosen is None or uncast(value, "reshape") is not uncast(written):
        return None
    places, offset = chosen
    indexer = indexed(assumed, places)
    if isinstance(indexer, str):
        return None if indexer == NOT_A_SUM else indexer
    rows = (*indexer.captures["query"].shape[:2], places.shape[-1])
    if value.shape[-1:] != places.shape[-1:] or but_ones(value.shape) != but_ones(rows):
        return None
    if written.op == "where":
        same = _hides(assumed, written, places, indexer)
    else:
        same = _all_see(indexer.masks, indexer.seen, places.attrs[0])
    if not same:
        return _OTHERS if written.op == "where" else _FEW
    captures = {**indexer.captures, "dtype": value.dtype, "entries": value.shape[-1]}
    return Reading("indexer_list", captures | ({"offset": offset} if offset else {}), indexer.masks.positions.names())


def _places(written: Value) -> tuple[Value, int] | None:
    """Return the `topk` indices of which `written` is made, and the number that is added to them, 0 without one.

    `written` is the indices themselves, or where(condition, indices + number, fill) in either order; None if it is
    neither.
    """
    sides = written.args[1:] if written.op == "where" else (written,)
    others = [_unmoved(each) if written.op == "where" else (uncast(each, "reshape"), 0) for each in sides]
    chosen = next((each for each in others if each[0].op == "largest_index"), None)
    return chosen if chosen is not None and math.prod(chosen[0].shape) == math.prod(written.shape) else None


def _unmoved(x: Value) -> tuple[Value, int]:
    """Split integers `x` = y + n with a constant n > 0 into y and n; `x`, without exact casts and reshapes, and 0
    otherwise.
    """
    x = uncast(x, "reshape")
    moved = x.op == "shift" and x.attrs[0] > 0 and is_exact(x)
    return (uncast(x.arg, "reshape"), int(x.attrs[0])) if moved else (x, 0)


def _all_see(masks: Masks, seen: Formula, count: Any) -> bool:
    """Return True if `seen`, the formula of visible keys, is proven to show at least `count` keys to every query.

    It must be always true, or an upper bound on the key alone. `masks` are those of the scores.
    """
    bounds = masks.limits(seen)
    if bounds.rest or bounds.low is not None:
        return False
    first = bounds.high
    if first is None:
        return True
    known = not first.terms and isinstance(first.constant, int) and isinstance(count, int)
    return known and first.constant + 1 >= count


def _hides(assumed: Assumed, written: Value, places: Value, indexer: Indexed) -> bool:
    """Return True if `written`, a "where" of the list `places` and another value, is -1 where the listed key is hidden
    by the masks of `indexer`, and the place of the key elsewhere.
    """
    a, (condition, yes, no) = assumed.algebra, written.args
    how, fill = ("drop", yes) if _unmoved(no)[0] is places else ("keep", no)
    number_of = fill.below("expand", "reshape", "cast")
    if (number_of.op, number_of.attrs) != ("full", (-1,)):
        return False
    if asks_for_hidden(condition, places, indexer.masks, how == "drop"):
        return True
    rows = (*(1,) * max(0, 2 - written.rank), *written.shape)
    own = assumed.masks(rows, (Term(how, a.reshape(a.expand(condition, written.shape), rows), fill=-math.inf),), _SIZES)
    listed = own.positions.affine(a.reshape(places, rows), own.positions.origin)
    there = own.visible()
    keys = indexer.masks.sizes[3]
    wanted = _for_places(indexer, own, listed)
    if wanted is not None and _rest(there, listed, keys) == _rest(wanted, listed, keys):
        return True
    entry = own.positions.axis(len(own.positions.shape) - 1)
    counted = _for_places(indexer, own, entry) if _are_counted(assumed, places, indexer) else None
    return counted is not None and set(conjuncts(there)) == set(conjuncts(counted))


def _are_counted(assumed: Assumed, places: Value, indexer: Indexed) -> bool:
    """Return True if, for every e, entry e of the list `places` names a hidden key exactly where key e is hidden.

    That is so if the masks of `indexer` show each query the first n keys, and the list has the largest scores first:
    both then begin with the n visible keys.
    """
    last, masks = len(indexer.masks.positions.shape) - 1, indexer.masks
    first_ones = all(grows(each, last) for each in conjuncts(indexer.seen))
    return first_ones and assumed.sorted_by_scores(places) and all(hides_below(masks.positions, t) for t in masks.terms)


_SIZES: Any = (1, 1, 1, 1)


def _rest(formula: Formula | str, listed: Affine, keys: Any) -> set[Formula]:
    """Return the conditions of `formula` without those that `listed`, a key in a list, is in 0 .. `keys` - 1.

    A listed key always is.
    """
    always = (("le", listed.times(-1)), ("le", listed.plus(1 - keys)))
    return set(conjuncts(formula)) - set(always)


def _for_places(indexer: Indexed, own: Masks, listed: Affine) -> Formula | None:
    """Rewrite `indexer.seen`, over the dims (.., query, key) of the scores, over the dims (.., query, entry) of a list.

    `listed` takes the place of the key, `own` has the dims of the list. None if these dims do not correspond.
    """
    seen, lists = indexer.masks.positions.shape, own.positions.shape
    rank, last = len(seen), len(lists)
    row = own.positions.axis(last - 2)
    axes: dict[int, Affine] = {place: number(0) for place in range(rank)} | {rank - 1: listed}
    if rank > 2 and seen[0] != 1:
        if seen[rank - 2] == 1 and lists[last - 2] == seen[0]:  # [B, K], of one query of each sequence
            return moved(indexer.seen, axes | {0: row})
        if last < 3 or lists[0] != seen[0]:
            return None
        axes[0] = own.positions.axis(0)
    return moved(indexer.seen, axes | {rank - 2: row}) if lists[last - 2] == seen[rank - 2] else None
