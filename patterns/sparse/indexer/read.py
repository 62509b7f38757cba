"""Lightning indexers, which list the keys that each query attends to (DeepSeek-V3.2, 2025).

    places = top-k over j of Σ_n w[i, n] · relu(q[i, n] · k[j]), of the keys j that a mask shows

Constant positive factors of the scores are dropped, since they change no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import isfinite, prod
from typing import Any

from fusion import reader
from fusion.analysis.affine import Affine, Formula, conjuncts, number
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.stacked_entries import lists_all
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.masks import MOVED, Masks, Term, mask_on
from patterns.attention.masks.visible import list_in, names_keys
from patterns.sparse.indexer.read_scores import NOT_A_SUM, SIGN, parts
from patterns.sparse.indexer.seen_keys import EVERY, NOTHING, in_words, starts_anywhere
from patterns.sparse.lists.fixed_keys import list_of, split
from patterns.sparse.lists.gathered_rows import distinct
from patterns.sparse.lists.mask_lookup import looked_up
from patterns.sparse.words import LIGHTNING_INDEXER, SUNK, TOPK_MASK

_MASK = (
    "mask of the indexer: it is not proven to be a causal order or a length; npu_lightning_indexer "
    "requires one of both; write key <= query position, or key < length"
)
_RANGES = (
    "keys: each query sees a range that starts at a key which data names; npu_lightning_indexer requires keys from the "
    "first one of a sequence or of a segment of packed tokens on; write the mask of segments as (segment[:, None] == "
    "segment) & causal, with segment = torch.searchsorted(cu_seqlens[1:], positions, right=True)"
)
_MORE = (
    "mask: it shows keys that the list has not, and these are not proven to be the first or the last "
    "visible ones; npu_sparse_flash_attention reads a list alone and requires that; add such keys to the "
    "list"
)
_STABLE = (
    "keys: listed by a stable sort, which keeps equal scores in the order of their keys; npu_lightning_indexer leaves "
    "open which of equal scores it lists; write topk where their order is free"
)
_THRESHOLD = (
    "mask: it shows keys whose scores reach the k-th largest, of equal ones more than k; "
    "npu_sparse_flash_attention requires a list of k keys; show those at the indices that topk gives"
)
_OF_HEADS = (
    "list of keys: there is not one for each query, as where each head has its own; "
    "npu_sparse_flash_attention requires one list of each query for all heads"
)
_OF_OTHERS = (
    "list of keys: a query reads the list of another query or sequence, or its entries are no positions of keys; "
    "npu_sparse_flash_attention requires the list of the query itself, with positions in its own sequence"
)
_BLOCKS = (
    "list: its entries are blocks of keys, or numbers of something else than the keys; "
    "npu_sparse_flash_attention requires positions of keys; expand blocks to keys"
)
_BEYOND = (
    "list of keys: an entry may be behind the last key, whose number is symbolic; npu_sparse_flash_attention "
    "requires positions of keys, or a static number of them"
)
_EVENED = (
    "scores of the indexer: they go through {function} before topk, which makes different ones equal; "
    "npu_lightning_indexer requires topk of the scores themselves; apply {function} behind topk"
)
_FUNCTIONS = ("sigmoid", "tanh", "exp")
"""Elementwise functions that keep the order of their arguments, unless they saturate."""
_SCALED = (
    "scores of the indexer: they are multiplied by scales of keys behind the mask; npu_quant_lightning_indexer "
    "requires them before the mask; multiply first, then mask"
)


@reader(gives=(TOPK_MASK,), needs=("attention_mask",))
def listed_masks(graph: Graph) -> Iterator[Annotation]:
    """Read every mask of attention that shows each query the keys of a list as `topk_mask`; report why others are not.

    With a sink, the list is reported: no operator takes both.
    """
    assumed = Assumed.of(graph)
    for mask, reading in graph.readings.all("attention_mask"):
        frame, terms, keys, sink = (reading.captures[name] for name in ("frame", "terms", "keys", "sink"))
        masks = assumed.masks((*frame.shape, keys), terms, (*frame.sizes, keys), keep_lists=True)
        listed = topk_mask(masks, mask, assumed.sorted_by_scores)
        if sink is None:
            yield from listed.items()
            continue
        lists = (each.captures["places"] for each in listed.values() if isinstance(each, Reading))
        yield from ((places, Miss("sparse_attention", SUNK, (sink,))) for places in lists)


def topk_mask(masks: Masks, mask: Value, sorted_by_scores: Callable[[Value], bool]) -> dict[Value, Reading | Miss]:
    """Map `mask` to a `topk_mask` reading if it shows each query the keys of a list; or the list to a `Miss` if it is
    not quite so.

    Without a list, a comparison of scores with one of their largest is mapped to a `Miss`. Any other mask, or one whose
    list names every key, gives {}.

    Args:
        masks: masks of the scores of attention.
        mask: all of `masks` as one, True where a key is hidden.
        sorted_by_scores: tells if a list has the largest scores first.
    """
    a, positions, formula = masks.a, masks.positions, masks.visible()
    rank = len(positions.shape)
    bounds = masks.limits(formula) if not isinstance(formula, str) else NOTHING
    lists = [leaf for leaf in map(list_of, bounds.rest) if leaf]
    fixed: dict[str, Any] = {}
    union = None if lists else split(masks, bounds)
    if union is not None:
        listed, fixed, bounds = union
        lists = [listed]
    if not lists:
        return {} if isinstance(formula, str) else _other_keys(mask, masks.sizes[3])
    chosen = lists[0].value
    (*at, key), places = lists[0].index, chosen.arg
    others = tuple(part for part in bounds.rest if part != ("is", lists[0]))
    batch, _, queries, _ = masks.sizes
    own, query = positions.axis(0), positions.axis(rank - 2)
    rows = {queries: query, batch * queries: own.times(queries) + query}  # number of lists -> list of a query
    count = prod(places.shape[:-1])
    ahead = key + positions.axis(rank - 1).times(-1)
    if rows.get(count) is None:
        return {places: _miss(_OF_HEADS)}
    if ahead.terms or rows[count] != _row(at, places.shape[:-1]):
        return {places: _miss(_OF_OTHERS)}
    room = None if (ahead.constant, chosen.shape[-1]) == (0, masks.sizes[3]) else (ahead.constant, masks.sizes[3])
    if room is not None and not all(isinstance(each, int) for each in room):
        return {places: _miss(_BEYOND)}
    left = replace(bounds, rest=others)
    empty = room is not None and not fixed  # then a list may name no key at all
    words: dict[str, Any] | None = None if empty and left != NOTHING else in_words(masks, left)
    if words is None and lists_all(chosen):
        return {}  # the mask says it all
    if words is None and "last" in fixed:
        return {places: _miss(_MORE)}
    if words is None:
        besides = tuple(part for part in conjuncts(formula) if part != ("is", lists[0]))
        hidden = looked_up(masks, mask, chosen, besides, sorted_by_scores(places))
        words = {**EVERY, "every_row_nonempty": False, **hidden}
    words |= {} if room is None else {"room": room}
    words |= {"every_row_nonempty": False} if empty else {}
    lists_of = (1 if count == queries else batch, queries, places.shape[-1])
    listed = a.expand(a.reshape(places, lists_of), (batch, *lists_of[1:]))
    captures = {"places": listed, "distinct": distinct(places) and not fixed and not room, **words, **fixed}
    return {mask: Reading("topk_mask", captures, positions.names())}


def _other_keys(mask: Value, keys: Any) -> dict[Value, Reading | Miss]:
    """Map the list below `mask`, or each comparison of scores with one of their largest, to the reason why it is not
    read.

    `keys` is the number of keys.
    """
    listed = list_in(mask)
    if listed is None:
        return {each: _miss(_THRESHOLD) for each in mask.sources(_below_logic) if _is_threshold(each)}
    return {listed.arg: _miss(_MORE if names_keys(listed, keys) else _BLOCKS)}


def _below_logic(x: Value) -> Sequence[Value]:
    """Return the operands of `x` if it is a logical op or a view, else (): a search through `mask.sources` ends
    there.
    """
    return x.args if x.op in ("not", "and", "or", "where", "cast", "reshape", "expand", "permute") else ()


def _is_threshold(x: Value) -> bool:
    """Return True if `x` compares scores with entries of their own top-k values, as with the k-th largest."""
    sides = [each.below("cast", "reshape", "expand", "slice") for each in x.args] if x.op == "compare" else []
    return any(
        one.op == "largest" and one.arg.below("cast", "reshape") is other.below("cast", "reshape")
        for one, other in permutations(sides, 2)
    )


def _row(at: Sequence[Affine], sizes: Sequence[Any]) -> Affine:
    """Return the row-major index of the position `at` in dims of `sizes`."""
    index = number(0)
    for place, size in zip(at, sizes, strict=True):
        index = index.times(size) + place
    return index


def _miss(reason: str) -> Miss:
    return Miss("sparse_attention", reason)


@dataclass(frozen=True)
class _Scores:
    """Scores that a top-k chooses from: a sum over heads, which masks and factors are applied to.

    Attributes:
        total: the sum over heads, below the masks that were stripped so far.
        shape: shape of the scores where they are masked, [.., S, T].
        terms: masks, the outermost first.
        scales: factors of the sum, scales of keys [B, S, 1, T], of which any dim may be 1.
        positions_first: True if `total` is [S, B, .., T].
    """

    total: Value
    shape: tuple[Any, ...]
    terms: tuple[Term, ...]
    scales: tuple[Value, ...] = ()
    positions_first: bool = False

    def with_one_query(self, a: Algebra) -> _Scores:
        """Return scores and masks [B, T] as [B, 1, T], with the dim of the only query of each sequence."""
        opened = (replace(each, mask=a.reshape(each.mask, _opened(each.mask.shape))) for each in self.terms)
        return replace(self, shape=_opened(self.shape), terms=tuple(opened))


def _opened(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Insert a dim of size 1 before the last one of `shape`."""
    return (*shape[:-1], 1, *shape[-1:])


