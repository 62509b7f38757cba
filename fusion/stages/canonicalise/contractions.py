"""Contractions: every product that sums over a dim is matmul(x [.., M, K], y [.., K, N]), with its factors outside.

x·s @ y, x @ (y·s)              → scale(matmul(x, y), s)       linear(x, w, b)  → add(matmul(x, wᵀ), b)
mm of flattened rows            → matmul of the rows as they were
bmm of flattened batch dims     → matmul with the batch dims
einsum of two operands          → matmul of permuted operands
[T, N, 1, K] · [N, K, M]        → matmul of the rows of each head
a row with a row                → the sum of their elementwise product
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from math import prod
from typing import Any

from fusion.graph import Algebra, Value, broadcast
from fusion.stages.canonicalise.translate import Out, Translated, is_number, translates


def matmul(a: Algebra, x: Value, y: Value) -> Value | None:
    """x [*A, M, K] · y [*B, K, N], batch dims broadcast; None where the shapes do not fit."""
    x, left = _unscaled(a, x)
    y, right = _unscaled(a, y)
    product = _of_rows(a, x, y) if y.rank == 2 else _of_batches(a, x, y)
    return None if product is None else a.scale(product, left * right)


def swapped(a: Algebra, x: Value) -> Value:
    """The last two dims exchanged."""
    return a.permute(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def _unscaled(a: Algebra, x: Value) -> tuple[Value, float]:
    if x.op == "scale":
        inner, factor = _unscaled(a, x.arg)
        return inner, factor * x.attrs[0]
    if x.op not in ("permute", "expand", "reshape"):
        return x, 1.0
    inner, factor = _unscaled(a, x.arg)
    if factor == 1:
        return x, 1.0
    return a.seen_as(inner, x), factor


def _of_rows(a: Algebra, x: Value, y: Value) -> Value | None:
    """One matrix for all rows: rows that were flattened for it keep their dims."""
    if x.op == "reshape" and x.arg.rank and x.arg.shape[-1] == x.shape[-1]:
        product = _product(a, x.arg, y)
        return None if product is None else a.reshape(product, (*x.shape[:-1], y.shape[-1]))
    return _product(a, x, y)


def _of_batches(a: Algebra, x: Value, y: Value) -> Value | None:
    """Batch dims that were flattened for it come back."""
    for flat in (x, y):
        kept = flat.op == "reshape" and flat.arg.rank > flat.rank and flat.arg.shape[-2:] == flat.shape[-2:]
        if kept and x.shape[:-2] == y.shape[:-2]:
            batch = flat.arg.shape[:-2]
            whole = matmul(a, *(a.reshape(each, (*batch, *each.shape[-2:])) for each in (x, y)))
            return None if whole is None else a.reshape(whole, (*x.shape[:-2], *whole.shape[-2:]))
    lead = x.rank - len(_batch(y)) - 2
    if x.shape[-2] == 1 and len(_batch(y)) == 1 and lead > 0 and prod(x.shape[:lead]) != 1:
        return _of_heads(a, x, y, lead)
    return _product(a, x, y)


def _batch(y: Value) -> tuple[Any, ...]:
    """The batch dims of a matrix from the first that is not of size 1."""
    own = next((place for place, size in enumerate(y.shape[:-2]) if size != 1), y.rank - 2)
    return y.shape[own:-2]


def _of_heads(a: Algebra, x: Value, y: Value, lead: int) -> Value | None:
    """A matrix for each head, of single rows [*lead, N, 1, K]: the rows of a head together."""
    heads, width = x.shape[lead], x.shape[-1]
    rows = a.permute(a.reshape(x, (prod(x.shape[:lead]), heads, width)), (1, 0, 2))
    product = _product(a, rows, a.reshape(y, y.shape[-3:]))
    return None if product is None else a.reshape(a.permute(product, (1, 0, 2)), (*x.shape[:-1], y.shape[-1]))


def _product(a: Algebra, x: Value, y: Value) -> Value | None:
    batch = broadcast(x.shape[:-2], y.shape[:-2])
    x, y = _once(x, y.shape[:-2], batch), _once(y, x.shape[:-2], batch)
    if batch is None or x.shape[-1:] != y.shape[-2:-1]:
        return None
    rows = x.shape[-2:-1] if y.rank > 2 or x.rank > 1 else ()
    return a.make("matmul", (x, y), (), (*batch, *rows, y.shape[-1]), x.dtype)


def _once(x: Value, other: Sequence[Any], batch: Sequence[Any] | None) -> Value:
    """An operand without the repetition of batch dims that a product does as well."""
    plain = x.op == "expand" and x.arg.rank == x.rank and x.arg.shape[-2:] == x.shape[-2:]
    return x.arg if plain and broadcast(x.arg.shape[:-2], other) == batch else x


def _row_product(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    product = a.mul(a.cast(x, out.dtype), a.cast(y, out.dtype))
    summed = None if product is None else a.sum(product, (-1,))
    return None if summed is None else a.reshape(summed, out.shape)


@translates("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default")
def _matmul(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    x = a.reshape(x, (1, *x.shape)) if x.rank == 1 else x
    y = a.reshape(y, (*y.shape, 1)) if y.rank == 1 else y
    if x.shape[-2] == 1 and y.shape[-1] == 1:
        return _row_product(a, out, x, a.reshape(y, (*y.shape[:-2], 1, y.shape[-2])))
    product = matmul(a, x, y)
    return None if product is None else a.reshape(product, out.shape)


@translates("aten.linear.default")
def _linear(a: Algebra, out: Out, x: Value, weight: Value, bias: Value | None = None) -> Translated:
    if x.rank < 2 or weight.rank != 2:
        return None
    product = matmul(a, x, swapped(a, weight))
    return product if product is None or bias is None else a.add(product, bias)


@translates("aten.addmm.default", "aten.baddbmm.default")
def _addmm(a: Algebra, out: Out, bias: Value, x: Value, y: Value, beta: Any = 1, alpha: Any = 1) -> Translated:
    product = matmul(a, x, y)
    if product is None or not is_number(beta) or not is_number(alpha):
        return None
    product = a.scale(product, alpha)
    return product if beta == 0 else a.add(product, a.scale(bias, beta))


@translates("aten.einsum.default")
def _einsum(a: Algebra, out: Out, equation: str, operands: Sequence[Value]) -> Translated:
    """Two operands, each label once in an operand; others stay as they are."""
    if len(operands) != 2 or "->" not in equation:
        return None
    terms, result = equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    if left and left == right and left[:-1] == result:
        return _row_product(a, out, *operands)
    left, right, result = _spelled_out((left, right, result), [each.rank for each in operands])
    if any("." in labels or len(set(labels)) < len(labels) for labels in (left, right, result)):
        return None
    summed = [label for label in left if label in right and label not in result]
    if len(summed) != 1 or set(left) ^ set(right) != set(result) - (set(left) & set(right)):
        return None
    return _contract(a, out, operands, (left, right, result), summed[0])


def _spelled_out(terms: tuple[str, str, str], ranks: Sequence[int]) -> tuple[str, str, str]:
    """Labels for the dims behind "...", if both operands have as many of them."""
    behind = {rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=False)}
    if not all("..." in term for term in terms) or len(behind) != 1:
        return terms
    free = [label for label in string.ascii_letters if label not in "".join(terms)][: behind.pop()]
    left, right, result = (term.replace("...", "".join(free)) for term in terms)
    return left, right, result


def _contract(a: Algebra, out: Out, operands: Sequence[Value], labels: tuple[str, str, str], summed: str) -> Translated:
    """The last label of the result that only one operand has is its row (or column), all others are batch dims."""
    left, right, result = labels
    if not set(left) & (set(right) - {summed}) and len(left) == 2 < len(right):  # the matrix for all rows comes second
        return _contract(a, out, operands[::-1], (right, left, result), summed)
    row = next((label for label in reversed(result) if label not in right), "")
    column = next((label for label in reversed(result) if label not in left), "")
    batch = [label for label in result if label not in (row, column)]
    x = _arranged(a, operands[0], left, [*batch, row, summed])
    shared = batch if any(label in right for label in batch) else []
    y = _arranged(a, operands[1], right, [*shared, summed, column])
    product = matmul(a, x, y)
    if product is None:
        return None
    made = [*batch, row, column]
    kept = [position for position, label in enumerate(made) if label]
    product = a.reshape(product, tuple(product.shape[position] for position in kept))
    present = [label for label in made if label]
    return a.permute(product, [present.index(label) for label in result])


def _arranged(a: Algebra, x: Value, labels: str, wanted: Sequence[str]) -> Value:
    """`x` with its dims in the wanted order, and dims of size 1 for the labels that it has not."""
    x = a.permute(x, [labels.index(label) for label in wanted if label in labels and label])
    sizes = iter(x.shape)
    return a.reshape(x, tuple(next(sizes) if label and label in labels else 1 for label in wanted))
