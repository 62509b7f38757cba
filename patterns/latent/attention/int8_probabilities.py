"""Attention over a latent in int8 whose weights are rounded too: out = (round(127 p) k8) / 127 · of_values / Σ p.

    p = exp(s - max s), s = scale · (of_scores · (q8 k8ᵀ) + q_rope k_ropeᵀ)

`of_scores` [N] holds a factor of each head, `of_values` [N] or [1] one of each head or of all, times the number
`values_by`. It is read as the attention with p / Σ p in place of the rounded weights, which arranges everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isclose, prod
from typing import Any

from fusion.analysis.factored_products import WIDE, Peeled, factors_of, peeled, product_of, scaled_int8
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.analysis.row_layout import arranged
from fusion.graph import Algebra, Miss, Reading, Value
from fusion.graph.proof import must, proof, proven

STEPS = 127
_NAME = "int8_probability_attention"
_COUNT = "weights are rounded to steps of 1 / {steps:g}, by the operator to 1 / 127"
_SHARES = "shares of 1 are rounded, where the operator rounds exp(s - max s) and divides by its sum behind the product"
_CUT = "weights are cut off toward zero, where the operator rounds to the nearest"
_LOST = "what is rounded is not exp(s - max s) of a row"
_TOTAL = "the result is not divided by the sum of the weights as they were before they were rounded"
_HEADS = "scores are multiplied by something else than one scale of each head"
_VALUES = "the result is multiplied by something else than scales of heads"
_WIDTH = "the result is of {dtype}, rotated queries are of {other}"

Outcome = dict[Value, Reading | Miss]


def int8_probability_attention(
    a: Algebra, root: Value, read: Callable[[Value], Outcome | Miss | None]
) -> Outcome | Miss | None:
    """What `root` is if it is such attention; why it is none; None if it is not like it. `read` reads attention."""
    outcome = _read(a, root, read)
    return Miss(_NAME, outcome) if isinstance(outcome, str) else outcome


@proof
def _read(a: Algebra, root: Value, read: Callable[[Value], Outcome | Miss | None]) -> Outcome | str | None:
    outer = proven(peeled(a, root, "matmul"))
    must(scaled_int8(a, outer.value.args[1]) is not None)
    weights = proven(_weights(a, outer.value.arg, replace(outer, steps=())))
    if isinstance(weights, str):
        return weights
    scores = weights.value
    shares = a.softmax(scores, -1, "nan")
    both = (arranged(a, shares, weights.steps), a.scale(outer.value.args[1], weights.number))
    stand_in = arranged(a, a.make("matmul", both, (), outer.value.shape, WIDE), outer.steps)
    plain = a.cast(stand_in, root.dtype)
    outcome = proven(read(plain))
    return outcome.reason if isinstance(outcome, Miss) else _renamed(a, root, plain, outcome, weights.factors)


def _weights(a: Algebra, p: Value, outer: Peeled) -> Peeled | str | None:
    """Scores, how the weights are arranged, factors but the sum of their exponentials, and the number that is left."""
    above = peeled(a, p, "round", outer)
    clipped = peeled(a, p, "clip", outer)
    if clipped is not None and clipped.value.attrs[0] <= 0 and clipped.value.attrs[1] >= STEPS:
        above = peeled(a, clipped.value.arg, "round", clipped)
    if above is None:
        return _CUT if _is_cut(a, p) else None
    found = peeled(a, above.value.arg, "exp", replace(above, number=1.0))
    if found is None:
        return _SHARES if peeled(a, above.value.arg, "softmax") else None
    scores = _scores(found.value)
    if scores is None:
        return _LOST
    if len(found.factors) > len(above.factors):
        return _SHARES
    if not isclose(found.number, STEPS, rel_tol=1e-6):
        return _COUNT.format(steps=found.number)
    if not isinstance(found.value.shape[-1], int):
        return "the number of keys is not known before"
    rest = _without_total(a, found.value, [part for each in found.factors for part in factors_of(a, each)])
    if rest is None:
        return _TOTAL
    factors, number = rest
    return Peeled(scores, tuple(factors), number * above.number * STEPS, found.steps)


def _is_cut(a: Algebra, p: Value) -> bool:
    """Whether weights are made whole numbers without being rounded."""
    while p.op in ("cast", "reshape", "permute", "scale") and is_float(p):
        p = p.arg
    return p.op == "cast" and peeled(a, p.arg, "exp") is not None


def _scores(exps: Value) -> Value | None:
    """Scores of which the largest of each row is subtracted before exponentials are taken."""
    for scores, less in (exps.arg.args, exps.arg.args[::-1]) if exps.arg.op == "add" else ():
        top, factor = unscaled(less)
        while exact(top) is not top or top.op in ("reshape", "expand"):
            top = exact(top) if exact(top) is not top else top.arg
        if factor == -1 and top.op == "greatest" and top.attrs == (-1,) and exact(top.arg) is exact(scores):
            return scores
    return None


def _without_total(a: Algebra, exps: Value, factors: Sequence[Value]) -> tuple[list[Value], float] | None:
    """Factors but 1 / Σ exp, and the number that these were multiplied by."""
    inverse, share = unscaled(a.power(proven(a.sum(exps, (-1,))), -1))
    each = [unscaled(factor) for factor in factors]
    rest = [factor for factor, _ in each if factor is not inverse]
    number = prod((more for _, more in each), start=1 / share)
    return (rest, number) if len(rest) == len(each) - 1 else None


def _renamed(a: Algebra, root: Value, plain: Value, outcome: Outcome, factors: Sequence[Value]) -> Outcome | str | None:
    """The reading of the attention `plain`, whose weights are not rounded, as that of `root`."""
    reading = outcome[plain]
    if not isinstance(reading, Reading) or reading.op != "int8_latent_attention":
        return None
    captures = dict(reading.captures)
    folded = outcome[captures["rope"]]
    assert isinstance(folded, Reading)
    rope = folded.captures["rope"]
    if rope.dtype != root.dtype:
        return _WIDTH.format(dtype=root.dtype, other=rope.dtype)
    heads = captures["query"].shape[1]
    tokens = a.scale(captures.pop("tokens"), captures.pop("keys_by"))
    scores = _each_of_heads(a, (tokens, captures.pop("of_keys")), heads)
    if scores is None:
        return _HEADS
    values = _each_of_heads(a, (*factors, captures.pop("of_values")), heads)
    if values is None:
        return _VALUES
    captures |= {"rope": rope, "of_scores": product_of(a, scores), "of_values": product_of(a, values)}
    rest = {each: what for each, what in outcome.items() if what is not reading}
    return {**rest, root: Reading(_NAME, captures, reading.relies)}


@proof
def _each_of_heads(a: Algebra, factors: Sequence[Value | None], heads: Any) -> list[Value] | None:
    """All factors that there are, as `_of_heads` has them."""
    return [proven(_of_heads(a, each, heads)) for each in factors if each is not None]


def _of_heads(a: Algebra, factor: Value, heads: Any) -> Value | None:
    """A factor of rows [B, N, S, 1], the same for all sequences and positions, as [N]; one of all as [1]."""
    if factor.op == "mul":
        return product_of(a, _each_of_heads(a, factor.args, heads) or ())
    if factor.op == "scale":
        inner = _of_heads(a, factor.arg, heads)
        return inner and a.scale(inner, factor.attrs[0])
    while exact(factor) is not factor or factor.op == "expand":
        factor = exact(factor) if exact(factor) is not factor else factor.arg
    if prod(factor.shape) == 1:
        return a.cast(a.reshape(factor, (1,)), WIDE)
    lead = (1,) * (4 - factor.rank) + factor.shape
    return a.cast(a.reshape(factor, (heads,)), WIDE) if lead == (1, heads, 1, 1) else None
