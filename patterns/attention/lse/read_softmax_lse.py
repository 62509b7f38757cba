"""The log-sum-exp of the scores of attention, as a model writes it that merges parts.

log Σ exp(s) is named so, or written out: m + log Σ exp(s - m), for any m that is the same for a whole row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fusion import reader
from fusion.analysis.equal_rows import on_equal_rows
from fusion.analysis.logarithms import differences, summed
from fusion.analysis.rounding import exact
from fusion.graph import Found, Graph, Miss, Reading, Value, but_ones
from patterns.attention.core.addends import computed_from
from patterns.attention.core.products import contraction
from patterns.attention.core.scores import Scores, scores_of
from patterns.attention.core.weights import weights_of
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term, numbers_of
from patterns.attention.words import SOFTMAX_LSE

_OF_VALUES = ("v", "output_view")
_NOT_INFINITE = (
    "log-sum-exp: of a query that sees no key it is NaN or a finite number; npu_fused_infer_attention_score requires "
    "-inf; write scores.logsumexp(-1) of scores that are hidden by -inf"
)


@reader(gives=(SOFTMAX_LSE,), needs=("softmax_attention",))
def softmax_lse(graph: Graph) -> Iterator[Found]:
    """Give the sums over the scores that a softmax of attention sees; of several shapes, the first."""
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
        found = scores_of(a, Scores(), scores)
        if found.shifts or but_ones(value.shape) != but_ones(reading.captures["q"].shape[:3]):
            continue
        lowered = reading.captures["fully_masked_row"] == "mean" or "levels" in reading.captures  # which rules refuse
        if lowered or _sees_keys(reading, weights.softmax) or _is_infinite(graph, value, scores, found.terms):
            said = {name: what for name, what in reading.captures.items() if name not in _OF_VALUES}
            yield value, Reading("softmax_lse", said, reading.relies)
        else:
            yield value, Miss("attention", _NOT_INFINITE)


def _sees_keys(reading: Reading, softmax: Value) -> bool:
    """True if each query is known to see a key: a softmax gives 0 for others only if it is written so."""
    said = reading.captures
    ordered = said["mask_kind"] != "dense" and said.get("kv_lens") is None
    return said["fully_masked_row"] == "zero" and (ordered or softmax.attrs[1] != "zero")


def _is_infinite(graph: Graph, value: Value, scores: Value, terms: Sequence[Term]) -> bool:
    """True if the log-sum-exp `value` is -inf for each number by which masks hide all keys, as the operator's is made.

    m + log Σ exp(s - m) is NaN for m = -inf, and one of a row that a finite number hides is about that number.
    """
    positions = Assumed.of(graph).masks(scores.shape, terms, (1, 1, 1, 1)).positions
    numbers = numbers_of(positions, terms) or [-math.inf]
    return all(on_equal_rows(value, {scores: number, exact(scores): number}) == -math.inf for number in numbers)


def _unshifted(scores: Value) -> Value:
    """Return scores before something that is computed from them was taken from each row."""
    return next((x for x, less in differences(scores) if computed_from(less, x)), scores)
