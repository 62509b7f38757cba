"""Numbers in whole numbers of 8 bits by a scale that the model holds: q = int8(clamp(round(x / scale))).

    fixed_quantised(x, scale, by)           scale [1] times the number `by`; without a tensor the number alone
                                            a scale of each channel [C], by 1

The scale is the one that gives x back. Of the rounding and its bounds it does not matter which stands first.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from fusion import reader
from fusion.analysis.nodes import is_computed
from fusion.analysis.rounding import exact, rounded, unscaled
from fusion.graph import Algebra, Graph, Miss, Reading, Value
from patterns.quant.read import UNSCALED, Found, rounded_to_int8

WIDE = torch.float32


@reader(gives=("fixed_quantised",), needs=("token_quantised",))
def static(graph: Graph) -> Iterator[Found]:
    """All numbers that are quantised so, but those that have a scale of each row; why others are none.

    What is no scale of rows for another reason keeps that reason.
    """
    odd = {value: each.reason for value, each in graph.readings.missed("dynamic_quant")}
    for value in rounded_to_int8(graph):
        if graph.readings.of(value, "token_quantised") or not is_computed(graph, value):
            continue
        made = _read(graph.algebra, value)
        if isinstance(made, Reading):
            yield value, made
        elif made is not None and odd.get(value, UNSCALED) == UNSCALED:
            yield value, Miss("fixed_quantised", made)


def _read(a: Algebra, value: Value) -> Reading | str | None:
    below = rounded(value.arg)
    quotient, number = unscaled(below.quotient)
    if not below.rounded or quotient.dtype is None:
        return None
    parts = _factored(quotient, number)
    scale: Value | None = None
    if parts is not None:
        (quotient, more), (factor, outside) = (unscaled(each) for each in parts)
        number *= more * outside
        scale = a.reshape(a.power(a.cast(exact(factor), WIDE), -1), (prod(factor.shape),))
    elif number == 1:
        return None
    if not number:
        return None
    if below.low != -128 or below.high != 127:
        return f"whole numbers are bounded by {below.low:g} and {below.high:g}, those of the operator by -128 and 127"
    captures = {"x": exact(quotient)} | ({} if scale is None else {"scale": scale})
    return Reading("fixed_quantised", captures | {"by": 1 / number})


def _factored(quotient: Value, number: float) -> tuple[Value, Value] | None:
    """x and a factor of all of it; where nothing else scales it, one of each channel; None for x itself."""
    pairs = (quotient.args, quotient.args[::-1]) if quotient.op == "mul" else ()
    for x, factor in pairs:
        if prod(factor.shape) == 1 and prod(x.shape) != 1:
            return x, factor
    for x, factor in sorted(pairs, key=lambda pair: not _is_held(pair[1])) if number == 1 else ():
        if factor.rank and factor.shape[-1:] == x.shape[-1:] and prod(factor.shape) == factor.shape[-1]:
            return x, factor
    return None


def _is_held(factor: Value) -> bool:
    """Whether a factor is an input, or a part or a function of one: of a single token's channels x are as many."""
    while len(factor.args) == 1:
        factor = factor.arg
    return not factor.args
