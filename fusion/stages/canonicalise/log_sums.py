"""The log-sum-exp of the scores of attention, as a model writes it that merges parts: m + log Σ exp(s - m), for any m.

attention_log_sum(q, k, scale, mask, …)      what `softmax_attention` says of the same scores, without values
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusion.graph import Algebra, Reading, Value
from fusion.stages.canonicalise.attention import contraction
from fusion.stages.canonicalise.scores import weights_of

_OF_VALUES = ("v", "finish")


def log_sums(a: Algebra, values: Iterable[Value], attentions: Mapping[Value, Reading]) -> dict[Value, Reading]:
    """Readings of the sums whose scores, shifted alike, are those that a softmax of `attentions` sees."""
    shifted = {scores: value for value in values if (scores := _scores(a, value)) is not None}
    found: dict[Value, Reading] = {}
    for root, reading in attentions.items() if shifted else ():
        weights = weights_of(a, contraction(root).arg)
        value = None if weights is None else shifted.get(weights.softmax.arg)
        q = reading.captures["q"]
        if value is not None and value.shape == (*q.shape[:3], 1):
            said = {name: what for name, what in reading.captures.items() if name not in _OF_VALUES}
            found[value] = Reading("attention_log_sum", said, reading.relies)
    return found


def _scores(a: Algebra, value: Value) -> Value | None:
    """The shifted scores s - m of which `value` is m + log Σ exp(s - m)."""
    if value.op != "add" or len(value.args) != 2:
        return None
    for top, log in (value.args, value.args[::-1]):
        if log.op != "log" or log.arg.op != "scale" or log.arg.arg.op != "mean":
            continue
        mean, size = log.arg.arg, log.arg.attrs[0]
        z = mean.arg.arg if mean.arg.op == "exp" else None
        if z is None or mean.attrs != (-1,) or size != z.shape[-1] or z.op != "add":
            continue
        if any(each.op == "scale" and each.attrs == (-1.0,) and each.arg is top for each in z.args):
            return z
    return None
