"""Signs: float values whose elements are at least 0 (or NaN), proven from how they are computed."""

from __future__ import annotations

from math import inf

from fusion.graph.value import Value


def is_nonnegative(x: Value) -> bool:
    """Return True if every element of the float value `x` is proven to be at least 0 or NaN.

    False for every integer, because integers wrap around.
    """
    if x.dtype is None or not x.dtype.is_floating_point:
        return False
    match x.op:
        case "abs" | "exp" | "relu" | "sigmoid" | "softmax":
            return True
        case "power":
            return x.attrs[0] % 2 == 0 or x.attrs[0] == 0.5 or is_nonnegative(x.arg)
        case "clip" | "clamp":
            return x.attrs[0] >= 0 or (x.attrs[1] == inf and is_nonnegative(x.arg))
        case "greatest" | "largest" | "mean" | "cast" | "reshape" | "permute" | "slice" | "expand" | "index" | "take":
            return is_nonnegative(x.arg)
        case "scale" | "shift":
            return x.attrs[0] >= 0 and is_nonnegative(x.arg)
        case "mul" | "add" | "cat":
            return all(map(is_nonnegative, x.args))
        case "where":
            return all(map(is_nonnegative, x.args[1:]))
        case "full":
            return x.attrs[0] >= 0
        case _:
            return False
