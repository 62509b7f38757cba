"""Gate and up of one tensor: its two halves, or every second lane  (gpt-oss, 2025, interleaves them).

Of a projection that has more lanes, as of queries, keys and values beside both (FLUX.2, 2025), the tensor is the slice
that holds the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion import reader, word
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value

GATE_LANES = word(
    "gate_lanes", "half of the lanes [*B, H]",
    x="[*B, 2 · H]", second="whether it is the second half, or begins with the second lane",
    interleaved="whether it is every second lane",
)  # fmt: skip


@reader(gives=(GATE_LANES,))
def gate_lanes(graph: Graph) -> Iterator[Found]:
    """Yield every half of a tensor, and why a product with a sigmoid is no silu times another half."""
    yield from _others(graph)
    yield from _adjacent(graph)
    for value in list(graph.places):
        found = half_of_lanes(graph.algebra, value)
        if found is not None:
            yield value, found


def half_of_lanes(a: Algebra, value: Value) -> Reading | None:
    """Read `value` as half of the lanes of a tensor."""
    found = _half(a, value)
    return (
        None if found is None else Reading("gate_lanes", dict(zip(("x", "second", "interleaved"), found, strict=True)))
    )


def _adjacent(graph: Graph) -> Iterator[Found]:
    """Yield slices of the last dim that follow each other and are equally wide, as halves of the slice of both."""
    slices = {
        (value.arg, value.attrs[1], value.shape[-1]): value
        for value in list(graph.places)
        if value.op == "slice" and value.attrs[0] == value.rank - 1 and value.attrs[3] == 1
    }
    for (whole, start, size), first in slices.items():
        second = slices.get((whole, start + size, size))
        both = None if second is None else graph.algebra.slice(whole, first.rank - 1, start, start + 2 * size)
        if second is None or both is None or both is whole:
            continue
        for half in (first, second):
            yield half, Reading("gate_lanes", {"x": both, "second": half is second, "interleaved": False})


def _half(a: Algebra, value: Value) -> tuple[Value, bool, bool] | None:
    """Return the tensor of which `value` is half of the lanes, True for the second half, True for alternate lanes."""
    cut = value.arg if value.op == "reshape" and value.arg.op == "slice" else value
    if cut.op != "slice" or not value.rank:
        return None
    axis, start, _, step = cut.attrs
    whole, size = cut.arg, value.shape[-1]
    if cut is value:
        if axis != value.rank - 1 or whole.shape[-1] != 2 * size:
            return None
        starts = {1: (0, size), 2: (0, 1)}.get(step, ())  # of 4 lanes, every third are 2 as well
        return (whole, start != 0, step == 2) if start in starts else None
    pairs, runs = (*value.shape, 2), (*value.shape[:-1], 2, size)
    split = pairs if axis == cut.rank - 1 else runs
    one = axis in (cut.rank - 1, cut.rank - 2) and cut.shape[axis] == 1
    if not one or whole.shape != split:
        return None
    return a.reshape(whole, (*value.shape[:-1], 2 * size)), start == 1, split is pairs


def _others(graph: Graph) -> Iterator[Found]:
    """Products with a sigmoid that is not of another factor, or of one that was multiplied by a number before."""
    products = [each for each in list(graph.places) if each.op == "mul"]
    beside: dict[Value, set[Value]] = {}
    for product in products:
        factors = _factors(product)
        for each in factors:
            if each.op == "sigmoid":
                beside.setdefault(each, set()).update(factors)
    for product in products:
        for sigmoid in product.args:
            is_gate = sigmoid.op == "sigmoid" and _gates(sigmoid, beside[sigmoid])
            reason = _why_no_silu(sigmoid.arg.below("cast"), beside[sigmoid]) if is_gate else ""
            if reason:
                yield product, Miss("activation", reason)


def _gates(sigmoid: Value, beside: set[Value]) -> bool:
    """Whether a factor is as wide: what is one number for many lanes, or is divided by one, is no gate of lanes."""
    return any(each.shape == sigmoid.shape for each in beside if each is not sigmoid and each.op != "power")


def _why_no_silu(gate: Value, beside: set[Value]) -> str:
    """What is different in a sigmoid of `gate` that is multiplied by others; "" where nothing is, or it is no gate."""
    if _factors(gate) <= beside:  # products are flattened: silu(a · p) · up is a · p · sigmoid(a · p) · up
        return ""
    if gate.op != "scale" or not _factors(gate.arg) <= beside:
        return (
            "the gate is a plain sigmoid; npu_swiglu requires silu, gate · sigmoid(gate), and this "
            "package emits no operator for sigmoid(gate) · up"
        )
    is_gate = len(beside) > 2 and gate.arg.op != "clip"  # else it is of another rule, or multiplies nothing more
    return f"the gate is multiplied by {gate.attrs[0]} in the sigmoid, not in silu" if is_gate else ""


def _factors(value: Value) -> set[Value]:
    """What a product is of, without casts."""
    value = value.below("cast")
    return _factors(value.args[0]) | _factors(value.args[1]) if value.op == "mul" else {value}
