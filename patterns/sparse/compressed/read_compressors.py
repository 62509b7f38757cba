"""Compressors: keys of a window of tokens, weighted by a softmax over the window with a position bias  (DeepSeek-V4).

entry = Σ_j softmax_j(gate + bias)[j] · kv[j]      over the tokens of a window, or with those of the window before
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusion import reader
from fusion.graph import Annotation, Graph, Miss, Value

_STATE = (
    "compressor: it pools windows of {ratio} tokens{overlap}; compressor of cann_ops_transformer requires a paged "
    "state in float32, of products that are not rounded, which this model does not keep, and this package emits no "
    "call of it; nothing to change"
)
_BUILT = ("cast", "reshape", "permute", "slice", "cat", "slice_scatter", "expand", "add", "where")
"""Ops by which a model builds the gates of all windows from the product of each token."""


@reader(gives=())
def compressors(graph: Graph) -> Iterator[Annotation]:
    """Report every compressor of keys once, at the softmax over the tokens of its windows."""
    for value in list(graph.places):
        bias = _position_bias(value)
        if bias is None:
            continue
        ratio, tokens = bias.shape[0], value.shape[-2]
        overlap = "" if tokens == ratio else ", each with the window before"
        gates = frozenset(each for each in value.arg.sources(_below) if each.op in _BUILT)
        yield value, Miss("compressor", _STATE.format(ratio=ratio, overlap=overlap), (value,), covers=gates | {value})


def _position_bias(value: Value) -> Value | None:
    """Return the position bias [ratio, ..] if `value` is a softmax over the tokens of one window or of two [.., D];
    None for any other value.
    """
    if value.op != "softmax" or value.attrs[0] != -2 or value.rank < 3:
        return None
    biases = (bias for each in value.arg.sources(_below) for bias in _added_inputs(each))
    return next((each for each in biases if value.shape[-2] in (each.shape[0], 2 * each.shape[0])), None)


def _below(x: Value) -> Iterable[Value]:
    """Return the operands of `x` from which gates are built; () for the product of tokens and any other value."""
    return x.args if x.op in _BUILT else ()


def _added_inputs(x: Value) -> Iterator[Value]:
    """Yield the inputs of two dims that the sum `x` adds; nothing for any other value."""
    for each in x.args if x.op == "add" else ():
        source = each.below("cast", "reshape", "expand")
        if source.op == "input" and source.rank == 2:
            yield source
