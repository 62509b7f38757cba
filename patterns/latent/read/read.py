"""Readers of latent attention: queries, keys and values of heads whose keys and values are projected from one latent.

    k[b, n, t] = [W_K[n] c[b, t], r[b, t]]      v[b, n, t] = c[b, t] W_V[n]
    q · k = (q_nope W_K) · c + q_rope · r        Σ p v = (Σ p c) W_V

The second line holds for every c, so that neither keys nor values need be computed (DeepSeek-V2, 2024, §2.1).
`head_lanes` recognises the layer that projects keys and values, `absorption` the queries that absorb W_K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusion import reader
from fusion.analysis.row_layout import once
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Readings, Value
from fusion.graph.contractions import swapped
from fusion.graph.dims import but_ones
from fusion.graph.proof_steps import must, proof, proven
from patterns.kit.lanes import joined_parts, lanes
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

_NO_LATENT = (
    "listed rows: they are no latent with rotated lanes, of which the values are the latent; "
    "npu_sparse_flash_attention requires keys [latent, rope] and values latent of one cache"
)


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
def latent_operands(graph: Graph) -> Iterator[Annotation]:
    """Read every latent_queries, latent_keys, latent_values of attention, unrotated ones, and layers of the queries."""
    listed = {value for value, _ in (*graph.readings.all("topk_mask"), *graph.readings.missed("sparse_attention"))}
    for root, attention in graph.readings.all("listed_attention"):
        parts = latents(graph.algebra, graph.readings, attention)
        if isinstance(parts, dict):
            yield from parts.items()
        else:
            # not `root`: a value with a reading is no miss
            yield root.arg, Miss("sparse_attention", parts or _NO_LATENT)
    for _, attention in graph.readings.all("softmax_attention"):
        parts = latents(graph.algebra, graph.readings, attention)
        if isinstance(parts, str):
            rule = "sparse_attention" if attention.captures.get("mask") in listed else "latent_attention"
            yield attention.captures["k"], Miss(rule, parts)
        elif parts is not None:
            yield from parts.items()
            k = attention.captures["k"]
            if k is attention.captures["v"]:  # one projection gives both
                keys = parts[k].captures
                yield k, Reading("latent_values", {"latent": keys["latent"], "up": swapped(graph.algebra, keys["up"])})


@proof
def latents(a: Algebra, readings: Readings, attention: Reading) -> Operands | str | None:
    """Return the readings of queries, keys and values of attention over a latent.

    Keys or values with a single head are those of a model that absorbs their projection itself. A string is the reason
    why the operands are not those of a latent, None if nothing looks like it.
    """
    q, k, v = (attention.captures[name] for name in ("q", "k", "v"))
    full, rows = _uncut(k, v)
    keys, values = (once(a, each) for each in full)
    if values.shape[1] == 1:
        latent, up, tokens = values, {}, values
    else:
        projection = proven(heads_projection(a, values, q.shape[1], values.shape[2]))
        latent, up, tokens = projection.source, {"up": swapped(a, projection.lanes(a, v.shape[-1]))}, projection.x
    if keys.shape[1] == 1:
        attended = proven(absorbed_keys(a, readings, (q, k), (keys, rows), (latent, tokens)))
    else:
        projected = proven(keys_of_latent(a, keys, q.shape[1], keys.shape[2]))
        if isinstance(projected, str):
            return projected
        if projected.up.x is not _seen_as(a, tokens, projected.up.x.shape):
            return (
                (
                    "keys, values: they are projected from different latents; npu_fused_infer_attention_score "
                    "requires one latent for both here; project W_UK and W_UV from one normed latent"
                )
                if up
                else None
            )
        latent, (read, sources) = projected.up.source, proven(read_keys(a, readings, q, k, projected, rows))
        attended = read | sources
    return {v: Reading("latent_values", {"latent": latent, **up})} | attended


@dataclass(frozen=True)
class KeysOfLatent:
    """Keys [B, N, T, D] that are projected from a latent, with rotated lanes that all heads share.

    Attributes:
        up: the projection of `part`.
        part, start: lanes that are projected for each head, and the first of them in the keys.
        rope, offset: rotated lanes [B, 1, T, Dr], None if there are none, and the first of them in the keys.
    """

    up: HeadProjection
    part: Value
    start: int = 0
    rope: Value | None = None
    offset: int = 0


@proof
def keys_of_latent(a: Algebra, k: Value, heads: Any, count: Any) -> KeysOfLatent | str | None:
    """Split keys `k` [B, N, T, D] of `count` positions into lanes projected from a latent and shared rotated lanes.

    A string is the reason why the keys of a latent cannot be split so; None if no lanes are projected for each head.
    """
    parts = joined_parts(a, k)
    projections = ((start, each, heads_projection(a, each, heads, count)) for start, each in parts)
    projected = [(start, each, p) for start, each, p in projections if p is not None]
    must(projected)
    start, part, up = projected[0]
    if len(parts) == 1:
        return KeysOfLatent(up, part)
    shared = [(at, each) for at, each in ((s, once(a, e)) for s, e in parts) if each.shape[1] == 1]
    if len(shared) != 1 or len(parts) != 2:
        must(_is_less(up.source.shape[-1], heads * k.shape[-1]))  # a latent has fewer lanes than all heads
        return (
            "keys: they are more than a part that is projected for each head and one that all heads share; "
            "npu_fused_infer_attention_score requires k = [c W_UK, rope] with one rope for all heads; write "
            "torch.cat([k_nope, k_rope.expand(..)], -1)"
        )
    return KeysOfLatent(up, part, start, shared[0][1], shared[0][0])


def _is_less(lanes: Any, others: Any) -> bool:
    """Return True if both numbers are known, and `lanes` is less than `others`."""
    return isinstance(lanes, int) and isinstance(others, int) and lanes < others


@proof
def read_keys(
    a: Algebra, readings: Readings, q: Value, k: Value, keys: KeysOfLatent, rows: Any
) -> tuple[Operands, Operands] | None:
    """Return the readings of queries `q` and keys `k` of attention over a latent, and those of the layer of the
    queries.

    `keys` describes the keys of which `k` is the first `rows`, or all if None. None if the lanes of `q` cannot be split
    as those of the keys are.
    """
    up = keys.up.lanes(a, keys.part.shape[-1])
    nope = proven(lanes(a, q, keys.start, keys.part.shape[-1]))
    rope = None if keys.rope is None else proven(lanes(a, q, keys.offset, keys.rope.shape[-1]))
    rotated = [] if rope is None else rotations(a, readings, rope)
    absorbed = absorb(a, nope, up, rotated)
    query_captures = {"nope": nope, "absorbed": absorbed, "keys": k}
    key_captures = {"latent": keys.up.source, "up": up, "rows": rows}
    if rope is None:
        read = {q: Reading("unrotated_queries", query_captures), k: Reading("unrotated_keys", key_captures)}
    else:
        read = {
            q: Reading("latent_queries", {**query_captures, "rope": rope}),
            k: Reading("latent_keys", {**key_captures, "rope": keys.rope}),
        }
    return read, query_sources(a, (nope, up), absorbed, rotated)


@proof
def absorbed_keys(
    a: Algebra,
    readings: Readings,
    attending: tuple[Value, Value],
    cached: tuple[Value, Any],
    latents: tuple[Value, Value],
) -> Operands | None:
    """Return the readings of queries and keys, and of the queries' layer, of a model that absorbs W_UK itself.

    `attending` are queries and keys; `cached` the keys [B, 1, T, C + Dr] before a cut, and the number of leading rows
    that the cut takes (None: all); `latents` the latent in the shape of the model, and as [B, 1, T, C] or [B, T, C].
    """
    (q, k), (keys, rows), (latent, tokens) = attending, cached, latents
    width: Any = keys.shape[-1]
    count: Any = latent.shape[-1]
    must(isinstance(width, int) and isinstance(count, int) and count < width)
    plain = proven(_seen_as(a, tokens, (*keys.shape[:-1], count)))
    start = proven(next((at for at in (0, width - count) if lanes(a, keys, at, count) is plain), None))
    behind, others = (count, width - count) if start == 0 else (0, start)
    rope = proven(lanes(a, keys, behind, others))
    absorbed, rotated = (proven(lanes(a, q, *bounds)) for bounds in ((start, count), (behind, others)))
    operands = {
        q: Reading("latent_queries", {"rope": rotated, "absorbed": absorbed, "keys": k}),
        k: Reading("latent_keys", {"latent": latent, "rope": rope, "rows": rows}),
    }
    factors = absorption(a, absorbed)
    if factors is None:
        absorbed, rotated = (_before_split(a, each) for each in (absorbed, rotated))
        factors = absorption(a, absorbed)
    if factors is None:
        return operands
    return operands | query_sources(a, factors, absorbed, rotations(a, readings, rotated))


def _before_split(a: Algebra, x: Value) -> Value:
    """Return the lanes [1, N, T, D] of all packed tokens if `x` [1, N, S, D] is a slice of them along the tokens; else
    `x`.
    """
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
    """Reshape `x` to `shape` if only dims of size 1 differ; else None."""
    return a.reshape(x, shape) if but_ones(x.shape) == but_ones(shape) else None


def _uncut(k: Value, v: Value) -> tuple[tuple[Value, Value], int | None]:
    """Return the keys and values of which `k` and `v` are the first rows, and the number of these rows.

    `k`, `v` and None if they are not sliced so, or to different lengths.
    """
    (keys, rows), (values, value_rows) = first_rows(k), first_rows(v)
    return ((keys, values), rows) if rows == value_rows else ((k, v), None)


def first_rows(k: Value) -> tuple[Value, int | None]:
    """Return the keys of which `k` [.., T, D] is the first rows, and the number of these rows; `k` and None if it is no
    slice.
    """
    if k.op == "slice" and k.attrs[0] == k.rank - 2 and k.attrs[1] == 0 and k.attrs[3] == 1:
        return k.arg, k.attrs[2]
    return k, None
