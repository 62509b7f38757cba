"""Which addend of masked and biased scores is the product of queries and keys: a bias may be a product itself."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from fusion.graph import Value

_PASSED = ("cast", "scale", "reshape", "permute", "tanh", "clip")
"""What scores go through between their product and the softmax."""


def computed_from(x: Value, source: Value) -> bool:
    """Whether `source` is among what `x` is computed from."""
    seen, waiting = {x}, [x]
    while waiting:
        new = {each for each in waiting.pop().args if each.id >= source.id} - seen
        seen |= new
        waiting.extend(new)
    return source in seen


def product_in(z: Value, biases: Collection[Value] = ()) -> Value | None:
    """The product of queries and keys of which `z` consists of scores, which is none of the biases."""
    while z.op in _PASSED or (z.op == "cat" and z.attrs == (z.rank - 1,)):
        z = z.arg
    if z.op in ("add", "where", "mul"):
        return next((product for _, product in addends_of(z, biases) if product is not None), None)
    return z if z.op == "matmul" and z not in biases else None


def addends_of(z: Value, biases: Collection[Value]) -> list[tuple[Value, Value | None]]:
    """What may be scores of a sum, a choice or a product, with the product in it; the likeliest first."""

    def unlikely(addend: tuple[Value, Value | None]) -> tuple[bool, bool]:
        shape = () if addend[1] is None else addend[1].shape
        return prod(shape) != prod(z.shape), shape[-1:] != z.shape[-1:]

    return sorted(((each, product_in(each, biases)) for each in z.args[-2:]), key=unlikely)
