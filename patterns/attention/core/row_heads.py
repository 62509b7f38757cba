"""Attention of one query of each head over keys that heads share, where heads have stood in the place of queries.

Scores [B, M, G, T] are those of M heads with G queries, or of groups of G heads with one: of the latter where a row of
queries [M · G · D] is opened to them, as one token is projected.

Scores [B, N, T] may be those of one head with N queries, or of N heads with one query. They are read as the latter
where a part of the queries is a product of N matrices, one for each row: heads differ in their weights, queries do not;
or where the values are lanes of the keys, which are a latent then: that is attended to by many heads.
"""

from __future__ import annotations

from math import prod
from typing import Any

from fusion.graph import Algebra, Reading, Value
from patterns.latent.read.head_lanes import sources
from patterns.latent.read.read import joined_parts


def told_apart(a: Algebra, attention: Reading) -> Reading:
    """Attention whose mask lists no keys as it is read anew if its rows are heads; else itself."""
    said = attention.captures
    q, k, v, mask = said["q"], said["k"], said["v"], said.get("mask")
    batch, one, heads, _ = q.shape
    alike = mask is None or (mask.op == "expand" and mask.arg.rank == 4 and mask.arg.shape[1:3] == (1, 1))
    alone = one == k.shape[1] == v.shape[1] == 1 and not {"sink", "bias", "levels"} & set(said)
    if not alike or not alone or not (_is_latent(a, k, v, heads) or _are_by_heads(a, q, heads)):
        return attention
    captures: dict[str, Any] = {**said, "q": a.reshape(q, (batch, heads, 1, q.shape[-1]))}
    if not said["output_view"] or said["output_view"][0][0] != "reshape":
        rows = (batch if isinstance(batch, int) else "B", 1, heads, v.shape[-1])
        captures["output_view"] = (("reshape", rows), *said["output_view"])
    if mask is not None:
        captures["mask"] = mask.arg
    return Reading(attention.op, captures, attention.relies)


MOST = 128
"""The most heads that attention is known to have."""


def in_groups(q: Value) -> bool:
    """Whether the last dims before the lanes of queries [.., M, G, D] are heads, opened from one dim."""
    shared, group = q.shape[-3:-1]
    if not all(isinstance(each, int) for each in (shared, group)) or not 1 < group <= shared * group <= MOST:
        return False
    return _is_opened(q, q.rank - 3)


def _is_opened(x: Value, axis: int) -> bool:
    """Whether a dim and the one behind it were one, as far as one can look back."""
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
"""Ops on lanes, beside each other."""


def _is_latent(a: Algebra, k: Value, v: Value, heads: Any) -> bool:
    """Whether values are the first or the last lanes of keys, of which so many heads may be."""
    width, count = k.shape[-1], v.shape[-1]
    if not all(isinstance(each, int) for each in (width, count, heads)) or heads > MOST:
        return False
    lanes: Any = width - count
    return lanes > 0 and any(a.slice(k, -1, at, at + int(count)) is v for at in (0, lanes))


def _are_by_heads(a: Algebra, q: Value, heads: Any) -> bool:
    """Whether a part of the queries is a product for each head."""
    return any(_by_heads(a, part, heads) for _, part in joined_parts(a, q))


def _by_heads(a: Algebra, part: Value, heads: Any) -> bool:
    """Whether rows [B, 1, N, D] are products [N, B, D], each of a matrix of its own."""
    for each in sources(part):
        if each.op == "matmul":
            own = each.rank == 3 and each.args[1].shape[:-2] == (heads,) == each.shape[:1]
            return own and a.reshape(a.permute(each, (1, 0, 2)), part.shape) is part
    return False
