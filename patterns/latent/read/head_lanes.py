"""Lanes of every head of a linear layer: which ones a value [B, N, S, D], [B, S, N, D] or [T, N, D] holds.

    value[b, n, s, j] = (x Wᵀ)[b, s, n · width + start + j]

Every form is proven by building it: a value is a projection of heads if it is what the algebra makes of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fusion.analysis.rounding import unscaled
from fusion.graph import Algebra, Value
from fusion.graph.contractions import swapped
from fusion.graph.dims import but_ones
from fusion.graph.proof import must, proof, proven


@dataclass(frozen=True)
class HeadLanes:
    """Lanes start … start + d of each head of a layer, which is `of` by the names of the `words` for it."""

    of: Mapping[str, Value]
    words: tuple[str, str]
    width: Any
    start: int
    heads_first: bool

    def captures(self) -> dict[str, Any]:
        """What a reading says of it."""
        return {**self.of, "width": self.width, "start": self.start}


@dataclass(frozen=True)
class HeadProjection(HeadLanes):
    """The same of x Wᵀ, for x [B, S, K], W [N · width, K]; `source` is x as it lies."""

    source: Value

    @property
    def x(self) -> Value:
        """What is projected, by sequence."""
        return self.of["x"]

    def lanes(self, a: Algebra, count: Any) -> Value:
        """The rows of the weight that make `count` lanes of each head [N, count, K]."""
        rows, inner = self.of["weight"].shape
        opened = a.reshape(self.of["weight"], (rows // self.width, self.width, inner))
        return a.cut(opened, 1, self.start, self.start + count)


def head_projection(a: Algebra, value: Value, heads: Any, rows: Any) -> HeadProjection | None:
    """The linear layer of which `value` [B, N, S, D], [B, S, N, D] or [T, N, D] holds some lanes of every head.

    Where they are multiplied by a number, x is what the layer takes times that number.
    """
    value, rows, number = unscaled_lanes(a, value, rows)
    for layer in (_linear, _positions_first, _by_heads):
        for each in sources(value):
            parts = layer(a, each, value.shape[0], heads, rows)
            place = parts and placed(a, value, parts[2])
            if parts and place:
                x, weight, opened = parts
                x = a.scale(x, number)
                of = {"x": a.reshape(x, (value.shape[0], rows, x.shape[-1])), "weight": weight}
                return HeadProjection(of, ("absorbed_query", "head_lanes"), opened.shape[-1], *place, x)
    return None


def unscaled_lanes(a: Algebra, value: Value, rows: Any) -> tuple[Value, Any, float]:
    """Lanes of heads with their rows, those of tokens [T, N, D] as [T, 1, N, D], and the number they are times."""
    if value.rank == 3:
        value, rows = a.reshape(value, (value.shape[0], 1, *value.shape[1:])), 1
    below, number = pulled(a, value)
    return below, rows, number


def opened_heads(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Value:
    """A layer [.., N · width] as [B, S, N, width]; where its sizes do not fit, no value is a part of that."""
    return a.reshape(layer, (batch, rows, heads, layer.shape[-1] // heads))


Layer = tuple[Value, Value, Value]
"""x, W [N · width, K] and the heads [B, S, N, width] of a linear layer."""


@proof
def _linear(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """A linear layer, or some of its outputs."""
    is_cut = layer.op == "slice" and layer.attrs[0] == layer.rank - 1 and layer.attrs[3] == 1
    product = layer.arg if is_cut else layer
    must(product.op == "matmul" and prod(product.args[1].shape[:-2]) == 1)
    weight = swapped(a, a.reshape(product.args[1], product.args[1].shape[-2:]))
    weight = a.cut(weight, 0, *layer.attrs[1:3]) if is_cut else weight
    return product.arg, weight, opened_heads(a, layer, batch, heads, rows)


@proof
def _positions_first(a: Algebra, layer: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """A linear layer of [S, B, K], which may be flattened."""
    x, weight, opened = proven(_linear(a, layer, rows, heads, batch))
    by_sequence = a.permute(a.reshape(x, (rows, batch, x.shape[-1])), (1, 0, 2))
    return by_sequence, weight, a.permute(opened, (1, 0, 2, 3))


@proof
def _by_heads(a: Algebra, product: Value, batch: Any, heads: Any, rows: Any) -> Layer | None:
    """The same where every head multiplies by a matrix of its own: x [B, 1, S, K] @ y [N, K, width]."""
    must(product.op == "matmul")
    x, y = product.args
    of_rows = (*(1,) * (4 - x.rank), *x.shape[:-1]) == (batch, 1, rows)
    must(isinstance(heads, int) and but_ones(y.shape[:-2]) == (heads,) and of_rows)
    inner, width = y.shape[-2:]
    weight = a.reshape(swapped(a, a.reshape(y, (heads, inner, width))), (heads * width, inner))
    return x, weight, a.permute(a.reshape(product, (batch, heads, rows, width)), (0, 2, 1, 3))


def sources(value: Value) -> Iterator[Value]:
    """A value and what it is cut, turned and reshaped from."""
    yield value
    while value.op in ("slice", "permute", "reshape"):
        value = value.arg
        yield value


def placed(a: Algebra, value: Value, opened: Value) -> tuple[int, bool] | None:
    """From which lane of each head of [B, S, N, width] on `value` is, and whether heads stand before positions."""
    count: Any = value.shape[-1]
    both = [opened, a.permute(opened, (0, 2, 1, 3))]
    if opened.shape[0] == 1:  # turned before one sequence had a dim
        both.append(a.reshape(a.permute(a.reshape(opened, opened.shape[1:]), (1, 0, 2)), both[1].shape))
    starts = {0, *(each.attrs[1] for each in sources(value) if each.op == "slice")} if isinstance(count, int) else ()
    for start in sorted(starts):
        forms = [a.slice(each, -1, start, start + count) for each in both]
        if value in forms:
            return start, value is not forms[0]
    return None


def heads_projection(a: Algebra, value: Value, heads: Any, rows: Any) -> HeadProjection | None:
    """The same where heads stand before positions, [B, N, S, D]: as many of both give either order this shape."""
    found = head_projection(a, value, heads, rows)
    return found if found is not None and (found.heads_first or rows == 1) else None


def pulled(a: Algebra, value: Value) -> tuple[Value, float]:
    """Lanes of heads, and the number that they, or all that they are cut from, are multiplied by."""
    if value.op not in ("slice", "permute", "reshape"):
        return unscaled(value)
    below, number = pulled(a, value.arg)
    if number == 1:
        return value, 1.0
    if value.op != "slice":
        return a.seen_as(below, value), number
    cut = a.slice(below, *value.attrs)
    return (value, 1.0) if cut is None else (cut, number)
