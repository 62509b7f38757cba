"""The product of weights and values that attention ends in, P v, from what the canonical form makes of it.

c (P v) of P (c v)        (vᵀ Pᵀ)ᵀ        (exp(z) v) / Σ exp(z)        s (P k8) of int8 values
"""

from __future__ import annotations

from collections.abc import Container

from fusion.analysis import factored_products
from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul, swapped
from patterns.attention.core.divided_late import Finish, divided_late, stripped

_VIEWS = ("cast", "reshape", "permute", "slice")
"""Ops between a softmax and its product with values."""


def contraction(a: Algebra, root: Value, computed: Container[Value]) -> tuple[Value, Finish]:
    """The product of weights and values that `root` is computed from, and how it is arranged, innermost first.

    Of values that the model multiplies by a number the canonical form has it outside, c (P v). It is put back, P (c v),
    where the model computes v, and not what `root` is c times; `computed` is what it does.
    """
    found = factored_products.weighted_sum(a, root) or divided_late(a, root)
    if found:
        return found
    value, finish = stripped(root)
    if value.op != "scale" or value.arg in computed:
        return _values_behind(a, value, finish)
    product, inner = stripped(value.arg)
    weighted = product.op == "matmul" and any(each.below(*_VIEWS).op == "softmax" for each in product.args)
    if product in computed or not weighted:
        return value, finish
    product, arranged = _values_behind(a, product, (*inner, *finish))
    if not _is_viewed(product.args[1], computed):
        return value, finish
    scaled = (product.arg, a.scale(product.args[1], value.attrs[0]))
    return a.make("matmul", scaled, (), product.shape, product.dtype), arranged


def _values_behind(a: Algebra, value: Value, finish: Finish) -> tuple[Value, Finish]:
    """P v for the transpose of vᵀ Pᵀ; itself for others."""
    if value.op != "matmul" or [each.below(*_VIEWS).op == "softmax" for each in value.args] != [False, True]:
        return value, finish
    product = matmul(a, *(swapped(a, each) for each in value.args[::-1]))
    last = value.rank - 1
    exchanged = (*range(last - 1), last, last - 1)
    return (value, finish) if product is None else (product, (("permute", exchanged), *finish))


def _is_viewed(values: Value, computed: Container[Value]) -> bool:
    """Whether the model computes the values, perhaps arranged otherwise or not repeated for several heads."""
    while values not in computed and values.op in (*_VIEWS, "expand"):
        values = values.arg
    return values in computed
