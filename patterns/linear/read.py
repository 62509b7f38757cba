"""Linear layers: y = x Wᵀ (+ b), each with the one that follows it over the same input.

A reading "linear" holds x [*B, K], weight [N, K] and bias [N]; `fixed` says whether weight and bias are computed from
Parameters alone; `beside` is the next linear layer of the same x that one call could compute as well.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch.fx as fx

from fusion.cost import is_view
from fusion.graph import Algebra, Reading, Value
from fusion.stages.canonicalise.contractions import swapped

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


def readings(
    a: Algebra, places: Places, attended: Collection[Value], fixed: Collection[fx.Node]
) -> dict[Value, Reading]:
    """A reading for every linear layer; `fixed` are the nodes that depend on Parameters alone.

    Layers stand beside each other only up to an attention: what is computed before it would have to wait there for
    what is needed behind it.
    """
    order = {value: position for position, value in enumerate(places)}
    barriers = sorted(order[each] for each in attended)
    found = {value: parts for value in list(places) if (parts := linear(a, places, value)) is not None}
    groups: dict[Any, list[Value]] = {}
    for value in _whole(found, places):
        x, weight, bias = found[value]
        constant = is_fixed(places, fixed, weight, bias)
        if not any(map(_is_handed_out, places[value])):
            key = (x, weight.dtype, bias is None, constant, bisect(barriers, order[value]))
            groups.setdefault(key, []).append(value)
    beside = dict(pair for group in groups.values() for pair in pairwise(group))
    return {value: _reading(parts, beside.get(value), places, fixed) for value, parts in found.items()}


def _reading(parts: Parts, beside: Value | None, places: Places, fixed: Collection[fx.Node]) -> Reading:
    x, weight, bias = parts
    optional = {name: each for name, each in (("bias", bias), ("beside", beside)) if each is not None}
    constant = is_fixed(places, fixed, weight, bias)
    return Reading("linear", {"x": x, "weight": weight, "fixed": constant, **optional})


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


def _is_handed_out(node: fx.Node) -> bool:
    """Whether a caller gets this memory: it must not be a part of a larger one."""
    return any(user.op == "output" or (is_view(user.target) and _is_handed_out(user)) for user in node.users)


def is_fixed(places: Places, fixed: Collection[fx.Node], *values: Value | None) -> bool:
    """Whether values are, or are built from, Parameters alone."""
    nodes = [node for value in values if value is not None for node in _reads(places, value)]
    return bool(nodes) and all(node in fixed for node in nodes)


def _reads(places: Places, value: Value) -> list[fx.Node]:
    if value in places:
        return [places[value][0]]
    return [node for arg in value.args for node in _reads(places, arg)]
