"""Gelu written out: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), or x / 2 · (1 + erf(x / √2)).

The operand of tanh or erf is read as a polynomial of x, so that x³ may be a power, or products in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fusion import reader, word
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.graph import Annotation, Graph, Miss, Reading, Value

WRITTEN_GELU = word("written_gelu", "x · Φ(x)", x="[*B, D]", approximate='how Φ is computed: "none" or "tanh"')

_APPROXIMATE = {"tanh": "tanh", "aten.erf.default": "none"}
_K = math.sqrt(2 / math.pi)
_POLYNOMIALS: Mapping[str, Mapping[int, float]] = {"tanh": {1: _K, 3: _K * 0.044715}, "none": {1: math.sqrt(0.5)}}
"""The coefficients of the operand of the function, by power of x."""
_NEAR = 1e-6
_OTHER = "gelu: the argument of its tanh or erf is {said}; torch's gelu requires {meant}; write F.gelu if that is meant"

Terms = dict[int, float]


@reader(gives=(WRITTEN_GELU,))
def written_gelus(graph: Graph) -> Iterator[Annotation]:
    """Read every product x / 2 · (1 + f(..)), f tanh or erf, as `written_gelu`; else give the differing polynomial."""
    for value in list(graph.places):
        product, number = unscaled(value)
        for x, behind in product.operands("mul") if is_float(value) else ():
            (x, factor_of_x), (behind, factor) = unscaled(x), unscaled(behind)
            inside = _inside(behind)
            if inside is not None and math.isclose(number * factor_of_x * factor, 0.5, rel_tol=_NEAR):
                outcome = _compared(exact(x), inside)
                yield from () if outcome is None else ((value, outcome),)


def _inside(behind: Value) -> Value | None:
    """Return the tanh or erf f of `behind` = 1 + f; None for others."""
    return behind.arg if (behind.op, behind.attrs) == ("shift", (1.0,)) and behind.arg.op in _APPROXIMATE else None


def _compared(x: Value, inside: Value) -> Reading | Miss | None:
    approximate = _APPROXIMATE[inside.op]
    have, meant = _polynomial(inside.arg, x, {}), _POLYNOMIALS[approximate]
    if have is None:
        return None
    if have.keys() != meant.keys() or not all(math.isclose(have[n], meant[n], rel_tol=_NEAR) for n in meant):
        return Miss("gelu", _OTHER.format(said=_shown(have), meant=_shown(meant)))
    return Reading("written_gelu", {"x": x, "approximate": approximate})


def _shown(terms: Mapping[int, float]) -> str:
    return " + ".join(f"{factor:.6g} · x^{power}" for power, factor in sorted(terms.items()))


def _polynomial(value: Value, x: Value, known: dict[Value, Terms | None]) -> Terms | None:
    """Return the coefficient of each power of `x` in `value`, up to the third; None for other functions."""
    if value not in known:
        known[value] = None
        known[value] = _terms(value, x, known)
    return known[value]


def _terms(value: Value, x: Value, known: dict[Value, Terms | None]) -> Terms | None:
    if exact(value) is x:
        return {1: 1.0}
    below = [_polynomial(each, x, known) for each in value.args] if value.op in _STEPS else []
    parts = [each for each in below if each is not None]
    if not parts or len(parts) != len(below):
        return None
    match value.op:
        case "cast":
            return parts[0] if is_float(value) else None
        case "scale":
            return _times(parts[0], {0: value.attrs[0]})
        case "shift":
            return _plus(parts[0], {0: value.attrs[0]})
        case "add":
            return _plus(*parts)
        case "mul":
            return _times(*parts)
        case _:
            square = _times(parts[0], parts[0])
            return {2.0: square, 3.0: square and _times(square, parts[0])}.get(value.attrs[0])


_STEPS = ("cast", "scale", "shift", "add", "mul", "power")


def _plus(x: Terms, y: Terms) -> Terms:
    summed = {power: x.get(power, 0.0) + y.get(power, 0.0) for power in x.keys() | y.keys()}
    return {power: factor for power, factor in summed.items() if factor}


def _times(x: Terms, y: Terms) -> Terms | None:
    product: Terms = {}
    for power, factor in x.items():
        for other, more in y.items():
            product = _plus(product, {power + other: factor * more})
    return product if max(product, default=0) <= 3 else None