@reader(gives=(LIGHTNING_INDEXER,), needs=("topk_mask",))
def lightning_indexers(graph: Graph) -> Iterator[Annotation]:
    """Yield a `lightning_indexer` reading for the list of every `topk_mask`, or a `Miss` with the reason.

    A list that is an input of the graph gives neither.
    """
    assumed = Assumed.of(graph)
    for _, each in graph.readings.all("topk_mask"):
        places = each.captures["places"]
        if places.below("cast", "reshape", "expand", "permute", "slice").op == "input":  # made outside of the graph
            continue
        result = lightning_indexer(assumed, places.below("reshape"))
        yield places, _miss(result) if isinstance(result, str) else result


def lightning_indexer(assumed: Assumed, places: Value) -> Reading | str:
    """Read `places` [.., K] as the list of a lightning indexer; return the reason if it is none.

    `assumed` are the facts about the masks of the graph.
    """
    indexer = indexed(assumed, places)
    if isinstance(indexer, str):
        return indexer
    listed = assumed.algebra.reshape(places, (*indexer.captures["query"].shape[:2], places.attrs[0]))
    captures = {**indexer.captures, "places": listed}
    return Reading("lightning_indexer", captures, indexer.masks.positions.names())


@dataclass(frozen=True)
class Indexed:
    """A lightning indexer.

    Attributes:
        captures: query, key, weights, scales of int8 rows, count and the keys that can be seen.
        masks: masks of the scores.
        seen: formula over the positions of the scores, true where a key is visible.
    """

    captures: dict[str, Any]
    masks: Masks
    seen: Formula


