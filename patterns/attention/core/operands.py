"""Queries, keys and values of attention as [B, N, S, D], every key head once, in one dtype or in int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion.analysis.row_layout import narrowed
from fusion.graph import Algebra, Miss, Reading, Value
from patterns.attention.core.divided_late import Finish
from patterns.attention.core.empty_rows import Empty
from patterns.attention.core.frames import Attended, Frame, scaled_queries
from patterns.attention.core.read_int8 import are_int8
from patterns.attention.core.scores import Scores
from patterns.attention.core.weights import Weights, empty_rows
from patterns.attention.masks.assumed import Assumed
from patterns.latent.attention import int8_operands

APART = (
    "keys or values are not the same for the queries of one head; "
    "npu_fused_infer_attention_score requires one tensor of keys and one of values for all "
    "queries of a head"
)
SEVERAL = (
    "one row of scores is scaled or masked in several ways; "
    "npu_fused_infer_attention_score requires one scale and one mask"
)


@dataclass(frozen=True)
class Pieces:
    """The parts of an attention: the product P v, its weights, their scores, and the steps after the product."""

    product: Value
    weights: Weights
    scores: Scores
    finish: Finish

    @property
    def empty(self) -> Empty:
        """The behaviour of the softmax on rows without a key."""
        return empty_rows(self.weights, self.scores)


Outcome = dict[Value, Reading | Miss]
"""The reading or miss of each value, in this order: operands, the attention, its mask."""

Inputs = tuple[Mapping[str, Any], Outcome, tuple[Any, Any]]
"""The captures q, k and v (or those of int8 attention), readings of other values, and (T, E)."""


def operands_of(assumed: Assumed, root: Value, attended: Attended, frame: Frame, parts: Pieces) -> Inputs | Miss | str:
    """Read the operands of attention `parts` with the rows of `frame`: q [B, N, S, D], k [B, M, T, D], v [B, M, T, E].

    Args:
        assumed: facts about the graph.
        root: the result of the attention.
        attended: queries, keys and values before a frame is chosen.
        frame: which dims of the rows are sequences, heads and queries.
        parts: product, weights and scores of the attention.

    Returns:
        The inputs; a `Miss`, or the reason for one, if the operands have no such form.
    """
    a, scores, q = assumed.algebra, parts.scores, attended.queries
    if q.shape[:-1] != parts.weights.softmax.shape[:-1]:
        return SEVERAL
    k, v = attended.keys_and_values(frame)
    if k is None or v is None:
        return APART
    q = a.reshape(q, (*frame.sizes, q.shape[-1]))
    shared = k.shape[1] if _divides(v.shape[1], k.shape[1]) else v.shape[1]
    if not _divides(k.shape[1], shared):
        return (
            "keys and values are shared by other groups of heads; npu_fused_infer_attention_score "
            "requires the same groups for both"
        )
    k, v = (_spread(a, each, shared) for each in (k, v))
    sizes = k.shape[2], v.shape[-1]
    quantised = int8_operands.parts(a, scaled_queries(a, q, scores.factors, frame), k, v)
    if quantised is not None:
        return quantised if isinstance(quantised, Miss) else (*quantised, sizes)
    out_dtype = parts.product.dtype if ("cast", (root.dtype,)) in parts.finish else root.dtype
    int8 = are_int8(a, k, v)
    for dtype in filter(None, (root.dtype, assumed.rounded(root))):
        narrow = [narrowed(a, each, dtype) for each in (q, k, v)]
        if all(each.dtype == dtype for each in (narrow[:1] if int8 else narrow)):
            (q, k, v), out_dtype = narrow, out_dtype if dtype == root.dtype else dtype
    mixed = int8 and not out_dtype == q.dtype == k.dtype == v.dtype
    if len({out_dtype, q.dtype} if mixed else {out_dtype, q.dtype, k.dtype, v.dtype}) != 1:
        have = [str(each).removeprefix("torch.") for each in (q.dtype, k.dtype, v.dtype, out_dtype)]
        return "queries, keys, values and result have different dtypes: {}, {}, {} and {}".format(*have)
    captures = {"q": scaled_queries(a, q, scores.factors, frame), "k": k, "v": v}
    return captures | ({"mixed": True} if mixed else {}), {}, sizes


def _divides(part: Any, total: Any) -> bool:
    return part == total or (isinstance(part, int) and isinstance(total, int) and part > 0 and total % part == 0)


def _spread(a: Algebra, kv: Value, heads: Any) -> Value:
    """Repeat each head of `kv` [B, M, T, D] so that there are `heads`."""
    batch, own, *rows = kv.shape
    if own == heads:
        return kv
    opened = a.expand(a.reshape(kv, (batch, own, 1, *rows)), (batch, own, heads // own, *rows))
    return a.reshape(opened, (batch, heads, *rows))
