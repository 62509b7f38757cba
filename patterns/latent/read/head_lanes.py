"""Recognition of values [B, N, S, D], [B, S, N, D] or [T, N, D] as lanes of each head of a linear layer.

    value[b, n, s, j] = (x Wᵀ)[b, s, n · width + start + j]

Every form is proven by building it: a value is a projection of heads if it is identical to the one that the algebra
builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fusion.analysis.rounding import unscaled
from fusion.graph import Algebra, Value
from fusion.graph.contractions import swapped
from fusion.graph.dims import but_ones
from fusion.graph.proof_steps import must, proof, proven
from patterns.kit.lanes import sources


@dataclass(frozen=True)
class HeadLanes:
    """Lanes from `start` on of each head of a layer.

    Attributes:
        operands: captures that describe the layer: x and weight, or layer.
        words: the words for absorbed queries and for lanes of such a layer.
        width: number of lanes of each head in the layer.
        heads_first: True for [B, N, S, D], False for [B, S, N, D].
    """

    operands: Mapping[str, Value]
    words: tuple[str, str]
    width: Any
    start: int
    heads_first: bool

    def captures(self) -> dict[str, Any]:
        """Return the captures of both `words`."""
        return {**self.operands, "width": self.width, "start": self.start}


@dataclass(frozen=True)
class HeadProjection(HeadLanes):
    """Lanes of each head of x Wᵀ, x [B, S, K], W [N · width, K]; `source` is x in the shape that the model has."""

    source: Value

    @property
    def x(self) -> Value:
        """The argument of the layer, [B, S, K]."""
        return self.operands["x"]

    def lanes(self, a: Algebra, count: Any) -> Value:
        """Slice the rows of the weight for `count` lanes of each head, [N, count, K]."""
        rows, inner = self.operands["weight"].shape
        opened = a.reshape(self.operands["weight"], (rows // self.width, self.width, inner))
        return a.cut(opened, 1, self.start, self.start + count)


def head_projection(a: Algebra, value: Value, heads: Any, rows: Any) -> HeadProjection | None:
    """Return the linear layer of which `value` [B, N, S, D], [B, S, N, D] or [T, N, D] is lanes of each of N = `heads`
    heads.

    `rows` is S. None if there is none. A number by which the lanes are multiplied becomes a factor of x.
    """
    value, rows, number = unscaled_lanes(a, value, rows)
    for layer in (_linear, _positions_first, _by_heads):
        for each in sources(value):
            parts = layer(a, each, value.shape[0], heads, rows)
            place = parts and placed(a, value, parts[2])
            if parts and place:
                x, weight, opened = parts
                x = a.scale(x, number)
                operands = {"x": a.reshape(x, (value.shape[0], rows, x.shape[-1])), "weight": weight}
                return HeadProjection(operands, ("absorbed_query", "head_lanes"), opened.shape[-1], *place, x)
    return None


def unscaled_lanes(a: Algebra, value: Value, rows: Any) -> tuple[Value, Any, float]:
    """Split the lanes `value` of heads into lanes and a number that multiplies them.

    Returns:
        The lanes, of [T, N, D] as [T, 1, N, D]; the number of positions, 1 for [T, 1, N, D], else `rows`; the number.
    """
    if value.rank == 3:
        value, rows = a.reshape(value, (value.shape[0], 1, *value.shape[1:])), 1
    below, number = pulled(a, value)
    return below, rows, number


def opened_heads(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Value:
    """Reshape `layer` [.., N · width] to [B, S, N, width], with B = `batch`, S = `rows` and N = `heads`.

    If the sizes do not fit, the result has another shape, so that no value is found to be its lanes.
    """
    return a.reshape(layer, (batch, rows, heads, layer.shape[-1] // heads))


Layer = tuple[Value, Value, Value]
"""Argument x, weight W [N · width, K] and result as heads [B, S, N, width] of a linear layer."""


@proof
def _linear(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """Read `layer` [.., N · width] as the result of a linear layer, of which some outputs may be sliced.

    Returns x, its weight [N · width, K], and the result as [B, S, N, width], with B = `batch`, N = `heads` and S =
    `rows`; None if it is no such layer.
    """
    is_cut = layer.op == "slice" and layer.attrs[0] == layer.rank - 1 and layer.attrs[3] == 1
    product = layer.arg if is_cut else layer
    must(product.op == "matmul" and prod(product.args[1].shape[:-2]) == 1)
    weight = swapped(a, a.reshape(product.args[1], product.args[1].shape[-2:]))
    weight = a.cut(weight, 0, *layer.attrs[1:3]) if is_cut else weight
    return product.arg, weight, opened_heads(a, layer, batch, heads, rows)


@proof
def _positions_first(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """Read `layer` as `_linear` does, for x [S, B, K], or [S · B, K], whose result is transposed to [B, S, N,
    width].
    """
    x, weight, opened = proven(_linear(a, layer, rows, heads, batch))
    by_sequence = a.permute(a.reshape(x, (rows, batch, x.shape[-1])), (1, 0, 2))
    return by_sequence, weight, a.permute(opened, (1, 0, 2, 3))


@proof
def _by_heads(a: Algebra, product: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """Read `product` as x [B, 1, S, K] @ y [N, K, width], a linear layer written with one matrix for each head.

    B = `batch`, N = `heads`, S = `rows`. Returns what `_linear` does; None if it is no such product.
    """
    must(product.op == "matmul")
    x, y = product.args
    is_shared = (*(1,) * (4 - x.rank), *x.shape[:-1]) == (batch, 1, rows)
    must(isinstance(heads, int) and but_ones(y.shape[:-2]) == (heads,) and is_shared)
    inner, width = y.shape[-2:]
    weight = a.reshape(swapped(a, a.reshape(y, (heads, inner, width))), (heads * width, inner))
    return x, weight, a.permute(a.reshape(product, (batch, heads, rows, width)), (0, 2, 1, 3))


def placed(a: Algebra, value: Value, opened: Value) -> tuple[int, bool] | None:
    """Locate the lanes `value` in the heads `opened` [B, S, N, width].

    Returns:
        The first lane, and True for [B, N, S, D], False for [B, S, N, D]; None if `value` is not lanes of `opened`.
    """
    count: Any = value.shape[-1]
    layouts = [opened, a.permute(opened, (0, 2, 1, 3))]
    if opened.shape[0] == 1:  # a permute before the dim of the one sequence was inserted is another value
        layouts.append(a.reshape(a.permute(a.reshape(opened, opened.shape[1:]), (1, 0, 2)), layouts[1].shape))
    starts = {0, *(each.attrs[1] for each in sources(value) if each.op == "slice")} if isinstance(count, int) else ()
    for start in sorted(starts):
        forms = [a.slice(each, -1, start, start + count) for each in layouts]
        if value in forms:
            return start, value is not forms[0]
    return None


def heads_projection(a: Algebra, value: Value, heads: Any, rows: Any) -> HeadProjection | None:
    """Return the linear layer of which `value` [B, N, S, D] is lanes of each of N = `heads` heads; None if there is
    none.

    If N = S = `rows`, a value that is [B, S, N, D] has the same shape: it is refused, unless S is 1.
    """
    projection = head_projection(a, value, heads, rows)
    return projection if projection is not None and (projection.heads_first or rows == 1) else None


def pulled(a: Algebra, value: Value) -> tuple[Value, float]:
    """Split `value` into a value and a number that multiplies it, also below slices, permutes and reshapes."""
    if value.op not in ("slice", "permute", "reshape"):
        return unscaled(value)
    below, number = pulled(a, value.arg)
    if number == 1:
        return value, 1.0
    if value.op != "slice":
        return a.seen_as(below, value), number
    cut = a.slice(below, *value.attrs)
    return (value, 1.0) if cut is None else (cut, number)