def indexed(assumed: Assumed, places: Value) -> Indexed | str:
    """Read the indexer, with its visible keys, of whose scores `places` [.., K] are the top-k; the reason if there is
    none.
    """
    a = assumed.algebra
    if places.op == "stable_largest_index" and _is_rectified(places.arg):
        return _STABLE
    if places.op != "largest_index":
        return (
            "list of keys: it is not the topk of one row of scores for each query; npu_lightning_indexer "
            "requires scores.topk(k, -1); where the model computes the list otherwise, "
            "npu_sparse_flash_attention takes it as it is"
        )
    scores = _unmasked(a, _Scores(places.arg, places.arg.shape, ()))
    if isinstance(scores, str):
        return scores if _is_rectified(places.arg) else NOT_A_SUM
    captures = parts(a, scores.total, scores.scales, scores.positions_first or _is_exchanged(scores))
    if isinstance(captures, str):
        return captures
    batch, queries, _, _ = captures["query"].shape
    keys = captures["key"].shape[1]
    scores = scores.with_one_query(a) if queries == 1 != batch and len(scores.shape) == 2 else scores
    rows = prod(scores.shape[:-2]), prod(places.shape[:-1])
    if scores.shape[-2:] != (queries, keys) or rows != (batch, batch * queries):
        return NOT_A_SUM
    masks = assumed.masks(scores.shape, scores.terms, (batch, 1, queries, keys))
    formula = masks.visible()
    if isinstance(formula, str):
        return formula
    bounds = masks.limits(formula)
    words = in_words(masks, bounds)
    if words is None:
        return _RANGES if starts_anywhere(masks, bounds) else _MASK
    count = at_most(places.attrs[0])
    if count is None:
        return (
            "list of keys: its length is symbolic; npu_lightning_indexer requires a static sparse_count; "
            "compile for a static k"
        )
    return Indexed({**captures, "count": count, **words}, masks, formula)


