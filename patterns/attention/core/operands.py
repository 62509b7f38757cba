"""Queries, keys and values of attention as [B, N, S, D], every key head once, in one dtype or dequantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusion.analysis.row_layout import narrowed
from fusion.graph import Algebra, Miss, Reading, Value
from patterns.attention.core.core import Core
from patterns.attention.core.frames import Attended, Frame, scaled_queries
from patterns.attention.core.read_encoded import are_encoded
from patterns.attention.masks.assumed import Assumed

APART = (
    "keys, values: they differ among the queries of one head; npu_fused_infer_attention_score requires one "
    "tensor of keys and one of values for all queries of a head"
)
SEVERAL = (
    "scores: parts of one row have a scale or a mask of their own; npu_fused_infer_attention_score "
    "requires one scale and one mask; write both once, on the joined scores"
)


Outcome = dict[Value, Reading | Miss]
"""The reading or miss of each value, in this order: operands, the attention, its mask."""

Read = tuple[Mapping[str, Any], Outcome]
"""The captures for queries, keys and values, and readings of other values."""

Operands = Callable[[Assumed, Core, Frame, Value, Value, Value], "Read | Miss | str | None"]
"""Reads q [B, N, S, D], k [B, M, T, D] and v [B, M, T, E] of a core with rows as in a frame.

A `Miss`, or the reason for one, if they only resemble such operands; None if they do not.
"""


def heads_of(a: Algebra, attended: Attended, frame: Frame, core: Core) -> tuple[Value, Value, Value] | str:
    """Arrange `attended`, the operands of `core`, by `frame`: q [B, N, S, D], k [B, M, T, D], v [B, M, T, E].

    The reason if they have no such form.
    """
    q = attended.queries
    if q.shape[:-1] != core.weights.softmax.shape[:-1]:
        return SEVERAL
    k, v = attended.keys_and_values(frame)
    if k is None or v is None:
        return APART
    q = a.reshape(q, (*frame.sizes, q.shape[-1]))
    shared = k.shape[1] if _divides(v.shape[1], k.shape[1]) else v.shape[1]
    if not _divides(k.shape[1], shared):
        return (
            "keys, values: a head of keys serves other query heads than the head of values; "
            "npu_fused_infer_attention_score requires the same groups for both; repeat both alike"
        )
    return q, _spread(a, k, shared), _spread(a, v, shared)


def in_floats(assumed: Assumed, core: Core, frame: Frame, q: Value, k: Value, v: Value) -> Read | str:
    """Read `q`, `k` and `v` in one floating-point dtype, or `q` in it and keys and values dequantised."""
    a, root, scores = assumed.algebra, core.root, core.scores
    out_dtype = core.product.dtype if ("cast", (root.dtype,)) in core.finish else root.dtype
    stored = are_encoded(a, k, v)
    for dtype in filter(None, (root.dtype, assumed.rounded(root))):
        narrow = [narrowed(a, each, dtype) for each in (q, k, v)]
        if all(each.dtype == dtype for each in (narrow[:1] if stored else narrow)):
            (q, k, v), out_dtype = narrow, out_dtype if dtype == root.dtype else dtype
    mixed = stored and not out_dtype == q.dtype == k.dtype == v.dtype
    if len({out_dtype, q.dtype} if mixed else {out_dtype, q.dtype, k.dtype, v.dtype}) != 1:
        have = [str(each).removeprefix("torch.") for each in (q.dtype, k.dtype, v.dtype, out_dtype)]
        return (
            "queries, keys, values, result: their dtypes are {}, {}, {} and {}; "
            "npu_fused_infer_attention_score requires one dtype; cast them to one"
        ).format(*have)
    captures = {"q": scaled_queries(a, q, scores.factors, frame), "k": k, "v": v}
    return captures | ({"mixed": True} if mixed else {}), {}


def _divides(part: Any, total: Any) -> bool:
    return part == total or (isinstance(part, int) and isinstance(total, int) and part > 0 and total % part == 0)


def _spread(a: Algebra, kv: Value, heads: Any) -> Value:
    """Repeat each head of `kv` [B, M, T, D] so that there are `heads`."""
    batch, own, *rows = kv.shape
    if own == heads:
        return kv
    opened = a.expand(a.reshape(kv, (batch, own, 1, *rows)), (batch, own, heads // own, *rows))
    return a.reshape(opened, (batch, heads, *rows))
