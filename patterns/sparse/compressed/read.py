"""The reader of attention over the last keys and over compressed entries, their own values  (DeepSeek-V4, 2026).

    keys = cat(window, entries)      query i sees the last keys of the window up to its own, and entry e if e < t(i)

t(i) = (i + c) // ratio counts the entries whose tokens are all before query i or its own; a list may name some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

from fusion import reader, word
from fusion.analysis.affine import Affine, Formula, Leaf, conjuncts, negation
from fusion.analysis.intervals import uncast
from fusion.analysis.mask_formulas import Positions
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term
from patterns.attention.masks.masks import Masks
from patterns.sparse.indexer.read import topk_mask
from patterns.sparse.lists.fixed_keys import list_of
from patterns.sparse.lists.gathered_rows import distinct

RULE = "compressed_attention"
SPAN = 128
"""Number of keys of the window that a query sees, its own included."""
RATIO, LISTED_RATIO = 128, 4
"""Ratios of a call with one query, which may see every entry whatever the ratio: without and with a list."""
_NO_WINDOW = (
    f"mask: a query sees other keys of the window than the last {SPAN} up to its own; sparse_flash_mla requires these; "
    f"write (key <= query) & (key > query - {SPAN})"
)
_OTHER_ENTRIES = (
    "mask: compressed entries that a query sees are not proven to be those whose tokens are not after it; "
    "sparse_flash_mla requires entry < (position + 1) // ratio; write that comparison"
)
_OTHER_LIST = (
    "list: its entries are not numbers of compressed entries of the query itself, or -1; sparse_flash_mla requires "
    "these; write torch.where(entry < (position + 1) // ratio, entry, -1)"
)
_REPEATED = (
    "list: it may name a compressed entry twice, which sparse_flash_mla counts twice and requires distinct; "
    "list the indices of topk"
)
_UNBOUND_LIST = (
    "list: it may name a compressed entry whose tokens are after the query; sparse_flash_mla skips such an entry; hide "
    "entries that are not below (position + 1) // ratio"
)
_OTHER_COUNT = (
    "entries: there are {count} of them for {tokens} tokens at ratio {ratio}; sparse_flash_mla requires tokens // ratio"
)
WINDOWED_ATTENTION = word(
    "windowed_attention",
    "softmax(scale · q [keys; entries]ᵀ) [keys; entries] with a sink: a query sees the last 128 keys up to its own, "
    "and entries e < (C · ratio + residual - S + i + 1) // ratio",
    q="[B, N, S, D]", keys="[B, 1, W, D]", sink="[N], a score with a share of the softmax, but without a value",
    scale="a number", entries="compressed entries [B, 1, C, D]; absent where there are none",
    places="[B, S, K], entries that a query sees, others name none; absent where it sees all up to its bound",
    ratio="number of tokens that an entry stands for", residual="number of last tokens that no entry stands for",
    output_view="the reshapes, permutes and casts from [B, N, S, D] to the value",
)  # fmt: skip


@dataclass(frozen=True)
class _Scored:
    """The masks of one attention over keys that may be joined of two kinds.

    Attributes:
        assumed: facts about the graph.
        rows: the dims of the rows of the scores.
        sizes: B, N and S.
        terms: the masks [*rows, T], the outermost first; none where a query sees every key.
    """

    assumed: Assumed
    rows: tuple[Any, ...]
    sizes: tuple[Any, Any, Any]
    terms: Sequence[Term]

    def part(self, start: int, stop: int) -> Masks:
        """Return the masks of the keys `start` .. `stop` - 1 alone."""
        a, keys = self.assumed.algebra, stop - start
        terms = [replace(each, mask=_columns(a, each.mask, start, stop)) for each in self.terms]
        return self.assumed.masks((*self.rows, keys), terms, (*self.sizes, keys), keep_lists=True)


@reader(gives=(WINDOWED_ATTENTION,), needs=("softmax_attention", "attention_mask"))
def compressed_attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every softmax_attention with a sink, over keys that are their own values, as `windowed_attention`.

    Keys are the last ones of a window, alone or followed by compressed entries; report why others are not read.
    """
    assumed = Assumed.of(graph)
    for value, reading in graph.readings.all("softmax_attention"):
        captures = reading.captures
        if not _shares_keys(captures):
            continue
        scored = _scored(graph, assumed, captures)
        outcome = None if scored is None else _read(scored, captures)
        if isinstance(outcome, str):
            yield value, Miss(RULE, outcome, (captures["k"],))
        elif outcome is not None:
            same = {name: captures[name] for name in ("q", "scale", "sink", "output_view")}
            yield value, Reading("windowed_attention", same | outcome, reading.relies)


