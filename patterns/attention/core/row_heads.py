"""Attention of one query of each head over keys that all heads share, with the heads in the dim of queries.

Scores [B, M, G, T] are those of M heads with G queries, or of groups of G heads with one query: the latter, if the
queries [M · G · D] of one token were split into these dims.

Scores [B, N, T] are those of one head with N queries, or of N heads with one query: the latter, if a part of the
queries is a product of N matrices, one for each row, as heads differ in their weights and queries do not; or if the
values are lanes of the keys, as many heads attend to one latent, unless one matrix for all rows gives a part of the
queries, as it absorbs the projection of a single head.
"""

from __future__ import annotations

from math import prod
from typing import Any

from fusion.graph import Algebra, Reading, Value
from patterns.kit.lanes import joined_parts, sources


def rows_as_heads(a: Algebra, attention: Reading) -> Reading:
    """Rewrite `attention` of one head with N queries to N heads with one query, if its rows are heads.

    The mask must be the same for all rows. Any other `attention` is returned as it is.
    """
    captures = attention.captures
    q, k, v, mask = captures["q"], captures["k"], captures["v"], captures.get("mask")
    batch, one, heads, _ = q.shape
    alike = mask is None or (mask.op == "expand" and mask.arg.rank == 4 and mask.arg.shape[1:3] == (1, 1))
    alone = one == k.shape[1] == v.shape[1] == 1 and not {"sink", "bias", "levels"} & set(captures)
    are_heads = _is_latent(a, k, v, heads) and not _are_by_one_matrix(a, q)
    if not alike or not alone or not (are_heads or _are_by_heads(a, q, heads)):
        return attention
    by_heads: dict[str, Any] = {**captures, "q": a.reshape(q, (batch, heads, 1, q.shape[-1]))}
    if not captures["output_view"] or captures["output_view"][0][0] != "reshape":
        rows = (batch if isinstance(batch, int) else "B", 1, heads, v.shape[-1])
        by_heads["output_view"] = (("reshape", rows), *captures["output_view"])
    if mask is not None:
        by_heads["mask"] = mask.arg
    return Reading(attention.op, by_heads, attention.relies)


MOST = 128
"""The most heads that a row of queries is taken for."""


def in_groups(q: Value) -> bool:
    """Return True if the dims M and G of queries `q` [.., M, G, D] are heads: split from one dim, and at most
    `MOST`.
    """
    shared, group = q.shape[-3:-1]
    if not all(isinstance(each, int) for each in (shared, group)) or not 1 < group <= shared * group <= MOST:
        return False
    return _is_opened(q, q.rank - 3)


def _is_opened(x: Value, axis: int) -> bool:
    """Return True if a reshape below `x`, casts and ops on lanes split dims `axis` and `axis` + 1 from one dim."""
    while x.op == "cast" or x.op in _BY_LANES:
        alike = (each for each in x.args if each.shape[:-1] == x.shape[:-1])
        below = next(alike, None)
        if below is None:
            return False
        x = below
    if x.op != "reshape":
        return False
    two, before = x.shape[axis : axis + 2], prod(x.shape[:axis])
    for place, size in enumerate(x.arg.shape):
        if prod(x.arg.shape[:place]) == before and size != 1:
            if x.arg.shape[place : place + 2] == two:
                return _is_opened(x.arg, place)
            return isinstance(size, int) and size % prod(two) == 0
    return False


_BY_LANES = ("scale", "mul", "add", "cat", "slice")
"""Ops that read and give lanes, and leave the dims of rows as they are."""


def _is_latent(a: Algebra, k: Value, v: Value, heads: Any) -> bool:
    """Return True if `v` is the first or the last lanes of `k`, and `heads` is at most `MOST`."""
    width, count = k.shape[-1], v.shape[-1]
    if not all(isinstance(each, int) for each in (width, count, heads)) or heads > MOST:
        return False
    lanes: Any = width - count
    return lanes > 0 and any(a.slice(k, -1, at, at + int(count)) is v for at in (0, lanes))


def _are_by_heads(a: Algebra, q: Value, heads: Any) -> bool:
    """Return True if some lanes of `q` [B, 1, N, D] are a product with one matrix for each of the N `heads`."""
    return any(_by_heads(a, part, heads) for _, part in joined_parts(a, q))


def _by_heads(a: Algebra, part: Value, heads: Any) -> bool:
    """Return True if `part` [B, 1, N, D] is a batched product [N, B, D], with one matrix for each of the N `heads`."""
    for each in sources(part):
        if each.op == "matmul":
            own = each.rank == 3 and each.args[1].shape[:-2] == (heads,) == each.shape[:1]
            return own and a.reshape(a.permute(each, (1, 0, 2)), part.shape) is part
    return False


def _are_by_one_matrix(a: Algebra, q: Value) -> bool:
    """Return True if some lanes of `q` [B, 1, N, D] are a product of all N rows with one matrix."""
    products = ((part, each) for _, part in joined_parts(a, q) for each in [part.below("reshape", "permute")])
    return any(
        each.op == "matmul" and prod(each.args[1].shape[:-2]) == 1 and each.shape[-2:] == part.shape[-2:]
        for part, each in products
    )
