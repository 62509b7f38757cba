"""Matrices whose rows and columns are normalised alternately (Sinkhorn and Knopp, 1967), as in hyper-connections.

P ← P / Σ_j P_ij,  P ← P / Σ_i P_ij,  …        the first may be a softmax; or x ← x - logsumexp(x), alternately
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fusion import reader
from fusion.graph import Annotation, Graph, Miss, Value

LEAST = 3
"""The least number of normalisations that is an iteration; some models normalise weights twice."""
_PASSED = ("cast", "shift")
_SUMMED = ("shift", "clip", "scale", "reshape", "permute", "cast")
_ARRANGED = ("cast", "reshape", "permute", "slice", "scale", "exp")


class _Normalised(NamedTuple):
    """A matrix `x`, divided by its sums over `axis` (-1 or -2), and the values `sums` that compute the divisor."""

    x: Value
    axis: int
    sums: tuple[Value, ...] = ()


@reader(gives=())
def sinkhorn(graph: Graph) -> Iterator[Annotation]:
    """Report each matrix whose rows and columns are divided by their sums alternately, `LEAST` times or more, once, at
    the end.
    """
    chains = {chain[0][0]: chain for value in graph.places if len(chain := _chain(value)) >= LEAST}
    inner = {step for chain in chains.values() for step, _ in chain[1:]}
    for value in chains.keys() - inner:
        chain = chains[value]
        covered = {each for step, normalised in chain for each in (step, *normalised.sums)}
        covered |= set(_products(graph, value))
        reason = (
            f"softmax: rows and columns of a matrix are normalised in turns, {len(chain)} times (Sinkhorn "
            "and Knopp); this package emits no operator that computes it (CANN has npu_mhc_sinkhorn); "
            "nothing to change"
        )
        yield value, Miss("sinkhorn", reason, (value,), covers=frozenset(covered))


def _chain(value: Value) -> list[tuple[Value, _Normalised]]:
    """List the normalisations of which each is computed from the next one, beginning with that of which `value` is a
    view.

    Each divides by the sums over rows if the next one does over columns, and the reverse; the list ends where it does
    not.
    """
    chain: list[tuple[Value, _Normalised]] = []
    last = 0
    while True:
        step, turns = value.below(*_PASSED), 0
        while _is_transposed(step):
            step, turns = step.arg.below(*_PASSED), turns + 1
        normalised = _normalised(step)
        if normalised is None or (chain and normalised.axis == (last if turns % 2 == 0 else -3 - last)):
            return chain
        chain.append((step, normalised))
        value, last = normalised.x, normalised.axis


def _is_transposed(x: Value) -> bool:
    """Return True if `x` transposes the last two dims."""
    return x.op == "permute" and x.attrs == (*range(x.rank - 2), x.rank - 1, x.rank - 2)


def _normalised(value: Value) -> _Normalised | None:
    if value.rank < 2:
        return None
    if value.op == "softmax" and value.attrs[0] in (-1, -2):
        return _Normalised(value.arg, value.attrs[0])
    for x, by in (value.args, value.args[::-1]) if value.op in ("mul", "add") else ():
        inverse = by.below("scale") if value.op == "mul" else by
        is_divided = inverse.op == "power" and inverse.attrs[0] == -1
        is_shifted = inverse.op == "scale" and inverse.attrs[0] == -1 and inverse.arg.op == "log_sum_exp"
        if x.shape == value.shape and (is_divided or is_shifted):
            total = inverse.arg.below(*_SUMMED)
            if total.op in ("mean", "total", "log_sum_exp") and total.arg is x and total.attrs[0] in (-1, -2):
                return _Normalised(x, total.attrs[0], (by, inverse, inverse.arg, total))
    return None


def _products(graph: Graph, matrix: Value) -> Iterator[Value]:
    """Yield the matmuls that have `matrix` as a factor."""
    for each in graph.owners:
        if each.op == "matmul" and any(arg.below(*_ARRANGED) is matrix for arg in each.args):
            yield each