def _shares_keys(captures: Mapping[str, Any]) -> bool:
    """Return True if `captures` are of attention with a sink over one head of keys that are the values as well."""
    k, v = captures["k"], captures["v"]
    others = any(captures.get(name) is not None for name in ("bias", "mixed", "kv_len", "kv_lens", "count", "levels"))
    return captures.get("sink") is not None and k is v and k.shape[1] == 1 and not others


def _scored(graph: Graph, assumed: Assumed, captures: Mapping[str, Any]) -> _Scored | None:
    """Return the masks of the attention of `captures`; None if its dense mask is not described."""
    batch, heads, queries, _ = captures["q"].shape
    if captures["mask_kind"] != "dense":
        return _Scored(assumed, (batch, heads, queries), (batch, heads, queries), ())
    shown = graph.readings.one(captures["mask"], "attention_mask")
    if shown is None:
        return None
    frame = shown.captures["frame"]
    return _Scored(assumed, frame.shape, frame.sizes, shown.captures["terms"])


def _read(scored: _Scored, captures: Mapping[str, Any]) -> dict[str, Any] | str | None:
    """Return the captures of keys and entries; the reason why keys of two kinds are not read; None for other keys."""
    k, queries = captures["k"], captures["q"].shape[2]
    if captures["mask_kind"] != "dense":
        kind, window = captures["mask_kind"], captures["window"]
        if kind != "none" or _is_span(k.shape[2]):
            return {"keys": k} if _is_window(kind, window, queries, k.shape[2]) else None
    if not all(isinstance(each, int) for each in (k.shape[2], queries)):
        return None
    ends, a = _ends(k), scored.assumed.algebra
    end = next((each for each in reversed(ends) if _sees_window(scored.part(0, each), queries, each)), None)
    if end is None:
        return _NO_WINDOW if ends else None
    counted = _entries(scored, end, k.shape[2])
    if isinstance(counted, str):
        return counted
    return {"keys": a.cut(k, 2, 0, end), "entries": a.cut(k, 2, end, k.shape[2]), **counted}


def _ends(k: Value) -> list[int]:
    """List where pieces of the joined keys `k` [B, 1, T, D] end, without T itself; [] if they are not joined."""
    joined = k.below("reshape", "permute", "expand")
    sizes = [each.shape[joined.attrs[0]] for each in joined.args] if joined.op == "cat" else []
    ends = list(accumulate(sizes)) if all(isinstance(each, int) for each in sizes) else []
    return ends[:-1] if ends and ends[-1] == k.shape[2] else []


def _columns(a: Algebra, mask: Value, start: int, stop: int) -> Value:
    """Cut `mask` [.., T] to the keys `start` .. `stop` - 1; one column is left as it is."""
    return mask if mask.shape[-1] == 1 else a.cut(mask, mask.rank - 1, start, stop)


def _is_span(keys: Any) -> bool:
    """Return True if there are at most `SPAN` keys."""
    return isinstance(keys, int) and keys <= SPAN


def _sees_window(masks: Masks, queries: int, keys: int) -> bool:
    """Return True if `masks` show each query exactly the last `SPAN` of the keys up to its own."""
    formula = masks.visible()
    if isinstance(formula, str):
        return False
    if formula is True:
        return _is_window("none", None, queries, keys)
    captures = masks.bounded(masks.limits(formula))
    lengths = captures.get("kv_len") is not None or captures.get("kv_lens") is not None
    return bool(captures) and not lengths and _is_window(captures["mask_kind"], captures["window"], queries, keys)


def _is_window(kind: str, window: Any, queries: Any, keys: Any) -> bool:
    """Return True if a mask of `kind` and `window` shows each query exactly the last `SPAN` of `keys` up to its own."""
    if kind == "none":
        return queries == 1 and _is_span(keys)
    ordered = kind == "causal_lower_right" or (kind == "causal_upper_left" and queries == keys)
    return ordered and (window == SPAN - 1 or (window is None and _is_span(keys)))


def _entries(scored: _Scored, start: int, stop: int) -> dict[str, Any] | str:
    """Describe the keys from `start` on as compressed entries: ratio, residual and the list; or return why not."""
    masks, queries, count = scored.part(start, stop), scored.sizes[2], stop - start
    formula = masks.visible()
    if isinstance(formula, str):
        return formula
    if formula is True:
        return {"ratio": RATIO, "residual": 0} if queries == 1 else _OTHER_ENTRIES
    rank = len(masks.positions.shape)
    entry, query = masks.positions.axis(rank - 1), masks.positions.axis(rank - 2)
    parts = conjuncts(formula)
    if len(parts) != 1:
        return _OTHER_ENTRIES
    if list_of(parts[0]) is None:
        bound = _threshold(masks.positions, parts[0], entry, query)
        return _OTHER_ENTRIES if bound is None else _counted(*bound, queries, count)
    places = _listed(masks)
    named = None if places is None else _named(scored, places, count)
    if places is None or named is None:
        return _OTHER_LIST
    if not distinct(named.entries):
        return _REPEATED
    if queries == 1:
        return {"ratio": LISTED_RATIO, "residual": 0, "places": places}
    bound = _bound_of_list(named)
    counted = _UNBOUND_LIST if bound is None else _counted(*bound, queries, count)
    return counted if isinstance(counted, str) else {**counted, "places": places}


