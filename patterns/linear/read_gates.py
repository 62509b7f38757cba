"""Gate and up of one tensor: its halves, or alternate lanes (gpt-oss, 2025).

Of a projection with more lanes, such as queries, keys and values as well (FLUX.2, 2025), the tensor is the slice of
gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion import reader, word
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value

GATE_LANES = word(
    "gate_lanes", "half of the lanes of x, [*B, H]",
    x="[*B, 2 · H]", second="true for the second half, or for odd lanes",
    interleaved="true for alternate lanes",
)  # fmt: skip


_OTHER = (
    "gate: its activation is {name}; npu_swiglu requires silu, npu_geglu gelu, and no operator here computes "
    "{name}(gate) * up; nothing to change"
)
_ACTIVATIONS = frozenset(
    {"relu", "tanh", "softplus", "aten.mish.default", "aten.elu.default", "aten.leaky_relu.default"}
)
"""Functions of a gate that no operator here computes."""


@reader(gives=(GATE_LANES,))
def gate_lanes(graph: Graph) -> Iterator[Annotation]:
    """Read every half of the lanes of a tensor as `gate_lanes`; also give why another gate is no silu."""
    yield from _others(graph)
    yield from _activated(graph)
    yield from _adjacent(graph)
    for value in list(graph.places):
        half = half_of_lanes(graph.algebra, value)
        if half is not None:
            yield value, half


def half_of_lanes(a: Algebra, value: Value) -> Reading | None:
    """Read `value` as half of the lanes of a tensor; None for others."""
    half = _half(a, value)
    return None if half is None else Reading("gate_lanes", dict(zip(("x", "second", "interleaved"), half, strict=True)))


def _adjacent(graph: Graph) -> Iterator[Annotation]:
    """Yield adjacent slices of the last dim with the same width, as halves of the slice that has both."""
    slices = {
        (value.arg, value.attrs[1], value.shape[-1]): value
        for value in list(graph.places)
        if value.op == "slice" and value.attrs[0] == value.rank - 1 and value.attrs[3] == 1
    }
    for (tensor, start, size), first in slices.items():
        second = slices.get((tensor, start + size, size))
        both = None if second is None else graph.algebra.slice(tensor, first.rank - 1, start, start + 2 * size)
        if second is None or both is None or both is tensor:
            continue
        for half in (first, second):
            yield half, Reading("gate_lanes", {"x": both, "second": half is second, "interleaved": False})


def _half(a: Algebra, value: Value) -> tuple[Value, bool, bool] | None:
    """Return the tensor of which `value` is half of the lanes, if it is the second half, and if lanes alternate."""
    cut = value.arg if value.op == "reshape" and value.arg.op == "slice" else value
    if cut.op != "slice" or not value.rank:
        return None
    axis, start, _, step = cut.attrs
    tensor, size = cut.arg, value.shape[-1]
    if cut is value:
        if axis != value.rank - 1 or tensor.shape[-1] != 2 * size:
            return None
        starts = {1: (0, size), 2: (0, 1)}.get(step, ())  # step 3 takes 2 of 4 lanes as well
        return (tensor, start != 0, step == 2) if start in starts else None
    pairs, runs = (*value.shape, 2), (*value.shape[:-1], 2, size)
    split = pairs if axis == cut.rank - 1 else runs
    one = axis in (cut.rank - 1, cut.rank - 2) and cut.shape[axis] == 1
    if not one or tensor.shape != split:
        return None
    return a.reshape(tensor, (*value.shape[:-1], 2 * size)), start == 1, split is pairs


def _others(graph: Graph) -> Iterator[Annotation]:
    """Yield the reason for products with a sigmoid that are no silu: its operand is scaled, or is no factor."""
    products = [each for each in list(graph.places) if each.op == "mul"]
    factors_of: dict[Value, set[Value]] = {}
    for product in products:
        factors = set(product.factors("cast"))
        for each in factors:
            if each.op == "sigmoid":
                factors_of.setdefault(each, set()).update(factors)
    for product in products:
        for sigmoid in product.args:
            is_gate = sigmoid.op == "sigmoid" and _gates(sigmoid, factors_of[sigmoid])
            reason = _why_no_silu(sigmoid.arg.below("cast"), factors_of[sigmoid]) if is_gate else ""
            if reason:
                yield product, Miss("activation", reason)


def _activated(graph: Graph) -> Iterator[Annotation]:
    """Yield the reason for products of one half of a tensor, or one linear layer, and another function than silu of the
    other.
    """
    for product in list(graph.places):
        for function, up in product.operands("mul"):
            function = function.below("cast")
            gate = function.arg.below("cast") if function.op in _ACTIVATIONS else None
            if gate is not None and _are_gate_and_up(graph, gate, up.below("cast")):
                name = function.op.removeprefix("aten.").removesuffix(".default")
                yield product, Miss("activation", _OTHER.format(name=name))


def _are_gate_and_up(graph: Graph, gate: Value, up: Value) -> bool:
    """Return True if `gate` and `up` are the halves of one tensor, or products of one tensor with fixed matrices."""
    halves = [_half(graph.algebra, each) for each in (gate, up)]
    if halves[0] is not None and halves[1] is not None:
        return halves[0][0] is halves[1][0] and halves[0][1] != halves[1][1]
    products = gate.op == up.op == "matmul" and gate is not up and gate.args[0] is up.args[0]
    return products and graph.is_fixed(gate.args[1]) and graph.is_fixed(up.args[1])


def _gates(sigmoid: Value, factors: set[Value]) -> bool:
    """Return True if a factor of the product has the shape of `sigmoid`, but is no divisor: it is gated by lane."""
    return any(each.shape == sigmoid.shape for each in factors if each is not sigmoid and each.op != "power")


def _why_no_silu(gate: Value, factors: set[Value]) -> str:
    """Return the reason why the product of `factors`, with a sigmoid of `gate` among them, is no silu; "" if there is
    none.

    The gate is no factor, so that its sigmoid stands alone, or it is scaled in the sigmoid only.
    """
    # products are flattened: silu(a · p) · up is a · p · sigmoid(a · p) · up
    if factors.issuperset(gate.factors("cast")):
        return ""
    if gate.op != "scale" or not factors.issuperset(gate.arg.factors("cast")):
        return (
            "gate: it is a sigmoid alone; npu_swiglu requires silu, gate * sigmoid(gate), and no operator "
            "here computes sigmoid(gate) * up; nothing to change"
        )
    is_gate = len(factors) > 2 and gate.arg.op != "clip"  # else another rule reports it, or there is no other factor
    return (
        (
            f"gate: it is multiplied by {gate.attrs[0]} in the sigmoid alone; npu_swiglu requires silu, gate * "
            "sigmoid(gate); multiply the weight of its projection, or leave the factor out"
        )
        if is_gate
        else ""
    )
