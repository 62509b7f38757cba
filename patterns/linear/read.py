"""Linear layers: y = x Wᵀ (+ b), each with the one that follows it over the same input."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch.fx as fx

from fusion import reader, word
from fusion.analysis.nodes import is_handed_out
from fusion.graph import Algebra, Found, Graph, Reading, Value
from fusion.graph.contractions import swapped

Places = Mapping[Value, Sequence[fx.Node]]
Parts = tuple[Value, Value, "Value | None"]


def linear(a: Algebra, places: Places, value: Value) -> Parts | None:
    """x, weight and bias of which `value` is the linear layer."""
    if value.dtype is None or not value.dtype.is_floating_point:
        return None  # a product of whole numbers
    match value.op:
        case "matmul" if all(size == 1 for size in value.args[1].shape[:-2]) and value.rank == value.arg.rank:
            x, y = value.args
            return x, swapped(a, a.reshape(y, y.shape[-2:])), None
        case "scale":
            parts = linear(a, places, value.arg)
            return None if parts is None else _scaled(a, places, parts, value.attrs[0])
        case "reshape" if value.shape[-1:] == value.arg.shape[-1:]:
            parts = linear(a, places, value.arg)
            return None if parts is None else (_rows(a, parts[0], value), *parts[1:])
        case "add":
            return _biased(a, places, *value.args) or _biased(a, places, *value.args[::-1])
        case _:
            return None


def _rows(a: Algebra, x: Value, value: Value) -> Value:
    return a.reshape(x, (*value.shape[:-1], x.shape[-1]))


def _scaled(a: Algebra, places: Places, parts: Parts, factor: float) -> Parts | None:
    """A factor outside that the user's own weight has."""
    x, weight, bias = parts
    weight = a.scale(weight, factor)
    return (x, weight, None) if bias is None and weight in places else None


def _biased(a: Algebra, places: Places, product: Value, bias: Value) -> Parts | None:
    if bias.shape != product.shape[-1:]:
        return None
    parts = linear(a, places, product)
    return None if parts is None or parts[2] is not None else (*parts[:2], bias)


LINEAR = word(
    "linear",
    "x weightᵀ (+ bias)",
    x="[*B, K]", weight="[N, K]", bias="[N]", beside="the next layer of the same x that one call could compute as well",
    is_parameter_only="whether weight and bias are computed from Parameters alone",
)  # fmt: skip


@reader(gives=(LINEAR,), needs=("softmax_attention",))
def linears(graph: Graph) -> Iterator[Found]:
    """Every linear layer.

    Layers stand beside each other only up to an attention: what is computed before it would have to wait there for
    what is needed behind it.
    """
    places = graph.places
    order = {value: position for position, value in enumerate(places)}
    barriers = sorted(order[each] for each, _ in graph.readings.all("softmax_attention") if each in order)
    found = {value: parts for value in list(places) if (parts := linear(graph.algebra, places, value)) is not None}
    groups: dict[Any, list[Value]] = {}
    for value in _whole(found, places):
        x, weight, bias = found[value]
        if not any(map(is_handed_out, places[value])):
            key = (x, weight.dtype, bias is None, graph.is_fixed(weight, bias), bisect(barriers, order[value]))
            groups.setdefault(key, []).append(value)
    beside = dict(pair for group in groups.values() for pair in pairwise(group))
    for value, parts in found.items():
        yield value, _reading(graph, parts, beside.get(value))


def _reading(graph: Graph, parts: Parts, beside: Value | None) -> Reading:
    x, weight, bias = parts
    optional = {name: each for name, each in (("bias", bias), ("beside", beside)) if each is not None}
    return Reading("linear", {"x": x, "weight": weight, "is_parameter_only": graph.is_fixed(weight, bias), **optional})


def _whole(found: Mapping[Value, Parts], places: Places) -> list[Value]:
    """Each layer once: not as its rows are arranged anew, and with its bias where nothing reads it without."""
    held = {node: value for value in found for node in places[value]}
    chosen: dict[Value, None] = {}
    layers: dict[Value, Value] = {}
    for value in found:
        before = next((held[node] for node in places[value][0].all_input_nodes if node in held), None)
        if before is None or found[before][1] is not found[value][1]:
            layers[value] = value
            chosen[value] = None
            continue
        layers[value] = layer = layers[before]
        adds = found[value][2] is not None and found[layer][2] is None
        if adds and _is_read_once(places[before]) and _is_read_once(places[layer]):
            del chosen[layer]
            layers[value] = value
            chosen[value] = None
    return list(chosen)


def _is_read_once(nodes: Sequence[fx.Node]) -> bool:
    return len(nodes) == 1 and len(nodes[0].users) == 1
