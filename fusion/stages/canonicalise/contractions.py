"""Contractions: every product that sums over a dim is matmul(x [.., M, K], y [.., K, N]), with its factors outside.

x·s @ y, x @ (y·s)              → scale(matmul(x, y), s)       linear(x, w, b)  → add(matmul(x, wᵀ), b)
mm of flattened rows            → matmul of the rows with their own dims
bmm of flattened batch dims     → matmul with the batch dims
einsum of two operands          → matmul of permuted operands; a dim of size 1 that only one of them has is dropped
[T, N, 1, K] · [N, K, M]        → matmul of the rows of each head
dot product of rows             → sum of the elementwise product
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise.translators import Out, Translated, is_number, translates


def _row_product(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    product = proven(a.mul(a.cast(x, out.dtype), a.cast(y, out.dtype)))
    return a.reshape(proven(a.sum(product, (-1,))), out.shape)


@translates("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default")
def _matmul(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    x = a.reshape(x, (1, *x.shape)) if x.rank == 1 else x
    y = a.reshape(y, (*y.shape, 1)) if y.rank == 1 else y
    if x.shape[-2] == 1 and y.shape[-1] == 1:
        return _row_product(a, out, x, a.reshape(y, (*y.shape[:-2], 1, y.shape[-2])))
    return a.reshape(proven(matmul(a, x, y)), out.shape)


@translates("aten._int_mm.default")
def _int_mm(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    return matmul(a, a.cast(x, torch.int32), a.cast(y, torch.int32))


@translates("aten.linear.default")
def _linear(a: Algebra, out: Out, x: Value, weight: Value, bias: Value | None = None) -> Translated:
    must(x.rank >= 2)
    product = proven(matmul(a, x, swapped(a, weight)))
    return product if bias is None else a.add(product, bias)


@translates("aten.addmm.default", "aten.baddbmm.default")
def _addmm(a: Algebra, out: Out, bias: Value, x: Value, y: Value, beta: Any = 1, alpha: Any = 1) -> Translated:
    must(is_number(beta) and is_number(alpha))
    product = a.scale(proven(matmul(a, x, y)), alpha)
    plain = beta == 0 or (bias.below("expand").op == "full" and bias.below("expand").attrs[0] == 0)
    return product if plain else a.add(product, a.scale(bias, beta))


@translates("aten.einsum.default")
def _einsum(a: Algebra, out: Out, equation: str, operands: Sequence[Value]) -> Translated:
    """Translate an einsum of two operands that sums over one label, with each label once per operand, to a matmul.

    Operands with equal labels whose last one is summed are multiplied elementwise and summed. Both are cast to the
    result's dtype, as torch multiplies without a sum where that label has size 1.
    """
    must(len(operands) == 2 and "->" in equation)
    operands = [a.cast(each, out.dtype) for each in operands]
    terms, result = equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    if left and left == right and left[:-1] == result:
        return _row_product(a, out, *operands)
    left, right, result = _spelled_out((left, right, result), [each.rank for each in operands])
    must(all("." not in labels and len(set(labels)) == len(labels) for labels in (left, right, result)))
    operands, (left, right) = _without_ones(a, operands, (left, right), result)
    summed = [label for label in left if label not in result]
    must(len(summed) == 1 and set(left) ^ set(right) == set(result) - (set(left) & set(right)))
    return _contract(a, out, operands, (left, right, result), summed[0])


def _without_ones(
    a: Algebra, operands: Sequence[Value], terms: tuple[str, str], result: str
) -> tuple[Sequence[Value], tuple[str, str]]:
    """Drop each dim of size 1 whose label neither the other operand nor the result has; return operands and labels."""
    plain: list[Value] = []
    labels: list[str] = []
    for x, own, other in zip(operands, terms, terms[::-1], strict=True):
        there = [at for at, label in enumerate(own) if label in other or label in result or x.shape[at] != 1]
        plain.append(a.reshape(x, tuple(x.shape[at] for at in there)))
        labels.append("".join(own[at] for at in there))
    return plain, (labels[0], labels[1])


def _spelled_out(terms: tuple[str, str, str], ranks: Sequence[int]) -> tuple[str, str, str]:
    """Replace "..." in `terms`, the labels of two operands and the result, by free labels.

    `terms` as they are if the operands, of `ranks`, have different numbers of dims there.
    """
    behind = {rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=False)}
    if not all("..." in term for term in terms) or len(behind) != 1:
        return terms
    free = [label for label in string.ascii_letters if label not in "".join(terms)][: behind.pop()]
    left, right, result = (term.replace("...", "".join(free)) for term in terms)
    return left, right, result


def _contract(a: Algebra, out: Out, operands: Sequence[Value], labels: tuple[str, str, str], summed: str) -> Translated:
    """Multiply two operands by a matmul that sums over the label `summed`.

    The last label of the result that only the first operand has is the row, that of the second the column; all others
    are batch dims.
    """
    left, right, result = labels
    if not set(left) & (set(right) - {summed}) and len(left) == 2 < len(
        right
    ):  # a matrix without batch dims is the second operand
        return _contract(a, out, operands[::-1], (right, left, result), summed)
    row = next((label for label in reversed(result) if label not in right), "")
    column = next((label for label in reversed(result) if label not in left), "")
    batch = [label for label in result if label not in (row, column)]
    x = _arranged(a, operands[0], left, [*batch, row, summed])
    shared = batch if any(label in right for label in batch) else []
    y = _arranged(a, operands[1], right, [*shared, summed, column])
    product = proven(matmul(a, x, y))
    made = [*batch, row, column]
    product = a.reshape(product, [size for size, label in zip(product.shape, made, strict=True) if label])
    present = [label for label in made if label]
    return a.permute(product, [present.index(label) for label in result])


def _arranged(a: Algebra, x: Value, labels: str, wanted: Sequence[str]) -> Value:
    """Permute `x` to the order of the labels `wanted`, with dims of size 1 for labels that it does not have."""
    x = a.permute(x, [labels.index(label) for label in wanted if label in labels and label])
    sizes = iter(x.shape)
    return a.reshape(x, tuple(next(sizes) if label and label in labels else 1 for label in wanted))
