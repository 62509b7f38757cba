"""Numbers in whole numbers of 8 bits by a scale that the model holds: q = int8(clamp(round(x / scale))).

    fixed_quantised(x, scale, by)           scale [1] times the number `by`; without a tensor the number alone
                                            a scale of each channel [C], by 1

The scale is the one that gives x back. Of the rounding and its bounds it does not matter which stands first.
"""

from __future__ import annotations

from math import prod

import torch

from fusion.cost import is_view
from fusion.graph import Algebra, Reading, Value
from fusion.stages.canonicalise.quantisation import UNSCALED, Found, Misses, Places, exact, is_float, rounded, unscaled

WIDE = torch.float32


def readings(a: Algebra, places: Places, known: Found, odd: Misses) -> tuple[Found, Misses]:
    """Readings of all numbers that are quantised so, but those that are `known` otherwise; why others are none.

    What is `odd` because of a scale of its own keeps that reason.
    """
    found: Found = {}
    misses: Misses = {}
    for value in [each for each in places if each.op == "cast" and each.dtype == torch.int8 and is_float(each.arg)]:
        made = None if value in known or is_view(places[value][0].target) else _read(a, value)
        if isinstance(made, str) and odd.get(value, ("", UNSCALED))[1] == UNSCALED:
            misses[value] = ("fixed_quantised", made)
        elif isinstance(made, Reading):
            found[value] = made
    return found, misses


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
