"""Linear layers y = x Wᵀ (+ b), each paired with the next layer of the same input."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch.fx as fx

from fusion import reader, word
from fusion.analysis.node_predicates import is_handed_out
from fusion.graph import Annotation, Graph, Reading, Value
from patterns.kit.linear_layers import Parts, Places, linear

_LAYER = {
    "x": "[*B, K]", "weight": "[N, K]", "bias": "[N]",
    "is_parameter_only": "true if weight and bias are computed from Parameters alone",
}  # fmt: skip
LINEAR = word("linear", "x weightᵀ (+ bias)", **_LAYER)
LINEAR_BEFORE = word(
    "linear_before", "x weightᵀ (+ bias), where one call could also compute the next linear layer of x",
    **_LAYER, beside="the next layer",
)  # fmt: skip


@reader(gives=(LINEAR, LINEAR_BEFORE), needs=("softmax_attention",))
def linears(graph: Graph) -> Iterator[Annotation]:
    """Read every linear layer as `linear`, and as `linear_before` with the next layer of the same input.

    Layers are paired only up to an attention: one call for layers before and behind it would have to wait for the
    operands of the later ones.
    """
    places = graph.places
    order = {value: position for position, value in enumerate(places)}
    barriers = sorted(order[each] for each, _ in graph.readings.all("softmax_attention"))
    layers = {value: parts for value in list(places) if (parts := linear(graph.algebra, places, value)) is not None}
    groups: dict[Any, list[Value]] = {}
    for value in _distinct(layers, places):
        x, weight, bias = layers[value]
        if not any(map(is_handed_out, places[value])):
            key = (x, weight.dtype, bias is None, graph.is_fixed(weight, bias), bisect(barriers, order[value]))
            groups.setdefault(key, []).append(value)
    followers = dict(pair for group in groups.values() for pair in pairwise(group))
    for value, (x, weight, bias) in layers.items():
        layer = {"x": x, "weight": weight, "is_parameter_only": graph.is_fixed(weight, bias)}
        layer |= {} if bias is None else {"bias": bias}
        yield value, Reading("linear", layer)
        if value in followers:
            yield value, Reading("linear_before", {**layer, "beside": followers[value]})


def _distinct(layers: Mapping[Value, Parts], places: Places) -> list[Value]:
    """List the results of `layers` that stand for different layers of the model.

    A reshape of a result stands for the same layer, as does a result with the bias: it is listed instead, unless the
    one without is used as well. `places` has the nodes of each value.
    """
    layer_of = {node: value for value in layers for node in places[value]}
    chosen: dict[Value, None] = {}
    canonical: dict[Value, Value] = {}
    for value in layers:
        before = next((layer_of[node] for node in places[value][0].all_input_nodes if node in layer_of), None)
        if before is not None and layers[before][1] is layers[value][1]:
            canonical[value] = layer = canonical[before]
            adds = layers[value][2] is not None and layers[layer][2] is None
            if not (adds and _is_read_once(places[before]) and _is_read_once(places[layer])):
                continue
            del chosen[layer]
        canonical[value] = value
        chosen[value] = None
    return list(chosen)


def _is_read_once(nodes: Sequence[fx.Node]) -> bool:
    return len(nodes) == 1 and len(nodes[0].users) == 1
