"""Gelu written out: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), or (1 + erf(x / √2)).

What both are of is read as a polynomial of x, so that x³ may be a power, or products in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fusion import reader, word
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.graph import Found, Graph, Miss, Reading, Value

WRITTEN_GELU = word("written_gelu", "x · Φ(x)", x="[*B, D]", approximate='how Φ is computed: "none" or "tanh"')

_OF = {"tanh": "tanh", "aten.erf.default": "none"}
_K = math.sqrt(2 / math.pi)
_MEANT: Mapping[str, Mapping[int, float]] = {"tanh": {1: _K, 3: _K * 0.044715}, "none": {1: math.sqrt(0.5)}}
"""Of which polynomial of x the function is, by power."""
_NEAR = 1e-6
_OTHER = "the tanh or erf is of {said}, where gelu has it of {meant}"

Terms = dict[int, float]


@reader(gives=(WRITTEN_GELU,))
def written_gelus(graph: Graph) -> Iterator[Found]:
    """Every product x / 2 · (1 + f(..)); why others are none."""
    for value in list(graph.places):
        product, number = unscaled(value)
        for x, behind in (product.args, product.args[::-1]) if product.op == "mul" and is_float(value) else ():
            (x, of_x), (behind, of_behind) = unscaled(x), unscaled(behind)
            inside = _inside(behind)
            if inside is not None and math.isclose(number * of_x * of_behind, 0.5, rel_tol=_NEAR):
                found = _found(exact(x), inside)
                yield from () if found is None else ((value, found),)


def _inside(behind: Value) -> Value | None:
    """The tanh or erf to which 1 is added."""
    return behind.arg if (behind.op, behind.attrs) == ("shift", (1.0,)) and behind.arg.op in _OF else None


def _found(x: Value, inside: Value) -> Reading | Miss | None:
    approximate = _OF[inside.op]
    have, meant = _polynomial(inside.arg, x, {}), _MEANT[approximate]
    if have is None:
        return None
    if have.keys() != meant.keys() or not all(math.isclose(have[n], meant[n], rel_tol=_NEAR) for n in meant):
        return Miss("activation", _OTHER.format(said=_shown(have), meant=_shown(meant)))
    return Reading("written_gelu", {"x": x, "approximate": approximate})


def _shown(terms: Mapping[int, float]) -> str:
    return " + ".join(f"{factor:.6g} · x^{power}" for power, factor in sorted(terms.items()))


def _polynomial(value: Value, x: Value, known: dict[Value, Terms | None]) -> Terms | None:
    """The factor of each power of x in a value of up to the third; None for what is no polynomial."""
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
    found: Terms = {}
    for power, factor in x.items():
        for other, more in y.items():
            found = _plus(found, {power + other: factor * more})
    return found if max(found, default=0) <= 3 else None
