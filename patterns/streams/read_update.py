"""Residual streams behind a layer: x'_i = gate_i · out + Σ_j matrix_ji x_j, or gate_i · out + x_i."""

from __future__ import annotations

from collections.abc import Iterator

from fusion import reader, word
from fusion.graph import Algebra, Annotation, Graph, Reading, Value
from patterns.streams.sums import exact, mixed_streams, unrounded

UPDATED = word(
    "updated_streams", "gate_i · out + Σ_j matrix_ji x_j, or gate_i · out + x_i without a matrix",
    x="[*B, N, D]", matrix="[*B, N, N]", out="[*B, D]", gate="[*B, N]",
)  # fmt: skip


@reader(gives=(UPDATED,))
def stream_updates(graph: Graph) -> Iterator[Annotation]:
    """Read every sum of streams and of the gated result of a layer as `updated_streams`."""
    for value in list(graph.places):
        if value.op != "add" or value.rank < 3:
            continue
        for added, mixed in (value.args, value.args[::-1]):
            yield from _readings(graph.algebra, value, added, mixed)


def _readings(a: Algebra, value: Value, added: Value, mixed: Value) -> Iterator[Annotation]:
    """Yield the readings of `value` as the sum of a gated result `added` and of streams `mixed`."""
    gated = _gated(a, unrounded(a, added), value)
    if gated is None:
        return
    out, gate = gated
    behind = unrounded(a, mixed)
    mixtures = list(mixed_streams(a, behind))
    for matrix, streams in mixtures:
        x, matrix = exact(a, streams), unrounded(a, matrix)
        if matrix.shape == (*x.shape[:-1], x.shape[-2]) and x.shape == value.shape:
            yield value, Reading("updated_streams", {"x": x, "matrix": matrix, "out": out, "gate": gate})
    if not mixtures and mixed.shape == value.shape:
        yield value, Reading("updated_streams", {"x": exact(a, mixed), "out": out, "gate": gate})


def _gated(a: Algebra, product: Value, like: Value) -> tuple[Value, Value] | None:
    """Read `product` as gate_i · out_d in the shape [*B, N, D] of `like`: out [*B, D] and gate [*B, N]; else None."""
    shape, lead = like.shape, like.shape[:-2]
    if product.op != "mul" or product.shape != shape or 1 in shape[-2:]:
        return None
    for gate, out in (product.args, product.args[::-1]):
        if gate.shape == (*shape[:-1], 1) and out.shape == (*lead, 1, shape[-1]):
            return (
                exact(a, a.reshape(out, (*lead, shape[-1]))),
                unrounded(a, a.reshape(gate, shape[:-1])),
            )
    return None
