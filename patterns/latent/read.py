"""Latent attention: keys and values of all heads that are projected from one latent, and what may be absorbed.

    k[b, n, t] = [W_K[n] c[b, t], r[b, t]]      v[b, n, t] = c[b, t] W_V[n]
    q · k = (q_nope W_K) · c + q_rope · r        Σ p v = (Σ p c) W_V

Both lines on the right hold for every c, so that neither keys nor values need be computed (DeepSeek-V2, 2024, §2.1).
Every form is proven by building it: a value is a projection of heads if it is what the algebra makes of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from fusion import reader
from fusion.analysis.rounding import unscaled
from fusion.analysis.row_layout import once, uncast
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Readings, Value
from fusion.graph.contractions import matmul, swapped
from fusion.graph.dims import but_ones
from fusion.graph.proof import must, proof, proven
from patterns.latent.words import (
    ABSORBED_QUERY,
    HEAD_LANES,
    LATENT_KEYS,
    LATENT_QUERIES,
    LATENT_VALUES,
    UNROTATED_KEYS,
    UNROTATED_QUERIES,
)

Operands = dict[Value, Reading]
_NO_LATENT = "the rows that are listed are no latent with rotated lanes, of which the values are the latent"


@dataclass(frozen=True)
class HeadLanes:
    """Lanes start … start + d of each head of a layer, which is `of` by the names of the `words` for it."""

    of: Mapping[str, Value]
    words: tuple[str, str]
    width: Any
    start: int
    heads_first: bool

    def captures(self) -> dict[str, Any]:
        """What a reading says of it."""
        return {**self.of, "width": self.width, "start": self.start}


@dataclass(frozen=True)
class HeadProjection(HeadLanes):
    """The same of x Wᵀ, for x [B, S, K], W [N · width, K]; `source` is x as it lies."""

    source: Value

    @property
    def x(self) -> Value:
        """What is projected, by sequence."""
        return self.of["x"]

    def lanes(self, a: Algebra, count: Any) -> Value:
        """The rows of the weight that make `count` lanes of each head [N, count, K]."""
        rows, inner = self.of["weight"].shape
        opened = a.reshape(self.of["weight"], (rows // self.width, self.width, inner))
        return a.cut(opened, 1, self.start, self.start + count)


def head_projection(a: Algebra, value: Value, heads: Any, rows: Any) -> HeadProjection | None:
    """The linear layer of which `value` [B, N, S, D], [B, S, N, D] or [T, N, D] holds some lanes of every head.

    Where they are multiplied by a number, x is what the layer takes times that number.
    """
    value, rows, number = unscaled_lanes(a, value, rows)
    for layer in (_linear, _positions_first, _by_heads):
        for each in sources(value):
            parts = layer(a, each, value.shape[0], heads, rows)
            place = parts and placed(a, value, parts[2])
            if parts and place:
                x, weight, opened = parts
                x = a.scale(x, number)
                of = {"x": a.reshape(x, (value.shape[0], rows, x.shape[-1])), "weight": weight}
                return HeadProjection(of, ("absorbed_query", "head_lanes"), opened.shape[-1], *place, x)
    return None


def unscaled_lanes(a: Algebra, value: Value, rows: Any) -> tuple[Value, Any, float]:
    """Lanes of heads with their rows, those of tokens [T, N, D] as [T, 1, N, D], and the number they are times."""
    if value.rank == 3:
        value, rows = a.reshape(value, (value.shape[0], 1, *value.shape[1:])), 1
    below, number = pulled(a, value)
    return below, rows, number


def opened_heads(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Value:
    """A layer [.., N · width] as [B, S, N, width]; where its sizes do not fit, no value is a part of that."""
    return a.reshape(layer, (batch, rows, heads, layer.shape[-1] // heads))


Layer = tuple[Value, Value, Value]
"""x, W [N · width, K] and the heads [B, S, N, width] of a linear layer."""


@proof
def _linear(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """A linear layer, or some of its outputs."""
    is_cut = layer.op == "slice" and layer.attrs[0] == layer.rank - 1 and layer.attrs[3] == 1
    product = layer.arg if is_cut else layer
    must(product.op == "matmul" and prod(product.args[1].shape[:-2]) == 1)
    weight = swapped(a, a.reshape(product.args[1], product.args[1].shape[-2:]))
    weight = a.cut(weight, 0, *layer.attrs[1:3]) if is_cut else weight
    return product.arg, weight, opened_heads(a, layer, batch, heads, rows)


@proof
def _positions_first(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """A linear layer of [S, B, K], which may be flattened."""
    x, weight, opened = proven(_linear(a, layer, rows, heads, batch))
    by_sequence = a.permute(a.reshape(x, (rows, batch, x.shape[-1])), (1, 0, 2))
    return by_sequence, weight, a.permute(opened, (1, 0, 2, 3))


@proof
def _by_heads(a: Algebra, product: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """The same where every head multiplies by a matrix of its own: x [B, 1, S, K] @ y [N, K, width]."""
    must(product.op == "matmul")
    x, y = product.args
    of_rows = (*(1,) * (4 - x.rank), *x.shape[:-1]) == (batch, 1, rows)
    must(isinstance(heads, int) and but_ones(y.shape[:-2]) == (heads,) and of_rows)
    inner, width = y.shape[-2:]
    weight = a.reshape(swapped(a, a.reshape(y, (heads, inner, width))), (heads * width, inner))
    return x, weight, a.permute(a.reshape(product, (batch, heads, rows, width)), (0, 2, 1, 3))


def sources(value: Value) -> Iterator[Value]:
    """A value and what it is cut, turned and reshaped from."""
    yield value
    while value.op in ("slice", "permute", "reshape"):
        value = value.arg
        yield value


def placed(a: Algebra, value: Value, opened: Value) -> tuple[int, bool] | None:
    """From which lane of each head of [B, S, N, width] on `value` is, and whether heads stand before positions."""
    count: Any = value.shape[-1]
    both = [opened, a.permute(opened, (0, 2, 1, 3))]
    if opened.shape[0] == 1:  # turned before one sequence had a dim
        both.append(a.reshape(a.permute(a.reshape(opened, opened.shape[1:]), (1, 0, 2)), both[1].shape))
    starts = {0, *(each.attrs[1] for each in sources(value) if each.op == "slice")} if isinstance(count, int) else ()
    for start in sorted(starts):
        forms = [a.slice(each, -1, start, start + count) for each in both]
        if value in forms:
            return start, value is not forms[0]
    return None


@reader(
    gives=(
        LATENT_QUERIES,
        LATENT_KEYS,
        LATENT_VALUES,
        UNROTATED_QUERIES,
        UNROTATED_KEYS,
        ABSORBED_QUERY,
        HEAD_LANES,
    ),
    needs=("softmax_attention", "listed_attention", "topk_mask", "rotation"),
)
def latent_operands(graph: Graph) -> Iterator[Found]:
    """What queries, keys and values of attention are, if they come from a latent; why they do not."""
    listed = {value for value, _ in (*graph.readings.all("topk_mask"), *graph.readings.missed("sparse_attention"))}
    for root, attention in graph.readings.all("listed_attention"):
        parts = latents(graph.algebra, graph.readings, attention)
        if isinstance(parts, dict):
            yield from parts.items()
        else:
            yield root.arg, Miss("sparse_attention", parts or _NO_LATENT)  # what reads so itself is no miss
    for _, attention in graph.readings.all("softmax_attention"):
        parts = latents(graph.algebra, graph.readings, attention)
        if isinstance(parts, str):
            rule = "sparse_attention" if attention.captures.get("mask") in listed else "latent_attention"
            yield attention.captures["k"], Miss(rule, parts)
        elif parts is not None:
            yield from parts.items()
            k = attention.captures["k"]
            if k is attention.captures["v"]:  # one projection gives both
                of = parts[k].captures
                yield k, Reading("latent_values", {"latent": of["latent"], "up": swapped(graph.algebra, of["up"])})


@proof
def latents(a: Algebra, found: Readings, attention: Reading) -> Operands | str | None:
    """Readings of queries, keys and values of attention over a latent; why it is none; None if nothing is like it.

    Keys, values or both may be those of heads: else the model has absorbed what projects them.
    """
    q, k, v = (attention.captures[name] for name in ("q", "k", "v"))
    whole, rows = _uncut(k, v)
    keys, values = (once(a, each) for each in whole)
    if values.shape[1] == 1:
        latent, projected, tokens = values, {}, values
    else:
        of_values = proven(heads_projection(a, values, q.shape[1], values.shape[2]))
        latent, projected, tokens = of_values.source, {"up": swapped(a, of_values.lanes(a, v.shape[-1]))}, of_values.x
    if keys.shape[1] == 1:
        attended = proven(absorbed_keys(a, found, (q, k), (keys, rows), (latent, tokens)))
    else:
        of_keys = proven(keys_of_latent(a, keys, q.shape[1], keys.shape[2]))
        if isinstance(of_keys, str):
            return of_keys
        if of_keys.up.x is not _seen_as(a, tokens, of_keys.up.x.shape):
            return "keys and values are projected from different latents" if projected else None
        latent, (read, sources) = of_keys.up.source, proven(read_keys(a, found, q, k, of_keys, rows))
        attended = read | sources
    return {v: Reading("latent_values", {"latent": latent, **projected})} | attended


@dataclass(frozen=True)
class KeysOfLatent:
    """Keys [B, N, T, D]: `part`, lanes from `start` on that are projected for each head, and rotated ones of all heads.

    `rope`, from lane `offset` on, is None where no lanes are rotated.
    """

    up: HeadProjection
    part: Value
    start: int = 0
    rope: Value | None = None
    offset: int = 0


@proof
def keys_of_latent(a: Algebra, k: Value, heads: Any, count: Any) -> KeysOfLatent | str | None:
    """What keys [B, N, T, D] are made of, if some of their lanes are projected from a latent; why they are not."""
    parts = joined_parts(a, k)
    of_heads = ((start, each, heads_projection(a, each, heads, count)) for start, each in parts)
    projected = [(start, each, p) for start, each, p in of_heads if p is not None]
    must(projected)
    start, part, up = projected[0]
    if len(parts) == 1:
        return KeysOfLatent(up, part)
    shared = [(at, each) for at, each in ((s, once(a, e)) for s, e in parts) if each.shape[1] == 1]
    if len(shared) != 1 or len(parts) != 2:
        must(_is_less(up.source.shape[-1], heads * k.shape[-1]))  # else it is no latent but what heads are made of
        return "keys of a latent are read as one part that is projected for each head, and one that all heads share"
    return KeysOfLatent(up, part, start, shared[0][1], shared[0][0])


def _is_less(lanes: Any, others: Any) -> bool:
    """Whether so many lanes are known to be fewer."""
    return isinstance(lanes, int) and isinstance(others, int) and lanes < others


@proof
def read_keys(
    a: Algebra, found: Readings, q: Value, k: Value, keys: KeysOfLatent, rows: Any
) -> tuple[Operands, Operands] | None:
    """Readings of queries and of the first `rows` such keys; and where both parts of the queries come from."""
    up = keys.up.lanes(a, keys.part.shape[-1])
    nope = proven(_lanes(a, q, keys.start, keys.part.shape[-1]))
    rope = None if keys.rope is None else proven(_lanes(a, q, keys.offset, keys.rope.shape[-1]))
    turned = [] if rope is None else rotations(a, found, rope)
    absorbed = _absorbing(a, nope, up, turned)
    of_query = {"nope": nope, "absorbed": absorbed, "keys": k}
    of_keys = {"latent": keys.up.source, "up": up, "rows": rows}
    if rope is None:
        read = {q: Reading("unrotated_queries", of_query), k: Reading("unrotated_keys", of_keys)}
    else:
        read = {
            q: Reading("latent_queries", {**of_query, "rope": rope}),
            k: Reading("latent_keys", {**of_keys, "rope": keys.rope}),
        }
    return read, query_sources(a, (nope, up), absorbed, turned)


@proof
def absorbed_keys(
    a: Algebra, found: Readings, attending: tuple[Value, Value], held: tuple[Value, Any], latents: tuple[Value, Value]
) -> Operands | None:
    """Readings of queries and keys where the model absorbs the projection of these itself.

    The keys are the first rows, so many, of some [B, 1, T, C + Dr]; the latent is given as it lies, and by sequence.
    """
    (q, k), (keys, rows), (latent, tokens) = attending, held, latents
    width: Any = keys.shape[-1]
    count: Any = latent.shape[-1]
    must(isinstance(width, int) and isinstance(count, int) and count < width)
    plain = proven(_seen_as(a, tokens, (*keys.shape[:-1], count)))
    start = proven(next((at for at in (0, width - count) if _lanes(a, keys, at, count) is plain), None))
    behind, others = (count, width - count) if start == 0 else (0, start)
    rope = proven(_lanes(a, keys, behind, others))
    absorbed, rotated = (proven(_lanes(a, q, *of)) for of in ((start, count), (behind, others)))
    readings = {
        q: Reading("latent_queries", {"rope": rotated, "absorbed": absorbed, "keys": k}),
        k: Reading("latent_keys", {"latent": latent, "rope": rope, "rows": rows}),
    }
    factors = absorption(a, absorbed)
    if factors is None:
        absorbed, rotated = (_of_all_tokens(a, each) for each in (absorbed, rotated))
        factors = absorption(a, absorbed)
    if factors is None:
        return readings
    return readings | query_sources(a, factors, absorbed, rotations(a, found, rotated))


def _of_all_tokens(a: Algebra, x: Value) -> Value:
    """Lanes [1, N, T, D] of all packed tokens, of which those of one sequence are `x` [1, N, S, D]; else itself."""
    below = x.below("reshape")
    if x.op == "slice" and x.attrs[0] == 2 and x.shape[0] == 1:
        return x.arg
    if (
        below.op == "slice"
        and below.attrs[0] == 0
        and below.rank == 3
        and x.shape == (1, below.shape[1], 1, x.shape[-1])
    ):
        return a.permute(a.reshape(below.arg, (1, *below.arg.shape)), (0, 2, 1, 3))
    return x


def _seen_as(a: Algebra, x: Value, shape: Sequence[Any]) -> Value | None:
    """Rows as another arrangement of the same that differs by dims of size 1; None where it differs by more."""
    return a.reshape(x, shape) if but_ones(x.shape) == but_ones(shape) else None


def _uncut(k: Value, v: Value) -> tuple[tuple[Value, Value], int | None]:
    """Keys and values of which both are the first so many rows; themselves and None where they are no such cut."""
    (keys, rows), (values, alike) = first_rows(k), first_rows(v)
    return ((keys, values), rows) if rows == alike else ((k, v), None)


def first_rows(k: Value) -> tuple[Value, int | None]:
    """Of what keys [.., T, D] are the first so many rows, and how many; themselves and None for other keys."""
    if k.op == "slice" and k.attrs[0] == k.rank - 2 and k.attrs[1] == 0 and k.attrs[3] == 1:
        return k.arg, k.attrs[2]
    return k, None


def joined_parts(a: Algebra, k: Value) -> list[tuple[int, Value]]:
    """What keys are joined from, each with its first lane."""
    joined, axis = k, k.rank - 1
    while joined.op == "permute" or (joined.op == "reshape" and axis == joined.rank - 1 and _keeps_lanes(joined)):
        axis = joined.attrs[axis] if joined.op == "permute" else joined.arg.rank - 1
        joined = joined.arg
    if joined.op != "cat" or joined.attrs != (axis,) or not isinstance(k.shape[-1], int):
        return [(0, k)]
    widths: list[Any] = [each.shape[axis] for each in joined.args]
    ends = accumulate(widths)
    starts = [end - width for end, width in zip(ends, widths, strict=True)]
    parts = [(start, _lanes(a, k, start, width)) for start, width in zip(starts, widths, strict=True)]
    known = [(start, each) for start, each in parts if each is not None]
    return known if len(known) == len(parts) else [(0, k)]


def _absorbing(a: Algebra, nope: Value, up: Value, turned: Sequence[Reading]) -> Value:
    """Lanes [B, N, S, D] times up [N, D, C], as a product of tokens [N, T, D] where the model packs them."""
    if not _are_packed(turned):
        return proven(matmul(a, nope, up))
    product = proven(matmul(a, a.permute(packed(a, nope), (1, 0, 2)), up))
    return _opened(a, a.permute(product, (1, 0, 2)), nope)


@proof
def absorption(a: Algebra, absorbed: Value) -> tuple[Value, Value] | None:
    """Lanes [B, N, S, D] and matrices [N, D, C] of which `absorbed` is the product, of heads or of tokens [N, T, D].

    A number that the product is multiplied by is one of the lanes.
    """
    absorbed, number = unscaled(absorbed)
    product = proven(next((each for each in sources(absorbed) if each.op == "matmul"), None))
    x, up = product.args
    must(absorbed.rank == 4 and prod(up.shape[:-3]) == 1 and up.shape[-3:-2] == absorbed.shape[1:2])
    if product is absorbed:
        must(x.rank == 4)
    else:
        must(product.rank == x.rank == 3)
        opened = proven(
            next((each for each in (_by_tokens, _by_heads_first) if each(a, product, absorbed) is absorbed), None)
        )
        x = opened(a, x, absorbed)
    return a.scale(x, number), a.reshape(up, up.shape[-3:])


def _by_tokens(a: Algebra, flat: Value, like: Value) -> Value:
    """Heads [N, T, D] of tokens as [B, N, S, D], tokens put first."""
    return _opened(a, a.permute(flat, (1, 0, 2)), like)


def _by_heads_first(a: Algebra, flat: Value, like: Value) -> Value:
    """The same where tokens are opened behind their heads."""
    batch, count, rows, _ = like.shape
    return a.permute(a.reshape(flat, (count, batch, rows, flat.shape[-1])), (1, 0, 2, 3))


def packed(a: Algebra, heads: Value) -> Value:
    """Heads [B, N, S, D] as those of tokens [T, N, D]."""
    batch, count, rows, width = heads.shape
    return a.reshape(a.permute(heads, (0, 2, 1, 3)), (batch * rows, count, width))


def _are_packed(turned: Sequence[Reading]) -> bool:
    """Whether these rotations are of the heads of tokens without their sequences, [T, N, D], and of no others."""
    return bool(turned) and all(each.captures["x"].rank == 3 for each in turned)


def _opened(a: Algebra, flat: Value, like: Value) -> Value:
    """Heads of tokens [T, N, D] as [B, N, S, D], B and S those of `like`."""
    batch, count, rows, _ = like.shape
    return a.permute(a.reshape(flat, (batch, rows, count, flat.shape[-1])), (0, 2, 1, 3))


def _lanes(a: Algebra, x: Value, start: int, count: Any) -> Value | None:
    """Some lanes of a value; where it arranges what is joined of them, of what is joined, arranged alike."""
    views, joined = [], x
    while joined.op in ("reshape", "permute") and _keeps_lanes(joined):
        views.append(joined)
        joined = joined.arg
    if not views or joined.op != "cat" or joined.attrs != (joined.rank - 1,):
        return a.slice(x, -1, start, start + count)
    lanes = a.cut(joined, -1, start, start + count)
    for view in reversed(views):
        is_turned = view.op == "permute"
        lanes = a.permute(lanes, view.attrs) if is_turned else a.reshape(lanes, (*view.shape[:-1], count))
    return lanes


def _keeps_lanes(view: Value) -> bool:
    """Whether the last dim stays the last, and as it is."""
    return view.attrs[-1] == view.rank - 1 if view.op == "permute" else view.shape[-1:] == view.arg.shape[-1:]


Factors = tuple[Value, Value]
Lanes = Callable[[Algebra, Value, Any, Any], HeadLanes | None]


def query_sources(
    a: Algebra, factors: Factors, absorbed: Value, turned: Sequence[Reading], lanes_in: Lanes = head_projection
) -> Operands:
    """Where both parts of the queries come from, if one layer gives them."""
    (nope, up), (_, heads, rows, _) = factors, absorbed.shape
    sources: Operands = {}
    layer = lanes_in(a, nope, heads, rows)
    if layer is not None and (layer.heads_first or rows == 1):
        placed = packed(a, absorbed) if _are_packed(turned) else absorbed
        sources[placed] = Reading(layer.words[0], {**layer.captures(), "up": up})
        if a.reshape(absorbed, placed.shape) is placed:
            sources[absorbed] = sources[placed]  # which a node may hold before the other
    for rotation in turned:
        x = uncast(a, rotation.captures["x"], nope.dtype)
        lanes = lanes_in(a, x, heads, rows)  # what a rotation is multiplied by is in the tables
        if lanes is not None:
            sources[x] = Reading(lanes.words[1], {**lanes.captures(), "heads_first": lanes.heads_first})
    return sources


def heads_projection(a: Algebra, value: Value, heads: Any, rows: Any) -> HeadProjection | None:
    """The same where heads stand before positions, [B, N, S, D]: as many of both give either order this shape."""
    found = head_projection(a, value, heads, rows)
    return found if found is not None and (found.heads_first or rows == 1) else None


def pulled(a: Algebra, value: Value) -> tuple[Value, float]:
    """Lanes of heads, and the number that they, or all that they are cut from, are multiplied by."""
    if value.op not in ("slice", "permute", "reshape"):
        return unscaled(value)
    below, number = pulled(a, value.arg)
    if number == 1:
        return value, 1.0
    if value.op != "slice":
        return a.seen_as(below, value), number
    cut = a.slice(below, *value.attrs)
    return (value, 1.0) if cut is None else (cut, number)


def rotations(a: Algebra, found: Readings, rotated: Value) -> list[Reading]:
    """The rotations that give `rotated` [B, N, S, D], perhaps with heads behind positions, or as [T, N, D]."""
    forms = (rotated, a.permute(rotated, (0, 2, 1, 3)), packed(a, rotated))
    held = dict.fromkeys(each for form in forms for each in (form, form.below("cast")))
    return [reading for each in held for reading in found.of(each, "rotation")]
