"""Numbers that are rounded to int8 by scales that the model holds, of each head, of each channel or of all.

    divided     int8(clamp(round(x / s + z)))        multiplied     int8(clamp(round(x · s + z)))

s and z are the same for every token, as those by which the rows of a cache are stored (C8), tensors or numbers of the
source. Of the rounding and its bounds it does not matter which stands first.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from fusion import reader, word
from fusion.analysis.nodes import is_computed
from fusion.analysis.rounding import exact, is_float, rounded, unscaled
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from patterns.quant.read_quantise import UNBOUNDED

INT8_ROWS = word(
    "int8_rows",
    "int8(clamp(round(x / scale + zero))), or x · scale",
    x="[*B, D]", scale="as many dims as x, 1 where all share it", zero="as the scale; absent for 0",
    divided="whether x is divided by the scale",
)  # fmt: skip
INT8_BY_NUMBER = word(
    "int8_by_number", "int8(clamp(round(x · by + shift)))",
    x="[*B, D]", by="a number other than 1", shift="a number",
)  # fmt: skip
_BOUNDS = "whole numbers are bounded by {low:g} and {high:g}, those of the operator by -128 and 127"
_VIEWS = ("reshape", "permute", "expand", "slice", "cast")


@reader(gives=(INT8_ROWS, INT8_BY_NUMBER))
def int8_rows(graph: Graph) -> Iterator[Found]:
    """Yield the readings of every int8 value that is quantised so, and why others are not."""
    for value in graph.places:
        if value.op != "cast" or value.dtype != torch.int8 or not is_computed(graph, value):
            continue
        below = rounded(value.arg)
        if not below.rounded or not is_float(below.quotient):
            continue
        found = _scaled(graph.algebra, below.quotient)
        is_bounded_alike = (below.low, below.high) == (-128, 127)
        if found is None:
            found = _by_number(below.quotient) if is_bounded_alike and not below.unbounded else None
        elif below.unbounded:
            found = Miss("quantisation", UNBOUNDED)
        elif not is_bounded_alike:
            found = Miss("quantisation", _BOUNDS.format(low=below.low, high=below.high))
        if found is not None:
            yield value, found


def _scaled(a: Algebra, quotient: Value) -> Reading | None:
    """x by a scale, perhaps with a zero point; None where there is no such scale."""
    zero: Value | None = None
    if quotient.op == "add":
        pairs = (quotient.args, quotient.args[::-1])
        quotient, zero = next(((x, z) for x, z in pairs if _is_held(z) and x.shape == quotient.shape), (quotient, None))
    for x, factor in (quotient.args, quotient.args[::-1]) if quotient.op == "mul" else ():
        divided = factor.op == "power" and factor.attrs == (-1.0,)
        scale = factor.arg if divided else factor
        if x.shape != quotient.shape or not _is_held(scale) or not _is_of_channels(x, scale):
            continue
        if zero is not None and not _is_of_channels(x, zero):
            return None
        said = {"x": exact(x), "scale": _wide(a, exact(scale), x.rank), "divided": divided}
        return Reading("int8_rows", said | ({} if zero is None else {"zero": _wide(a, exact(zero), x.rank)}))
    return None


def _by_number(quotient: Value) -> Reading | None:
    """Return the reading of x · by + shift; None without a factor, and for a quotient of tensors.

    A tensor that divides x may be a scale of each token, with which the number is one scale.
    """
    product, shift = (quotient.arg, quotient.attrs[0]) if quotient.op == "shift" else (quotient, 0.0)
    x, by = unscaled(product)
    is_quotient = x.op == "mul" and any((each.op, each.attrs) == ("power", (-1.0,)) for each in x.args)
    if by in (0, 1) or is_quotient:
        return None
    return Reading("int8_by_number", {"x": exact(x), "by": by, "shift": shift})


def _is_held(factor: Value) -> bool:
    """Whether a factor is an input, perhaps seen or cast otherwise."""
    return factor.below(*_VIEWS).op == "input"


def _is_of_channels(x: Value, factor: Value) -> bool:
    """Whether a factor differs between the last dim and one other alone; of one row with all dims it may be of rows."""
    own = [axis for axis, size in enumerate((*(1,) * (x.rank - factor.rank), *factor.shape)) if size != 1]
    of_rows = factor.rank == x.rank and prod(factor.shape) == prod(x.shape)
    return not of_rows and len(own) < (3 if x.rank - 1 in own else 2)


def _wide(a: Algebra, factor: Value, rank: int) -> Value:
    return a.reshape(factor, (*(1,) * (rank - factor.rank), *factor.shape))