def _listed(masks: Masks) -> Value | None:
    """Return the list [B, S, K] of the entries that `masks` show, which nothing else hides; None for other lists."""
    read = next(iter(topk_mask(masks, masks.terms[0].mask, lambda places: False).values()), None)
    first, _ = (read.captures.get("room") or (0, 0)) if isinstance(read, Reading) else (1, 0)
    return read.captures["places"] if isinstance(read, Reading) and first == 0 else None


def _counted(ratio: int, ahead: int, queries: int, count: int) -> dict[str, Any] | str:
    """Return ratio and residual of `count` entries, of which query i sees those below (i + `ahead`) // `ratio`.

    A reason if these are not all the entries of the tokens.
    """
    tokens = ahead + queries - 1
    residual = tokens - count * ratio
    if not 0 <= residual < ratio:
        return _OTHER_COUNT.format(count=count, tokens=tokens, ratio=ratio)
    return {"ratio": ratio, "residual": residual}


@proof
def _threshold(positions: Positions, part: Formula, entry: Affine, query: Affine) -> tuple[int, int] | None:
    """Read `part` as entry < (query + c) // ratio: return the ratio and c; None for any other formula.

    The bound is a floor division, or ratio · entry + ratio <= query + c.
    """
    left: Affine = proven(None if isinstance(part, bool) or part[0] != "le" else part[1])
    factor = left.terms.get(next(iter(entry.terms)), 0) if entry.terms else 1
    must(isinstance(factor, int) and factor > 0)
    rest = left + entry.times(-factor)
    if not entry.terms and rest.axes() and not any(isinstance(each, Leaf) for each in rest.terms):
        factor = RATIO  # of one entry, it is only known which query is the first to see it
    if factor > 1:
        return factor, proven(_ahead(rest.times(-1).plus(factor), query))
    must(rest.constant == 1 and len(rest.terms) == 1)
    leaf = proven(next((each for each in rest.terms if isinstance(each, Leaf)), None))
    must(rest.terms[leaf] == -1 and leaf.value.op == "floor_divide")
    return leaf.value.attrs[0], proven(_ahead(positions.affine(leaf.value.arg, leaf.index), query))


@proof
def _ahead(bound: Affine, query: Affine) -> int:
    """Return c of `bound` = `query` + c; the dim of one query is 0."""
    rest = bound + query.times(-1)
    must(not rest.terms and isinstance(rest.constant, int))
    return rest.constant


@dataclass(frozen=True)
class _Named:
    """The entries that lists name.

    Attributes:
        positions: the evaluation at the positions of the lists [B, S, K].
        entries: entries [B, S, K], of which those for which a condition does not hold are not named.
        conditions: conditions of a named entry.
    """

    positions: Positions
    entries: Value
    conditions: tuple[Formula, ...]


@proof
def _named(scored: _Scored, places: Value, count: int) -> _Named | None:
    """Strip each choice between an entry and a number outside of 0 .. `count` - 1 from the lists `places` [B, S, K].

    None if a choice is between two entries.
    """
    batch, _, queries = scored.sizes
    a, shape = scored.assumed.algebra, (batch, queries, places.shape[-1])
    positions = scored.assumed.masks(shape, (), (batch, 1, queries, shape[-1])).positions
    conditions, x = list[Formula](), uncast(places, "reshape", "expand")
    while x.op == "where":
        condition, yes, no = (a.expand(each, x.shape) for each in x.args)
        must(_names_none(yes, count) != _names_none(no, count))
        opened = a.reshape(condition, shape)
        truth = positions.truth(opened, positions.of(opened))
        conditions += conjuncts(negation(truth) if _names_none(yes, count) else truth)
        x = uncast(no if _names_none(yes, count) else yes, "reshape", "expand")
    must(prod(x.shape) == prod(shape))
    return _Named(positions, a.reshape(x, shape), tuple(conditions))


def _bound_of_list(named: _Named) -> tuple[int, int] | None:
    """Return the ratio and c of entry < (query + c) // ratio, which holds for each of the entries `named`; None if no
    such bound is proven.
    """
    positions = named.positions
    entry = positions.affine(named.entries, positions.of(named.entries))
    bounds = (_threshold(positions, each, entry, positions.axis(1)) for each in named.conditions)
    return next((each for each in bounds if each is not None), None)


def _names_none(side: Value, count: int) -> bool:
    """Return True if `side` is a number outside of 0 .. `count` - 1."""
    side = side.below("reshape", "expand", "cast")
    return side.op == "full" and not 0 <= side.attrs[0] < count
