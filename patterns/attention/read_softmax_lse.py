"""The log-sum-exp of the scores of attention, as a model writes it that merges parts.

log Σ exp(s) is named so, or written out: m + log Σ exp(s - m), for any m that is the same for a whole row.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion import reader
from fusion.analysis.logarithms import differences, summed
from fusion.graph import Found, Graph, Reading, Value, but_ones
from patterns.attention.addends import computed_from
from patterns.attention.products import contraction
from patterns.attention.scores import Scores, scores_of
from patterns.attention.weights import weights_of
from patterns.attention.words import SOFTMAX_LSE

_OF_VALUES = ("v", "output_view")


@reader(gives=(SOFTMAX_LSE,), needs=("softmax_attention",))
def softmax_lse(graph: Graph) -> Iterator[Found]:
    """The sums over the scores that a softmax of attention sees; of several shapes, the first."""
    a = graph.algebra
    sums: dict[Value, Value] = {}
    for value in graph.places:
        scores = summed(value)
        if scores is not None:
            sums.setdefault(scores, value)
    for root, reading in graph.readings.all("softmax_attention") if sums else ():
        weights = weights_of(a, contraction(a, root, graph.places)[0].arg)
        scores = None if weights is None else _unshifted(weights.softmax.arg)
        value = None if scores is None or scores_of(a, Scores(), scores).shifted else sums.get(scores)
        if value is not None and but_ones(value.shape) == but_ones(reading.captures["q"].shape[:3]):
            said = {name: what for name, what in reading.captures.items() if name not in _OF_VALUES}
            yield value, Reading("softmax_lse", said, reading.relies)


def _unshifted(scores: Value) -> Value:
    """Scores before something that is computed from them was taken from a whole row."""
    return next((x for x, less in differences(scores) if computed_from(less, x)), scores)
