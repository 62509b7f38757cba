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
class Parts:
    """Attention taken apart: the product of weights and values, the softmax, the scores, and what follows."""

    product: Value
    weights: Weights
    scores: Scores
    finish: Finish

    @property
    def empty(self) -> Empty:
        """What the softmax makes of a row without a key."""
        return empty_rows(self.weights, self.scores)


Outcome = dict[Value, Reading | Miss]
"""What values mean, that of an attention last but for its mask."""

Inputs = tuple[Mapping[str, Any], Outcome, tuple[Any, Any]]
"""Queries, keys and values by their names, what else they mean, and how many keys and lanes of a value there are."""


def operands_of(assumed: Assumed, root: Value, attended: Attended, frame: Frame, of: Parts) -> Inputs | Miss | str:
    """Those of rows of a frame; or why they are none."""
    a, scores, q = assumed.algebra, of.scores, attended.queries
    if q.shape[:-1] != of.weights.softmax.shape[:-1]:
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
    whole = int8_operands.parts(a, scaled_queries(a, q, scores.factors, frame), k, v)
    if whole is not None:
        return whole if isinstance(whole, Miss) else (*whole, sizes)
    given = of.product.dtype if ("cast", (root.dtype,)) in of.finish else root.dtype
    int8 = are_int8(a, k, v)
    for dtype in filter(None, (root.dtype, assumed.rounded(root))):
        narrow = [narrowed(a, each, dtype) for each in (q, k, v)]
        if all(each.dtype == dtype for each in (narrow[:1] if int8 else narrow)):
            (q, k, v), given = narrow, given if dtype == root.dtype else dtype
    mixed = int8 and not given == q.dtype == k.dtype == v.dtype
    if len({given, q.dtype} if mixed else {given, q.dtype, k.dtype, v.dtype}) != 1:
        have = [str(each).removeprefix("torch.") for each in (q.dtype, k.dtype, v.dtype, given)]
        return "queries, keys, values and result have different dtypes: {}, {}, {} and {}".format(*have)
    said = {"q": scaled_queries(a, q, scores.factors, frame), "k": k, "v": v}
    return said | ({"mixed": True} if mixed else {}), {}, sizes


def _divides(part: Any, whole: Any) -> bool:
    return part == whole or (isinstance(part, int) and isinstance(whole, int) and part > 0 and whole % part == 0)


def _spread(a: Algebra, kv: Value, heads: Any) -> Value:
    """[B, M, T, D] with each head as often as it takes to have so many."""
    batch, own, *rows = kv.shape
    if own == heads:
        return kv
    opened = a.expand(a.reshape(kv, (batch, own, 1, *rows)), (batch, own, heads // own, *rows))
    return a.reshape(opened, (batch, heads, *rows))
