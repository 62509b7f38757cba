"""Attention of one query of each head over keys that all heads share, where heads have stood in the place of queries.

Scores [B, N, T] may be those of one head with N queries, or of N heads with one query. They are read as the latter
where a part of the queries is a product of N matrices, one for each row: heads differ in their weights, queries do not;
or where the values are lanes of the keys, which are a latent then: that is attended to by many heads.
"""

from __future__ import annotations

from typing import Any

from fusion.graph import Algebra, Reading, Value
from patterns.latent.head_lanes import sources
from patterns.latent.read import joined_parts


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
"""The most heads that attention over a latent is known to have."""


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
