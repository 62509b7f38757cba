"""Latent attention: keys and values of all heads that are projected from one latent, and what may be absorbed.

    k[b, n, t] = [W_K[n] c[b, t], r[b, t]]      v[b, n, t] = c[b, t] W_V[n]
    q · k = (q_nope W_K) · c + q_rope · r        Σ p v = (Σ p c) W_V

Both lines on the right hold for every c, so that neither keys nor values need be computed (DeepSeek-V2, 2024, §2.1).
Which layer keys and values are projected by is read in `head_lanes`, what queries take over of it in `absorption`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fusion import reader
from fusion.analysis.row_layout import once
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Readings, Value
from fusion.graph.contractions import swapped
from fusion.graph.dims import but_ones
from fusion.graph.proof import must, proof, proven
from patterns.latent.read.absorption import Operands, absorb, absorption, query_sources, rotations
from patterns.latent.read.head_lanes import HeadProjection, heads_projection
from patterns.latent.words import (
    ABSORBED_QUERY,
    HEAD_LANES,
    LATENT_KEYS,
    LATENT_QUERIES,
    LATENT_VALUES,
    UNROTATED_KEYS,
    UNROTATED_QUERIES,
)

_NO_LATENT = "the rows that are listed are no latent with rotated lanes, of which the values are the latent"


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
    absorbed = absorb(a, nope, up, turned)
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
