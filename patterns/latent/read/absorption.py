"""Queries of attention over a latent, q_nope W_UK: what the model absorbs itself, and what would be absorbed.

Heads stand by sequence [B, N, S, D], or as those of packed tokens [T, N, D]; a product by W_UK [N, D, C] may be of
either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from fusion.analysis.rounding import unscaled
from fusion.analysis.row_layout import uncast
from fusion.graph import Algebra, Reading, Readings, Value
from fusion.graph.contractions import matmul
from fusion.graph.proof import must, proof, proven
from patterns.latent.read.head_lanes import HeadLanes, head_projection, sources

Operands = dict[Value, Reading]
"""What the operands of attention are."""

Factors = tuple[Value, Value]
"""Lanes of queries before W_UK [B, N, S, D], and W_UK [N, D, C]."""

Lanes = Callable[[Algebra, Value, Any, Any], HeadLanes | None]
"""From lanes of heads, how many heads and how many rows there are, to the layer that gives them."""


def absorb(a: Algebra, nope: Value, up: Value, turned: Sequence[Reading]) -> Value:
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


def rotations(a: Algebra, found: Readings, rotated: Value) -> list[Reading]:
    """The rotations that give `rotated` [B, N, S, D], perhaps with heads behind positions, or as [T, N, D]."""
    forms = (rotated, a.permute(rotated, (0, 2, 1, 3)), packed(a, rotated))
    held = dict.fromkeys(each for form in forms for each in (form, form.below("cast")))
    return [reading for each in held for reading in found.of(each, "rotation")]
