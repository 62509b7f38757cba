"""The lightning indexer: which keys a query attends to (DeepSeek-V3.2, 2025).

    places = top-k over j of Σ_n w[i, n] · relu(q[i, n] · k[j]), of the keys j that a mask lets through

Positive factors that all scores have are left out: they change no order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fusion import reader
from fusion.analysis.affine import Formula, number
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.row_layout import Step, arranged, arrangement, row_step, uncast
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value, broadcast
from fusion.graph.algebra import widens
from fusion.graph.contractions import swapped
from patterns.attention.assumed import Assumed
from patterns.attention.bounds import Limits, sees_some
from patterns.attention.masks import MOVED, Masks, Term, mask_on
from patterns.sparse.rows import distinct
from patterns.sparse.words import LIGHTNING_INDEXER

_MASK = "the mask of what is chosen from is not proven to be a causal order or a length"
NOT_A_SUM = "what is chosen from is not the sum over heads of weight · relu(query · key)"
_SIGN = "scores are multiplied by a number that is not positive, which changes their order"


def topk_mask(masks: Masks, mask: Value) -> dict[Value, Reading | Miss]:
    """A reading of `mask`, if it lets through what each row lists, within bounds; why it is none, by the list."""
    a, positions, formula = masks.a, masks.positions, masks.visible()
    rank = len(positions.shape)
    bounds = masks.limits(formula) if not isinstance(formula, str) else Limits(None, None, False, ())
    leaves = [part[1] for part in bounds.rest if not isinstance(part, bool) and part[0] == "is"]
    lists = [leaf for leaf in leaves if leaf.value.op == "chosen"]
    if not lists:
        return {}
    at, places = lists[0].index, lists[0].value.arg
    if len(bounds.rest) > 1:
        return {
            places: _miss("beside the keys that are listed, the mask asks for more than a causal order or a length")
        }
    batch, _, queries, _ = masks.sizes
    rows, lead = (positions.axis(rank - 2), positions.axis(rank - 1)), places.shape[:-2]
    own = (number(0) if size == 1 else positions.axis(0) for size in lead)
    if at != (*own, *rows) or prod(lead) not in (1, batch):
        return {places: _miss("the keys that are listed differ from head to head, or are those of another sequence")}
    words = _words(masks, replace(bounds, rest=()))
    if words is None:
        return {
            places: _miss("beside the keys that are listed, the mask is not proven to be a causal order or a length")
        }
    count = places.shape[-1]
    listed = a.expand(a.reshape(places, (prod(lead), queries, count)), (batch, queries, count))
    captures = {"places": listed, "distinct": distinct(places), **words}
    return {mask: Reading("topk_mask", captures, positions.names())}


def _miss(reason: str) -> Miss:
    return Miss("sparse_attention", reason)


def _words(masks: Masks, bounds: Limits) -> dict[str, Any] | None:
    """The bounds in words, and whether every query is known to see a key."""
    found = {"mask_kind": "none", "window": None, "kv_len": None}
    if bounds == Limits(None, None, False, ()):
        return {**found, "every_row_nonempty": True}
    words = masks.bounded(bounds)
    return {**found, **words, "every_row_nonempty": sees_some(bounds, *masks.sizes[2:])} if words else None


@dataclass(frozen=True)
class _Scores:
    """What is chosen from: a sum over heads, below masks that are added or filled in."""

    total: Value
    shape: tuple[Any, ...]
    terms: tuple[Term, ...]


@reader(gives=(LIGHTNING_INDEXER,), needs=("topk_mask",))
def lightning_indexers(graph: Graph) -> Iterator[Found]:
    """What lists the keys that attention sees, if it is a lightning indexer; why it is none."""
    assumed = Assumed.of(graph)
    for _, each in graph.readings.all("topk_mask"):
        places = each.captures["places"]
        found = lightning_indexer(assumed, places.below("reshape"))
        yield places, _miss(found) if isinstance(found, str) else found


def lightning_indexer(assumed: Assumed, places: Value) -> Reading | str:
    """What lists the keys, if it is a lightning indexer; why it is none."""
    found = indexed(assumed, places)
    if isinstance(found, str):
        return found
    listed = assumed.algebra.reshape(places, (*found.captures["query"].shape[:2], places.attrs[0]))
    captures = {**found.captures, "places": listed}
    return Reading("lightning_indexer", captures, found.masks.positions.names())


@dataclass(frozen=True)
class Indexed:
    """A lightning indexer: what is said of it, the masks of what it chooses from, and where they let a key through."""

    captures: dict[str, Any]
    masks: Masks
    seen: Formula


def indexed(assumed: Assumed, places: Value) -> Indexed | str:
    """The indexer that lists places; why it is none."""
    a = assumed.algebra
    if places.op != "largest_index":
        return "the keys that are listed are not the largest of a row of scores"
    found = _unmasked(_Scores(places.arg, places.arg.shape, ()))
    if isinstance(found, str):
        return found if _is_rectified(places.arg) else NOT_A_SUM
    parts = _parts(a, found.total)
    if isinstance(parts, str):
        return parts
    query, key, weights = parts
    batch, queries, _, _ = query.shape
    keys = key.shape[1]
    if found.shape[-2:] != (queries, keys) or prod(found.shape[:-2]) != batch or places.shape[-2:-1] != (queries,):
        return NOT_A_SUM
    masks = assumed.masks(found.shape, found.terms, (batch, 1, queries, keys))
    formula = masks.visible()
    if isinstance(formula, str):
        return formula
    words = _words(masks, masks.limits(formula))
    if words is None:
        return _MASK
    count = _at_most(places.attrs[0])
    if count is None:
        return "how many keys are listed is not known"
    return Indexed({"query": query, "key": key, "weights": weights, "count": count, **words}, masks, formula)


def _at_most(count: Any) -> int | None:
    """The number of keys that are listed where there are so many."""
    if isinstance(count, int):
        return count
    numbers = [int(each) for each in count.args if each.is_Integer] if count.func.__name__ == "Min" else []
    return numbers[0] if numbers else None


def _unmasked(found: _Scores) -> _Scores | str:
    """Take masks, casts and positive factors off the scores."""
    z = found.total
    match z.op:
        case "scale":
            return _unmasked(replace(found, total=z.arg)) if z.attrs[0] > 0 else _SIGN
        case "cast" if is_rounding(z):
            return _unmasked(replace(found, total=z.arg))
        case "reshape":
            return _unmasked(replace(found, total=z.arg))
        case "add" | "where" if found.terms and z.shape != found.shape:
            return MOVED
        case "add" | "where":
            scores = next(filter(_is_scores, z.args[-2:]), z.args[-1])
            term = mask_on(z, scores)
            return term if isinstance(term, str) else _unmasked(_Scores(scores, z.shape, (*found.terms, term)))
        case _:
            return found


def _is_rectified(z: Value) -> bool:
    """Whether a sum of positive parts stands below masks, as the scores of no router do."""
    waiting, seen = [z], {z}
    while waiting:
        each = waiting.pop()
        if each.op == "relu":
            return True
        waiting += [arg for arg in each.args if arg not in seen and each.op in _OF_SUMS]
        seen.update(each.args)
    return False


_OF_SUMS = ("scale", "cast", "reshape", "permute", "expand", "slice", "add", "where", "matmul", "mean", "mul")


def _is_scores(z: Value) -> bool:
    """Whether a sum over heads stands below."""
    total = z.below("scale", "cast", "reshape", "permute")
    return total.op in ("matmul", "mean") or (total.op in ("add", "where") and any(map(_is_scores, total.args[-2:])))


def _parts(a: Algebra, total: Value) -> tuple[Value, Value, Value] | str:
    """Query [B, S, N, D], key [B, T, D] and weights [B, S, N] of a sum over heads."""
    for weights, rectified, order in _products(a, total):
        if weights.rank != 4 or weights.shape[-1] != 1:
            continue
        products = _below_relu(rectified)
        scores = None if products is None else _query_and_key(a, *products, order)
        if scores is None:
            continue
        query, key = scores
        rows = (*query.shape[:3], 1)
        weights = a.permute(weights, order)
        if broadcast(weights.shape, rows) != rows:
            return NOT_A_SUM
        weights = _plain(a, a.reshape(a.expand(weights, rows), rows[:3]))
        return (query, key, weights) if isinstance(weights, Value) else weights
    return NOT_A_SUM


def _products(a: Algebra, total: Value) -> list[tuple[Value, Value, tuple[int, ...]]]:
    """Weights and rectified products, with the order that makes them [B, S, N, 1] and [B, S, N, T]."""
    order = (0, 1, 2, 3)
    if total.op == "matmul":
        x, y = swapped(a, total.arg), total.args[1]
    elif total.op == "mean" and total.arg.op == "mul" and total.attrs in ((-2,), (-3,)):
        x, y = total.arg.args
        order = order if total.attrs == (-2,) else (0, 2, 1, 3)
    else:
        return []
    opened = [(x, y)] if y.rank == 4 else [(_opened(a, x, place), _opened(a, y, place)) for place in (1, 0)]
    return [(weights, products, order) for x, y in opened for weights, products in ((x, y), (y, x))]


def _opened(a: Algebra, x: Value, place: int) -> Value:
    """With a dim for the one query of each sequence, or for the one sequence of all queries, where there is none."""
    return a.reshape(x, (*x.shape[:place], 1, *x.shape[place:])) if x.rank == 3 else x


def _below_relu(value: Value) -> tuple[Value, tuple[Step, ...]] | None:
    """The product of queries and keys of which `value` holds the positive part, and how its rows are arranged."""
    steps: list[Step] = []
    seen = False
    while value.op != "matmul":
        if value.op == "relu":
            seen = True
        elif (step := row_step(value)) is not None:
            steps.append(step)
        elif not (is_rounding(value) or (value.op == "scale" and value.attrs[0] > 0)):
            return None
        value = value.arg
    return (value, tuple(reversed(steps))) if seen else None


def _query_and_key(
    a: Algebra, product: Value, steps: tuple[Step, ...], order: tuple[int, ...]
) -> tuple[Value, Value] | None:
    """Query [B, S, N, D] and key [B, T, D]: one key for all heads and queries of a sequence."""
    x, y = (uncast(a, each) for each in product.args)
    if y.rank < 3 or any(size != 1 for size in y.shape[1:-2]):
        return None
    rows = arrangement(product.shape[:-1], steps)
    apart = rows is None or rows.before[0] != rows.after[0]
    if y.shape[0] != 1 and (apart or y.rank != product.rank):
        return None  # the keys do not differ from sequence to sequence, but from query to query
    query = arranged(a, a.expand(x, (*product.shape[:-1], x.shape[-1])), steps)
    if query.rank != 4 or query.shape[0] != y.shape[0]:
        return None
    return a.permute(query, order), a.reshape(swapped(a, y), (y.shape[0], y.shape[-1], y.shape[-2]))


def _plain(a: Algebra, weights: Value) -> Value | str:
    """The weights without a positive factor and before they were widened."""
    while weights.op == "scale" or (weights.op == "cast" and widens(weights.arg.dtype, weights.dtype)):
        if weights.op == "scale" and weights.attrs[0] <= 0:
            return _SIGN
        weights = weights.arg
    return weights
