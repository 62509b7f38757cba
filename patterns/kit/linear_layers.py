"""Linear layers of floats, y = x Wᵀ (+ b), however the product is transposed, reshaped and scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.fx as fx

from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Value
from fusion.graph.contractions import swapped

Places = Mapping[Value, Sequence[fx.Node]]
Parts = tuple[Value, Value, "Value | None"]


def linear(a: Algebra, places: Places, value: Value) -> Parts | None:
    """Read `value` as a floating-point linear layer, also below reshapes of rows and a factor: x, weight, and bias or
    None.

    None for other values, and for a scaled layer whose scaled weight no node in `places` computes.
    """
    if value.op == "matmul" and is_float(value):
        x, y = value.args
        plain = all(size == 1 for size in y.shape[:-2]) and value.rank == x.rank
        return (x, swapped(a, a.reshape(y, y.shape[-2:])), None) if plain else None
    if value.op == "add":
        return _biased(a, places, *value.args) or _biased(a, places, *value.args[::-1])
    viewed = value.op == "reshape" and value.shape[-1:] == value.arg.shape[-1:]
    parts = linear(a, places, value.arg) if viewed or value.op == "scale" else None
    if parts is None:
        return None
    x, weight, bias = parts
    if viewed:
        return a.reshape(x, (*value.shape[:-1], x.shape[-1])), weight, bias
    weight = a.scale(weight, value.attrs[0])  # the factor is part of the weight that the model uses
    return (x, weight, None) if bias is None and weight in places else None


def _biased(a: Algebra, places: Places, product: Value, bias: Value) -> Parts | None:
    if bias.shape != product.shape[-1:]:
        return None
    parts = linear(a, places, product)
    return None if parts is None or parts[2] is not None else (*parts[:2], bias)
