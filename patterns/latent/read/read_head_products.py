"""Reader of products of each head with its own matrix, by which latent attention absorbs W_UK and applies W_UV.

A reading "head_product" has x [B, N, S, K], weight [N, K, M] and the views from [B, N, S, M] to the result. A product
without a view of x or of the result has none: its heads are first on both sides, and no transpose could be saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from fusion import reader
from fusion.analysis.row_layout import Step, named
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from patterns.attention.core.divided_late import stripped
from patterns.latent.words import HEAD_PRODUCT

ARRANGES = ("permute", "reshape")


@reader(gives=(HEAD_PRODUCT,))
def head_products(graph: Graph) -> Iterator[Annotation]:
    """Read every head_product with a view of x or of the result; if Parameters are known, only products with one."""
    places = graph.places
    viewed = {value.arg for value in places if value.op in ARRANGES}
    for value in list(places):
        product, arranged = stripped(value)
        if product.op != "matmul" or product.dtype != value.dtype or product.rank not in (3, 4):
            continue
        if product is not value and product in places:
            continue  # a view of a product is read with the product
        x, weight = product.args
        constant = graph.is_fixed(weight)
        heads_alone = not (value in viewed or arranged or x.op in ARRANGES)
        if x.shape[:-2] != product.shape[:-2] or heads_alone or (graph.fixed and not constant):
            continue
        outcome = _reading(graph.algebra, x, weight, arranged)
        if isinstance(outcome, Reading):
            yield value, outcome
        elif outcome and constant:
            yield value, Miss("head_product", outcome)


def _reading(a: Algebra, x: Value, weight: Value, arranged: Sequence[Step]) -> Reading | str | None:
    heads = x.shape[-3]
    if heads == 1 or weight.shape[-3:-2] != (heads,):
        return None
    if prod(weight.shape[:-3]) != 1:
        return (
            "weight: each sequence has matrices of its own; npu_transpose_batchmatmul requires [N, K, M], one "
            "of each head for all sequences"
        )
    shape = (*x.shape[:-1], weight.shape[-1])
    rows = shape if x.rank == 4 else (1, *shape)
    steps = [*([("reshape", shape)] if x.rank == 3 else []), *arranged]
    finish = named(steps, {rows[2]: "S", rows[0]: "B"})
    if finish is None:
        return (
            "result: it is reshaped by several symbolic sizes; a rewrite requires one at most; compile for "
            "static sizes of all but one"
        )
    opened = a.reshape(x, (*rows[:-1], x.shape[-1]))
    return Reading("head_product", {"x": opened, "weight": a.reshape(weight, weight.shape[-3:]), "output_view": finish})
