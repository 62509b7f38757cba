"""Short causal convolutions of single channels, as before linear attention: y_t = Σ_i w_i · x_{t-K+1+i} for K tokens.

A convolution of as many groups as channels over tokens behind those of a state, or behind zeros; for one token also
a sum of products with a state from which the oldest token is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion import reader
from fusion.graph import Annotation, Graph, Miss, Value

_TAPS = range(2, 5)
"""Numbers of tokens that causal_conv1d_update and causal_conv1d_fn sum over."""
_REASON = (
    "weight: each channel is convolved over its last {taps} tokens; causal_conv1d_{form} of cann_ops_transformer "
    "requires an Ascend 950 and a state [lines, {kept}, channels], and this package does not emit it; nothing to change"
)


@reader(gives=())
def causal_convolutions(graph: Graph) -> Iterator[Annotation]:
    """Report each causal convolution of single channels once, by the operator that CANN has for it."""
    for value in graph.places:
        convolved = _convolved(graph, value) or _weighed(graph, value.below("scale", "reshape", "cast"))
        if convolved is not None:
            subject, taps, form = convolved
            yield value, Miss("causal_conv1d", _REASON.format(taps=taps, form=form, kept=taps - 1), (value,), subject)


def _convolved(graph: Graph, value: Value) -> tuple[Value, int, str] | None:
    """Read `value` [B, C, T] as a causal convolution of each channel: the call, its number of taps, and "update" if it
    runs over a state and one new token, else "fn".

    None if the convolution reads later tokens, mixes channels, or is none.
    """
    conv = value.below("slice")
    if conv.op != "aten.convolution.default" or value.rank != 3:
        return None
    x, weight = conv.args[:2]
    taps, tokens = weight.shape[-1], x.shape[-1]
    if not graph.is_fixed(weight) or weight.shape != (x.shape[1], 1, taps) or taps not in _TAPS:
        return None
    if conv.shape[-1] == tokens + 1 - taps:
        is_of_one = x.op == "cat" and x.args[-1].shape[-1] == 1
        return (conv, int(taps), "update" if is_of_one else "fn") if value is conv else None
    is_padded = conv.shape[-1] == tokens + taps - 1 and isinstance(tokens, int)
    is_cut = is_padded and value is not conv and value.attrs == (2, 0, tokens, 1)
    return (conv, int(taps), "fn") if is_cut else None


def _weighed(graph: Graph, mean: Value) -> tuple[Value, int, str] | None:
    """Read `mean` as a causal convolution that is written as a sum: mean(window · weight), with Parameters [C, K] and a
    window [.., C, K] of the last K - 1 tokens of a state and a new one. Results as those of `_convolved`.
    """
    if mean.op != "mean" or mean.attrs != (-1,) or mean.arg.op != "mul":
        return None
    product = mean.arg
    for window, weight in (product.args, product.args[::-1]):
        window = window.below("cast")
        is_state = window.op == "cat" and window.attrs == (window.rank - 1,) and len(window.args) == 2
        if is_state and window.shape == product.shape and graph.is_fixed(weight):
            older, newest = window.args
            taps = window.shape[-1]
            is_moved = older.op == "slice" and older.attrs == (window.rank - 1, 1, taps, 1)
            return (mean, int(taps), "update") if is_moved and newest.shape[-1] == 1 and taps in _TAPS else None
    return None
