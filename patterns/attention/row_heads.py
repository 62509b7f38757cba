"""Attention of one query of each head over keys that all heads share, where heads have stood in the place of queries.

Scores [B, N, T] may be those of one head with N queries, or of N heads with one query. They are read as the latter
where a part of the queries is a product of N matrices, one for each row: heads differ in their weights, queries do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion.graph import Algebra, Reading, Value
from patterns.latent.read import joined_parts, sources

Found = Mapping[Value, Reading | str]


def told_apart(a: Algebra, root: Value, found: Found) -> dict[Value, Reading]:
    """What is read anew of the attention `root`, if its rows are heads: itself, and how many keys its mask counts."""
    attention = found[root]
    assert isinstance(attention, Reading)
    q, k, v = (attention.captures[name] for name in ("q", "k", "v"))
    batch, one, heads, _ = q.shape
    mask = attention.captures.get("mask")
    listed = found.get(mask) if mask is not None else None
    if isinstance(listed, Reading) and listed.op != "key_lengths":
        return {}
    alike = mask is None or (mask.op == "expand" and mask.arg.rank == 4 and mask.arg.shape[1:3] == (1, 1))
    said = attention.captures
    alone = one == k.shape[1] == v.shape[1] == 1 and said["mask_kind"] in ("none", "dense") and "sink" not in said
    if not alike or not alone or not any(_by_heads(a, part, heads) for _, part in joined_parts(a, q)):
        return {}
    captures: dict[str, Any] = dict(said)
    captures["q"] = a.reshape(q, (batch, heads, 1, q.shape[-1]))
    if not captures["output_view"] or captures["output_view"][0][0] != "reshape":
        rows = (batch if isinstance(batch, int) else "B", 1, heads, v.shape[-1])
        captures["output_view"] = (("reshape", rows), *captures["output_view"])
    if mask is None:
        return {root: Reading(attention.op, captures, attention.relies)}
    captures["mask"] = mask.arg
    told = {root: Reading(attention.op, captures, attention.relies)}
    if not isinstance(listed, Reading):
        return told
    return told | {mask.arg: Reading(listed.op, {**listed.captures, "mask": mask.arg}, listed.relies)}


def _by_heads(a: Algebra, part: Value, heads: Any) -> bool:
    """Whether rows [B, 1, N, D] are products [N, B, D], each of a matrix of its own."""
    for each in sources(part):
        if each.op == "matmul":
            own = each.rank == 3 and each.args[1].shape[:-2] == (heads,) == each.shape[:1]
            return own and a.reshape(a.permute(each, (1, 0, 2)), part.shape) is part
    return False
