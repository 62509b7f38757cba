"""Gates of residual streams, and the collapsed streams, the input of a layer.

collapsed = Σ_i (sigmoid(logits_0) + eps)_i x_i      output gate = 2 · sigmoid(logits_1)      mixing = logits_2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from fusion import reader, word
from fusion.graph import Annotation, Dim, Graph, Miss, Reading, Value
from patterns.streams.read_logits import Logits, Source, logits_of
from patterns.streams.sums import exact, unrounded, weighted_sum

_GATES = {
    "x": "[*B, N, D]", "phi": "[N² + 2 N, N · D]", "alpha": "[3]", "bias": "[N² + 2 N]", "gamma": "[N, D]",
    "norm_eps": "number added to the mean square", "hc_eps": "number added to the gates of the collapse",
    "is_narrow": "true if phi has no more bits of mantissa than float16",
    "flat_gate": "true if the output gate has one dim of all tokens", "flat_logits": "true if the logits have",
}  # fmt: skip
COLLAPSED = word("collapsed_streams", "Σ_i (sigmoid(alpha[0] w_i + bias_i) + hc_eps) x_i", **_GATES)
OUTPUT_GATE = word("output_gate", "2 · sigmoid(alpha[1] w_j + bias_j), N ≤ j < 2 N", **_GATES)
MIXING_LOGITS = word("mixing_logits", "alpha[2] w_j + bias_j, 2 N ≤ j, as [*B, N, N]", **_GATES)
_ALONE = (
    "gates: the streams are collapsed by a gate alone, as behind the last layer; npu_mhc_pre requires three gates of "
    "one linear layer: of the collapse, of the result of a layer, and the logits of a matrix; nothing to change"
)
_NO_MATRIX = (
    "gates: no logits of a matrix are computed from these streams; npu_mhc_pre and mhc_pre_sinkhorn require those of a "
    "matrix [N, N] that mixes the streams; nothing to change"
)
_ARRANGED = (
    "output gate: its dims are arranged otherwise; npu_mhc_pre requires [*B, N] for streams [*B, N, D]; keep the dims "
    "of the tokens in order"
)
_NARROW = (torch.bfloat16, torch.float16)


class _Gate(NamedTuple):
    """The gate `factor` · sigmoid(`logits`) + `eps`, and `values`, which are the gate in the shapes that nodes have."""

    values: tuple[Value, ...]
    logits: Logits
    factor: float = 1.0
    eps: float = 0.0


class _Sum(NamedTuple):
    """Streams `x` [*B, N, D] that `gate` collapses to `value`."""

    value: Value
    x: Value
    gate: _Gate


_Gated = tuple[Value, Logits]
"""A gate, or the logits of a matrix, and how they are computed."""


@reader(gives=(COLLAPSED, OUTPUT_GATE, MIXING_LOGITS))
def stream_gates(graph: Graph) -> Iterator[Annotation]:
    """Read collapsed streams and the other two gates of the same streams; give why they are not those of operators."""
    sums = list(_sums(graph))
    outputs, mixing = (_outputs(graph), _mixing(graph)) if sums else ({}, {})
    for each in sums:
        source, (*lead, count, _) = each.gate.logits.source, each.x.shape
        gates = [gate for gate in outputs.get(source, ()) if gate.logits != each.gate.logits]
        output = _shaped([(value, gate.logits) for gate in gates for value in gate.values], lead, (count,))
        matrix = _shaped(mixing.get(source, ()), lead, (count, count))
        reason = _why_not(gates, matrix)
        if reason or output is None or matrix is None:
            yield each.value, Miss("stream_gates", reason or _ARRANGED, (each.value,))
            continue
        captures = _captures(graph, each, output, matrix)
        yield each.value, Reading("collapsed_streams", captures)
        yield output[0], Reading("output_gate", captures)
        yield matrix[0], Reading("mixing_logits", captures)


def _shaped(values: Sequence[_Gated], lead: Sequence[Dim], own: tuple[Dim, ...]) -> _Gated | None:
    """Return the first of `values` with dims `own` behind those of tokens, `lead`, or behind one dim of all tokens; a
    dim of size 1 may follow.
    """
    shapes = [(*dims, *own, *one) for dims in (lead, (math.prod(lead),)) for one in ((), (1,))]
    return next((each for shape in shapes for each in values if each[0].shape == shape), None)


def _why_not(gates: Sequence[_Gate], matrix: _Gated | None) -> str:
    """Return the reason why `gates` and `matrix`, of streams that are collapsed, are not those of npu_mhc_pre; "" if
    they are.
    """
    if not gates:
        return _ALONE
    if matrix is None:
        return _NO_MATRIX
    gate = gates[0]
    if (gate.factor, gate.eps) != (2.0, 0.0):
        formula = f"{gate.factor:g} * sigmoid" + (f" + {gate.eps:g}" if gate.eps else "")
        return (
            f"output gate: it is {formula}; npu_mhc_pre requires 2 * sigmoid; multiply the result of the layer instead"
        )
    return ""


def _captures(graph: Graph, of: _Sum, output: _Gated, matrix: _Gated) -> Mapping[str, Any]:
    """Return the captures of the three gates, with weights, scales and biases joined to one tensor each."""
    a, every, lead = graph.algebra, (of.gate.logits, output[1], matrix[1]), of.x.shape[:-2]
    source = of.gate.logits.source
    captures = {
        "x": of.x,
        "phi": a.cat([each.weight for each in every], 0),
        "alpha": a.cat([each.scale for each in every], 0),
        "bias": a.cat([each.bias for each in every], 0),
        "norm_eps": source.norm_eps,
        "hc_eps": of.gate.eps,
        "is_narrow": all(each.weight.dtype in _NARROW for each in every),
        "flat_gate": output[0].shape[: len(lead)] != lead,
        "flat_logits": matrix[0].shape[: len(lead)] != lead,
    }
    gain = {} if source.gamma is None else {"gamma": a.reshape(source.gamma, of.x.shape[-2:])}
    return captures | gain


def _sums(graph: Graph) -> Iterator[_Sum]:
    """Yield the sums of streams by sigmoids of logits of the same streams."""
    a = graph.algebra
    for value in list(graph.places):
        for weights, streams in weighted_sum(a, value):
            x, shifted = exact(a, streams), unrounded(a, weights)
            gate, eps = (shifted.arg, shifted.attrs[0]) if shifted.op == "shift" else (shifted, 0.0)
            sigmoid, count = unrounded(a, gate).below("reshape"), x.shape[-2]
            logits = logits_of(graph, sigmoid.arg, count) if sigmoid.op == "sigmoid" and _is_number(count) else None
            if logits is not None and a.reshape(x, logits.source.rows.shape) is logits.source.rows:
                yield _Sum(value, x, _Gate((shifted,), logits, eps=eps))


def _is_number(size: Any) -> TypeGuard[int]:
    return isinstance(size, int)


def _outputs(graph: Graph) -> dict[Source, list[_Gate]]:
    """Map the normalised streams, the source of logits, to their gates factor · sigmoid(logits) + eps."""
    behind: dict[Value, list[Value]] = {}
    for value in graph.places:
        if value.op in ("scale", "shift"):
            behind.setdefault(value.arg.below("reshape"), []).append(value)
    gates: dict[Source, list[_Gate]] = {}
    for sigmoid in [value for value in graph.places if value.op == "sigmoid" and value.rank]:
        count = sigmoid.shape[-1]
        logits = logits_of(graph, sigmoid.arg, count) if _is_number(count) else None
        if logits is None:
            continue
        scaled = [each for each in behind.get(sigmoid, ()) if each.op == "scale"] or [sigmoid]
        shifted = [each for one in scaled for each in behind.get(one, ()) if each.op == "shift"]
        factor = scaled[0].attrs[0] if scaled[0] is not sigmoid else 1.0
        eps = shifted[0].attrs[0] if shifted else 0.0
        gates.setdefault(logits.source, []).append(_Gate(tuple(shifted or scaled), logits, factor, eps))
    return gates


def _mixing(graph: Graph) -> dict[Source, list[_Gated]]:
    """Map normalised streams, the source of logits, to the logits of square matrices that a softmax or an exp reads."""
    by_source: dict[Source, dict[Value, Logits]] = {}
    for value in graph.places:
        x = value.arg if value.op in ("softmax", "exp") else None
        if x is None or x.rank < 2 or x.shape[-1] != x.shape[-2] or not _is_number(x.shape[-1]):
            continue
        logits = logits_of(graph, x, x.shape[-1] ** 2) if x in graph.places else None
        if logits is not None:
            by_source.setdefault(logits.source, {})[x] = logits
    return {source: list(each.items()) for source, each in by_source.items()}
