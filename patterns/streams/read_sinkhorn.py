"""Matrices whose rows and columns are normalised alternately (Sinkhorn and Knopp, 1967), as in hyper-connections.

P ← P / Σ_j P_ij,  P ← P / Σ_i P_ij,  …        the first may be a softmax; or x ← x - logsumexp(x), alternately
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fusion import reader, word
from fusion.analysis.dtypes import is_rounding
from fusion.graph import Annotation, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped

SINKHORN_MATRIX = word(
    "sinkhorn_matrix", "softmax(x) + eps, columns divided by their sums + eps, then rows and columns in turns",
    x="[*B, N, N]", iterations="number of times that columns are divided", eps="number added to softmax and sums",
)  # fmt: skip
LEAST = 3
"""The least number of normalisations that is an iteration; some models normalise weights twice."""
_ROWS, _COLUMNS = -1, -2
"""Axes of the sums of rows, and of columns."""
_SUMMED = ("shift", "clip", "scale", "reshape", "permute", "cast")
_ARRANGED = ("cast", "reshape", "permute", "slice", "scale", "exp")


class _Normalised(NamedTuple):
    """A matrix `x`, divided by its sums over `axis` (-1 or -2).

    `sums` are the values that compute the divisor; `eps` is the number added to each sum, None for another divisor.
    """

    x: Value
    axis: int
    sums: tuple[Value, ...] = ()
    eps: float | None = None


@dataclass(frozen=True)
class _Chain:
    """A chain of normalisations, each over rows or columns of the result of the one before.

    Attributes:
        x: the matrix that the first one reads.
        axes: the axis of each, -1 or -2, in the orientation of the last result.
        softmax: True if the first is a softmax.
        turned: True if the last result has the orientation of the transpose of `x`.
        eps: the numbers that are added to the softmax, and then to each sum; None where no one number is added.
        values: the values that the chain computes, in order.
    """

    x: Value
    axes: tuple[int, ...]
    softmax: bool
    turned: bool
    eps: tuple[float | None, ...]
    values: tuple[Value, ...]


@reader(gives=(SINKHORN_MATRIX,))
def sinkhorn(graph: Graph) -> Iterator[Annotation]:
    """Read matrices that npu_mhc_sinkhorn computes as `sinkhorn_matrix`; give why others are none that are normalised
    `LEAST` times or more, alternately.
    """
    chains = _chains(graph)
    inner = {step for chain in chains.values() for step in chain.values[:-1]}
    ends = {value: chain for value, chain in chains.items() if value not in inner and len(chain.axes) >= LEAST}
    products = _products(graph, ends) if ends else {}
    for value, last in ends.items():
        covered = frozenset((*last.values[:-1], *products[value]))
        root, chain = _upright(graph, value, last)
        reason = _why_not(chain)
        if reason:
            yield value, Miss("sinkhorn", reason, (value,), covers=covered | {value})
            continue
        captures = {"x": chain.x, "iterations": len(chain.axes) // 2, "eps": chain.eps[0]}
        yield root, Reading("sinkhorn_matrix", captures)
        yield chain.values[0], Miss("sinkhorn", "matrix: it is normalised further", limited=True, covers=covered)


def _upright(graph: Graph, value: Value, chain: _Chain) -> tuple[Value, _Chain]:
    """Return the transpose of `value` and its chain, if `chain` ends transposed and a node has the transpose; else
    both as they are."""
    root = swapped(graph.algebra, value) if chain.turned else value
    if root is value or root not in graph.places:
        return value, chain
    return root, replace(chain, axes=tuple(_seen(each, 1) for each in chain.axes), turned=False)


def _why_not(chain: _Chain) -> str:
    """Return the reason why npu_mhc_sinkhorn does not compute `chain`; "" if it does."""
    if chain.x.dtype not in (torch.float32, torch.float64):
        return "matrix: it is in {}; npu_mhc_sinkhorn requires float32; cast it before the softmax".format(
            str(chain.x.dtype).removeprefix("torch.")
        )
    text = (
        f"matrix: its rows and columns are normalised in turns, {len(chain.axes)} times, {{}}; "
        "npu_mhc_sinkhorn requires softmax(x, -1) + eps, columns divided by their sums + eps, then rows and columns in "
        "turns; {}"
    )
    if not chain.softmax:
        return text.format("without a softmax as the first", "write the first one of rows as x.softmax(-1) + eps")
    if chain.turned or chain.axes[0] != _ROWS:
        return text.format("the first of which is a softmax of columns", "write the transposed matrix so")
    if len(chain.axes) % 2:
        return text.format("rows last", "write columns last")
    if None in chain.eps or len(set(chain.eps)) > 1:
        return text.format(f"with {_numbers(chain.eps)} added in these steps", "add one eps everywhere")
    return ""


def _numbers(eps: Sequence[float | None]) -> str:
    """List the different numbers in `eps` as text."""
    texts = dict.fromkeys("another term" if each is None else f"{each:g}" for each in eps)
    return " and ".join(texts)


def _chains(graph: Graph) -> dict[Value, _Chain]:
    """Return for each value that is normalised over rows or columns the longest chain that ends with it."""
    chains: dict[Value, _Chain] = {}
    for value in graph.places:
        normalised = _normalised(value)
        if normalised is not None:
            chains[value] = _continued(chains, value, normalised)
    return chains


def _continued(chains: dict[Value, _Chain], value: Value, step: _Normalised) -> _Chain:
    """Return the chain that ends with `value` = `step`: the chain in `chains` of its matrix with `step` at the end, or
    a new one.
    """
    below, turns, added = step.x, 0, 0.0
    while below.op == "shift" or is_rounding(below) or _is_transposed(below):
        turns += below.op == "permute"
        added += below.attrs[0] if below.op == "shift" else 0.0
        below = below.arg
    before = chains.get(below)
    axis = step.axis
    if before is None or value.op == "softmax" or _seen(before.axes[-1], turns) == axis:
        softmax = value.op == "softmax" and value.attrs[1] == "nan"  # of a row of -inf, as the operator
        return _Chain(step.x, (axis,), softmax, False, (step.eps,), (*step.sums, value))
    is_first = len(before.axes) == 1 and before.softmax
    return replace(
        before,
        axes=(*(_seen(each, turns) for each in before.axes), axis),
        turned=before.turned != (turns % 2 == 1),
        eps=(added, step.eps) if is_first else (*before.eps, None if added else step.eps),
        values=(*before.values, *step.sums, value),
    )


def _seen(axis: int, turns: int) -> int:
    """Return `axis`, -1 or -2, of a matrix that is transposed `turns` times."""
    return axis if turns % 2 == 0 else -3 - axis


def _is_transposed(x: Value) -> bool:
    """Return True if `x` transposes the last two dims."""
    return x.op == "permute" and x.attrs == (*range(x.rank - 2), x.rank - 1, x.rank - 2)


def _normalised(value: Value) -> _Normalised | None:
    if value.rank < 2:
        return None
    if value.op == "softmax" and value.attrs[0] in (_ROWS, _COLUMNS):
        return _Normalised(value.arg, value.attrs[0])
    for x, by in (value.args, value.args[::-1]) if value.op in ("mul", "add") else ():
        inverse = by.below("scale") if value.op == "mul" else by
        is_divided = inverse.op == "power" and inverse.attrs[0] == -1
        is_shifted = inverse.op == "scale" and inverse.attrs[0] == -1 and inverse.arg.op == "log_sum_exp"
        if x.shape == value.shape and (is_divided or is_shifted):
            total = inverse.arg.below(*_SUMMED)
            if total.op in ("mean", "total", "log_sum_exp") and total.arg is x and total.attrs[0] in (_ROWS, _COLUMNS):
                eps = _added(x, by, inverse, total) if is_divided else None
                return _Normalised(x, total.attrs[0], (by, inverse, inverse.arg, total), eps)
    return None


def _added(x: Value, by: Value, inverse: Value, mean: Value) -> float | None:
    """Return the number e for which `by` is 1 / (sum + e), of the sum of `x` that is a multiple of `mean`; None if
    `by` is no such number.

    `by` is `inverse`, a power -1, times factors.
    """
    size = x.shape[mean.attrs[0]]
    if mean.op != "mean" or len(mean.attrs) != 1 or not isinstance(size, int) or by.shape != mean.shape:
        return None
    factor = math.prod(each.attrs[0] for each in _steps(by, inverse))
    slope, offset = 1.0, 0.0
    for each in reversed(_steps(inverse.arg, mean)):
        if each.op not in ("scale", "shift", "reshape") or each.shape != mean.shape:
            return None
        slope, offset = _applied(each, slope, offset)
    return offset / factor if factor and math.isclose(slope / factor, size, rel_tol=1e-9) else None


def _steps(value: Value, below: Value) -> list[Value]:
    """List `value`, its first argument, that of this, and so on, as far as `below`, which is left out."""
    steps: list[Value] = []
    while value is not below:
        steps.append(value)
        value = value.arg
    return steps


def _applied(step: Value, slope: float, offset: float) -> tuple[float, float]:
    """Apply `step`, a scale, a shift or a view, to slope · x + offset."""
    if step.op == "scale":
        return slope * step.attrs[0], offset * step.attrs[0]
    return slope, offset + (step.attrs[0] if step.op == "shift" else 0.0)


def _products(graph: Graph, matrices: Iterable[Value]) -> dict[Value, list[Value]]:
    """Return for each of `matrices` the matmuls that have it as a factor."""
    products: dict[Value, list[Value]] = {each: [] for each in matrices}
    for each in graph.owners:
        for arg in each.args if each.op == "matmul" else ():
            below = arg.below(*_ARRANGED)
            if below in products:
                products[below].append(each)
    return products