def at_most(count: Any) -> int | None:
    """Return K if `count`, the number of listed keys, is K or min(K, T) for a symbolic T; None for another symbolic
    number.
    """
    if isinstance(count, int):
        return count
    numbers = [int(each) for each in count.args if each.is_Integer] if count.func.__name__ == "Min" else []
    return numbers[0] if numbers else None


def _unmasked(a: Algebra, scored: _Scores) -> _Scores | str:
    """Walk from `scored.total` down to the sum over heads, collecting masks and scales of keys on the way.

    Rounding casts, reshapes and positive factors are dropped. Returns the reason if an op on the way is none of these.
    """
    z = scored.total
    match z.op:
        case "scale":
            return _unmasked(a, replace(scored, total=z.arg)) if z.attrs[0] > 0 else SIGN
        case "cast" if is_rounding(z):
            return _unmasked(a, replace(scored, total=z.arg))
        case "reshape":
            return _unmasked(a, replace(scored, total=z.arg))
        case "shift" | "softmax" if _is_in_order(scored):
            return _unmasked(a, replace(scored, total=z.arg))
        case _ if z.op in _FUNCTIONS:
            return _EVENED.format(function=z.op)
        case "permute" if z.attrs == (1, 0, *range(2, z.rank)) and not scored.scales:
            return _unmasked(a, replace(scored, total=z.arg, positions_first=True))
        case "mul" | "add" | "where" if scored.positions_first:
            return MOVED
        case "mul":
            scores, scale = z.args if _is_scores(z.arg) else z.args[::-1]
            return _unmasked(a, replace(scored, total=scores, scales=(*scored.scales, _by_key(a, scale, z.shape))))
        case "add" | "where" if scored.scales:
            return _SCALED
        case "add" | "where" if scored.terms and z.shape != scored.shape:
            return MOVED
        case "add" if all(map(_is_scores, z.args)):  # head by head
            return scored
        case "add" | "where":
            scores = next(filter(_is_scores, z.args[-2:]), z.args[-1])
            term = mask_on(z, scores)
            return term if isinstance(term, str) else _unmasked(a, _Scores(scores, z.shape, (*scored.terms, term)))
        case _:
            return scored


def _is_in_order(scored: _Scores) -> bool:
    """Return True if `scored.total`, a shift or a softmax along the keys, keeps the order of the scores.

    Equal results of a softmax for different low scores are allowed, since `topk` may list any of equal scores.
    """
    z = scored.total
    over_keys = isfinite(z.attrs[0]) if z.op == "shift" else (z.attrs[0], z.shape[-1]) == (-1, scored.shape[-1])
    return over_keys and not scored.scales


def _is_exchanged(scored: _Scores) -> bool:
    """Return True if `scored.total` is [S, B, .., T] and `scored.shape` is [.., B, S, T], with B or S of size 1."""
    rows = scored.shape[-3:-1]
    return 1 in rows and scored.total.rank == 4 and scored.total.shape[:2] == rows[::-1] != rows


def _is_rectified(z: Value) -> bool:
    """Return True if a relu is among the ops below `z`, down through sums, factors, views and masks.

    Scores of a router have none, so that a top-k of these is not reported.
    """
    return any(each.op == "relu" for each in z.sources(lambda each: each.args if each.op in _OF_SUMS else ()))


_OF_SUMS = (
    "scale", "cast", "reshape", "permute", "expand", "slice", "add", "where", "matmul", "mean", "mul", "shift",
    *_FUNCTIONS,
)  # fmt: skip


def _by_key(a: Algebra, scale: Value, shape: Sequence[Any]) -> Value:
    """Reshape `scale`, a factor of scores of `shape` [.., S, T], to [B or 1, S or 1, 1, T or 1]."""
    sizes = (*(1,) * (len(shape) - scale.rank), *scale.shape)
    return a.reshape(scale, (prod(sizes[:-2]), *(1,) * (2 - len(sizes)), *sizes[-2:-1], 1, sizes[-1]))


def _is_scores(z: Value) -> bool:
    """Return True if `z` is a sum over heads, below views, factors and masks."""
    total = z.below("scale", "shift", "cast", "reshape", "permute", "softmax")
    inner = total.args if total.op == "mul" else total.args[-2:] if total.op in ("add", "where") else ()
    return total.op in ("matmul", "mean", "relu") or any(map(_is_scores, inner))
