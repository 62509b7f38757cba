"""Absorbed queries q_nope W_UK of attention over a latent, in the model or to be built, and the layer of q_nope.

The product with W_UK [N, D, C] is over heads of sequences [B, N, S, D], or over heads of packed tokens [N, T, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from fusion.analysis.rounding import unscaled
from fusion.analysis.row_layout import unwidened
from fusion.graph import Algebra, Reading, Readings, Value
from fusion.graph.contractions import matmul
from fusion.graph.proof_steps import must, proof, proven
from patterns.kit.lanes import sources
from patterns.latent.read.head_lanes import HeadLanes, head_projection

Operands = dict[Value, Reading]
"""Readings of the operands of attention."""

Factors = tuple[Value, Value]
"""Queries before absorption [B, N, S, D], and W_UK [N, D, C]."""

Lanes = Callable[[Algebra, Value, Any, Any], HeadLanes | None]
"""Function of lanes of heads, numbers of heads and of rows, that returns the layer of the lanes, or None."""


def absorb(a: Algebra, nope: Value, up: Value, rotated: Sequence[Reading]) -> Value:
    """Multiply `nope` [B, N, S, D] by `up` [N, D, C], as [N, T, D] if the `rotated` lanes are of packed tokens."""
    if not _are_packed(rotated):
        return proven(matmul(a, nope, up))
    product = proven(matmul(a, a.permute(packed(a, nope), (1, 0, 2)), up))
    return _opened(a, a.permute(product, (1, 0, 2)), nope)


@proof
def absorption(a: Algebra, absorbed: Value) -> Factors | None:
    """Return the factors [B, N, S, D] and [N, D, C] of the product `absorbed` [B, N, S, C]; None if it is no product.

    The model may multiply heads of packed tokens [N, T, D]. A number that the product is multiplied by becomes a factor
    of the first.
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
    """Convert heads `flat` [N, T, D] to [B, N, S, D], by way of [T, N, D]."""
    return _opened(a, a.permute(flat, (1, 0, 2)), like)


def _by_heads_first(a: Algebra, flat: Value, like: Value) -> Value:
    """Convert heads `flat` [N, T, D] to [B, N, S, D], by way of [N, B, S, D]."""
    batch, count, rows, _ = like.shape
    return a.permute(a.reshape(flat, (count, batch, rows, flat.shape[-1])), (1, 0, 2, 3))


def packed(a: Algebra, heads: Value) -> Value:
    """Convert `heads` [B, N, S, D] to [B · S, N, D]."""
    batch, count, rows, width = heads.shape
    return a.reshape(a.permute(heads, (0, 2, 1, 3)), (batch * rows, count, width))


def _are_packed(rotated: Sequence[Reading]) -> bool:
    """Return True if there are rotations, and all are of heads of packed tokens [T, N, D]."""
    return bool(rotated) and all(each.captures["x"].rank == 3 for each in rotated)


def _opened(a: Algebra, flat: Value, like: Value) -> Value:
    """Convert heads `flat` [B · S, N, D] to [B, N, S, D], with B and S of `like` [B, N, S, ..]."""
    batch, count, rows, _ = like.shape
    return a.permute(a.reshape(flat, (batch, rows, count, flat.shape[-1])), (0, 2, 1, 3))


def query_sources(
    a: Algebra, factors: Factors, absorbed: Value, rotated: Sequence[Reading], lanes_in: Lanes = head_projection
) -> Operands:
    """Read the absorbed queries, and the arguments of the rotations `rotated`, as lanes of a linear layer.

    Args:
        a: the algebra of the graph.
        factors: queries before absorption [B, N, S, D], and W_UK [N, D, C].
        absorbed: their product [B, N, S, C].
        rotated: readings of the rotations of the other lanes of the queries.
        lanes_in: recognises a value as lanes of each head of a layer.

    Returns:
        A reading for each value that is lanes of a layer; none for others.
    """
    (nope, up), (_, heads, rows, _) = factors, absorbed.shape
    sources: Operands = {}
    layer = lanes_in(a, nope, heads, rows)
    if layer is not None and (layer.heads_first or rows == 1):
        placed = packed(a, absorbed) if _are_packed(rotated) else absorbed
        sources[placed] = Reading(layer.words[0], {**layer.captures(), "up": up})
        if a.reshape(absorbed, placed.shape) is placed:
            sources[absorbed] = sources[placed]  # a node may compute it before `placed`
    for rotation in rotated:
        x = unwidened(a, rotation.captures["x"], nope.dtype)
        lanes = lanes_in(a, x, heads, rows)  # without a factor: that of a rotation is in its tables
        if lanes is not None:
            sources[x] = Reading(lanes.words[1], {**lanes.captures(), "heads_first": lanes.heads_first})
    return sources


def rotations(a: Algebra, readings: Readings, rotated: Value) -> list[Reading]:
    """List the rotations whose result is `rotated` [B, N, S, D], its transpose [B, S, N, D], or [B · S, N, D]."""
    forms = (rotated, a.permute(rotated, (0, 2, 1, 3)), packed(a, rotated))
    results = dict.fromkeys(each for form in forms for each in (form, form.below("cast")))
    return [reading for each in results for reading in readings.of(each, "rotation")]
