"""Contractions: the product of a row with a row is the sum of their elementwise product."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.graph import Algebra, Value
from fusion.stages.canonicalise.translate import Out, Translated, translates


def _row_product(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    product = a.mul(a.cast(x, out.dtype), a.cast(y, out.dtype))
    summed = None if product is None else a.sum(product, (-1,))
    return None if summed is None else a.reshape(summed, out.shape)


@translates("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def _matmul(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    """[.., 1, K] · [.., K, 1]; any other product stays as it is."""
    if x.rank < 2 or y.rank < 2 or x.shape[-2] != 1 or y.shape[-1] != 1:
        return None
    return _row_product(a, out, x, a.reshape(y, (*y.shape[:-2], 1, y.shape[-2])))


@translates("aten.einsum.default")
def _einsum(a: Algebra, out: Out, equation: str, operands: Sequence[Value]) -> Translated:
    """`...d,...d->...`: one label is summed, the others are kept in order."""
    if len(operands) != 2 or "->" not in equation:
        return None
    terms, result = equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    if left != right or left[:-1] != result:
        return None
    return _row_product(a, out, *operands)
