"""Search for the product q kᵀ in masked and biased scores, where a bias may be a product, too."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from fusion.graph import Value

_PASSED = ("cast", "scale", "reshape", "permute", "tanh", "clip")
"""Ops between q kᵀ and the softmax whose first argument is the scores."""


def computed_from(x: Value, source: Value) -> bool:
    """Return True if `x` is `source` or is computed from `source`."""
    later = x.sources(lambda each: (arg for arg in each.args if arg.id >= source.id))
    return any(each is source for each in later)


def product_in(z: Value, biases: Collection[Value] = ()) -> Value | None:
    """Return the product q kᵀ that the scores `z` are computed from; None if all products below are `biases`."""
    while z.op in _PASSED or (z.op == "cat" and z.attrs == (z.rank - 1,)):
        z = z.arg
    if z.op in ("add", "where", "mul"):
        return next((product for _, product in addends_of(z, biases) if product is not None), None)
    return z if z.op == "matmul" and z not in biases else None


def addends_of(z: Value, biases: Collection[Value]) -> list[tuple[Value, Value | None]]:
    """Return the last two arguments of `z`, an add, where or mul, each with the product q kᵀ below it, or None without
    one.

    The argument that is more likely to be scores comes first. `biases` are products that are not taken for q kᵀ.
    """

    def unlikely(addend: tuple[Value, Value | None]) -> tuple[bool, bool]:
        shape = () if addend[1] is None else addend[1].shape
        return prod(shape) != prod(z.shape), shape[-1:] != z.shape[-1:]

    return sorted(((each, product_in(each, biases)) for each in z.args[-2:]), key=unlikely)
