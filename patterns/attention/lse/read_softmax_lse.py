"""The log-sum-exp of the scores of attention, in models that merge attention over parts of the keys.

It is logsumexp(s), or written out: m + log Σ exp(s - m) with m constant along each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import prod

from fusion import reader
from fusion.analysis.equal_rows import on_equal_rows
from fusion.analysis.logarithms import differences, summed
from fusion.analysis.rounding import exact
from fusion.analysis.row_layout import Step, named
from fusion.graph import Annotation, Graph, Miss, Reading, Value, but_ones
from patterns.attention.core.addends import computed_from
from patterns.attention.core.products import contraction
from patterns.attention.core.scores import Scores, scores_of
from patterns.attention.core.weights import weights_of
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term, numbers_of
from patterns.attention.words import SOFTMAX_LSE

_VALUE_CAPTURES = ("v", "output_view")
_NOT_INFINITE = (
    "log-sum-exp: of a query that sees no key it is NaN or a finite number; npu_fused_infer_attention_score requires "
    "-inf; write scores.logsumexp(-1) of scores that are hidden by -inf"
)


@reader(gives=(SOFTMAX_LSE,), needs=("softmax_attention",))
def softmax_lse(graph: Graph) -> Iterator[Annotation]:
    """Read every log-sum-exp of the scores of a `softmax_attention` as `softmax_lse`; of several views, the first."""
    a = graph.algebra
    sums: dict[Value, Value] = {}
    for value in graph.places:
        scores = summed(value)
        if scores is not None:
            sums.setdefault(scores, value)
    for root, reading in graph.readings.all("softmax_attention") if sums else ():
        weights = weights_of(a, contraction(a, root, graph.places)[0].arg)
        scores = None if weights is None else _unshifted(weights.softmax.arg)
        value = None if scores is None else sums.get(scores)
        if value is None or weights is None or scores is None:
            continue
        read = scores_of(a, Scores(), scores)
        view = None if read.shifts else _view(value, scores, reading.captures["q"])
        if view is None:
            continue
        lowered = reading.captures["fully_masked_row"] == "mean" or "levels" in reading.captures  # which rules refuse
        if lowered or _sees_keys(reading, weights.softmax) or _is_infinite(graph, value, scores, read.terms):
            captures = {name: what for name, what in reading.captures.items() if name not in _VALUE_CAPTURES}
            yield value, Reading("softmax_lse", captures | {"lse_view": view}, reading.relies)
        else:
            yield value, Miss("attention", _NOT_INFINITE)


def _view(value: Value, scores: Value, q: Value) -> tuple[Step, ...] | None:
    """Return the reshape from [B, N, S], the rows of `q`, to the log-sum-exp `value` of `scores` [*rows, T].

    Rows of `scores` have the order of [B, N, S], and other sizes where query heads are grouped by key heads. () where
    dims of size 1 alone differ; None if `value` has other rows.
    """
    rows = q.shape[:3]
    if but_ones(value.shape) == but_ones(rows):
        return ()
    same = but_ones(value.shape) == but_ones(scores.shape[:-1]) and prod(value.shape) == prod(rows)
    return named([("reshape", value.shape)], {rows[2]: "S", rows[0]: "B"}) if same else None


def _sees_keys(reading: Reading, softmax: Value) -> bool:
    """Return True if each query of the attention `reading` is proven to see a key.

    `fully_masked_row` "zero" says so, unless `softmax` itself gives 0 for rows of -inf.
    """
    captures = reading.captures
    ordered = captures["mask_kind"] != "dense" and captures.get("kv_lens") is None
    return captures["fully_masked_row"] == "zero" and (ordered or softmax.attrs[1] != "zero")


def _is_infinite(graph: Graph, value: Value, scores: Value, terms: Sequence[Term]) -> bool:
    """Return True if the log-sum-exp `value` is -inf for rows without keys, as that of the lowering is.

    It is tried for every number by which the masks `terms` hide `scores`: m + log Σ exp(s - m) is NaN for m = -inf, and
    about the number itself if that is finite.
    """
    positions = Assumed.of(graph).masks(scores.shape, terms, (1, 1, 1, 1)).positions
    numbers = numbers_of(positions, terms) or [-math.inf]
    return all(on_equal_rows(value, {scores: number, exact(scores): number}) == -math.inf for number in numbers)


def _unshifted(scores: Value) -> Value:
    """Return x if `scores` are x - r with a number r of each row that is computed from x, such as its maximum; else
    `scores`.
    """
    return next((x for x, less in differences(scores) if computed_from(less, x)), scores)
