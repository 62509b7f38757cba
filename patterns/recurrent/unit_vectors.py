"""Unit vectors of queries and keys, x / sqrt(sum(x²) + eps), of heads that several heads of the state share."""

from __future__ import annotations

from fusion.analysis.repeated_entries import unrepeated
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.recurrent.vectors import narrowed, plain

LARGEST_EPS = 0.02
"""The largest eps that guards a division by zero, as npu_rms_norm takes it."""


def unit_of(a: Algebra, x: Value) -> tuple[Value, float | None]:
    """Return the vectors in 16 bits and the eps of which `x` [.., N, K] are the unit vectors; `x` and None for others.

    Heads that are repeated are left out in both cases.
    """
    vectors, eps = _unit(a, x) or (x, None)
    return unrepeated(a, vectors, x.rank - 2)[0], eps


@proof
def _unit(a: Algebra, x: Value) -> tuple[Value, float] | None:
    product = plain(x)
    must(product.op == "mul")
    for root, vectors in (product.args, product.args[::-1]):
        eps = _eps(root, vectors)
        if eps is not None and 0 < eps <= LARGEST_EPS:
            narrow = narrowed(a.reshape(vectors, x.shape))
            must(narrow.dtype is not None and narrow.dtype.itemsize == 2)
            return narrow, eps
    return None


@proof
def _eps(root: Value, vectors: Value) -> float | None:
    """Return eps if `root` is 1 / sqrt(sum(x²) + eps) of `vectors`."""
    must(root.op == "power" and root.attrs == (-0.5,))
    shifted = root.arg
    must(shifted.op == "shift")
    total = shifted.arg
    must(total.op == "scale" and total.arg.op == "mean" and total.arg.attrs == (-1,))
    must(total.attrs[0] == vectors.shape[-1])
    squares = total.arg.arg
    must(squares.op == "power" and squares.attrs == (2.0,) and squares.arg is vectors)
    return proven(shifted.attrs[0])
