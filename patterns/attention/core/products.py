"""The product P v of weights and values at the end of attention, recovered from its canonical forms.

c (P v) for P (c v)        (vᵀ Pᵀ)ᵀ        (exp(z) v) / Σ exp(z)        s (P k8) for int8 values
"""

from __future__ import annotations

from collections.abc import Container

from fusion.analysis import factored_products
from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul, swapped
from patterns.attention.core.divided_late import Finish, divided_late, stripped

VIEWS = ("cast", "reshape", "permute", "slice")
"""Ops between a softmax and its product with values."""


def contraction(a: Algebra, root: Value, computed: Container[Value]) -> tuple[Value, Finish]:
    """Return the product of weights and values that `root` is computed from, and the steps to `root`, innermost first.

    Canonically, a factor c of the values is outside of the product: c (P v). It is moved back, P (c v), if v, but not
    P v, is among the values `computed` by the model.
    """
    rewritten = factored_products.weighted_sum(a, root) or divided_late(a, root)
    if rewritten:
        return rewritten
    value, finish = stripped(root)
    if value.op != "scale" or value.arg in computed:
        return _values_behind(a, value, finish)
    product, inner = stripped(value.arg)
    weighted = product.op == "matmul" and any(each.below(*VIEWS).op == "softmax" for each in product.args)
    if product in computed or not weighted:
        return value, finish
    product, arranged = _values_behind(a, product, (*inner, *finish))
    if not _is_viewed(product.args[1], computed):
        return value, finish
    scaled = (product.arg, a.scale(product.args[1], value.attrs[0]))
    return a.make("matmul", scaled, (), product.shape, product.dtype), arranged


def _values_behind(a: Algebra, value: Value, finish: Finish) -> tuple[Value, Finish]:
    """Rewrite `value` vᵀ Pᵀ to P v, with the transpose as the first step; other values stay."""
    if value.op != "matmul" or [each.below(*VIEWS).op == "softmax" for each in value.args] != [False, True]:
        return value, finish
    product = matmul(a, *(swapped(a, each) for each in value.args[::-1]))
    last = value.rank - 1
    exchanged = (*range(last - 1), last, last - 1)
    return (value, finish) if product is None else (product, (("permute", exchanged), *finish))


def _is_viewed(values: Value, computed: Container[Value]) -> bool:
    """Return True if `values`, or a value that they are a view, cast or expansion of, is in `computed`."""
    while values not in computed and values.op in (*VIEWS, "expand"):
        values = values.arg
    return values in computed
