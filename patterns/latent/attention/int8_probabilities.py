"""Attention over an int8 latent with rounded probabilities.

    out = (round(127 p) k8) / 127 · of_values · values_by / Σ p
    p = exp(s - max s), s = scale · (of_scores · (q8 k8ᵀ) + q_rope k_ropeᵀ)

`of_scores` [N] are factors of each head, `of_values` [N] or [1] factors of each head or of all, and `values_by` is a
number. The reader of int8 attention reads the same value with p / Σ p in place of the rounded weights; the captures
are derived from its reading.
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
from fusion.graph.proof_steps import must, proof, proven

STEPS = 127
"""Weight 1 in steps of the rounding."""
_NAME = "int8_probability_attention"
_COUNT = (
    "weights: they are rounded to steps of 1 / {steps:g}; npu_multi_head_latent_attention requires steps of 1 "
    "/ 127; write torch.round(p * 127)"
)
_SHARES = (
    "weights: shares of the softmax are rounded; npu_multi_head_latent_attention rounds exp(s - max s) and "
    "requires the division by its sum behind the product; write p = exp(s - s.amax(-1, keepdim=True)), "
    "round(127 * p) @ latent / p.sum(-1)"
)
_CUT = (
    "weights: they are cut off toward zero; npu_multi_head_latent_attention requires rounding to the nearest; "
    "write torch.round(127 * p)"
)
_LOST = (
    "weights: what is rounded is not exp(s - max s) of a row; npu_multi_head_latent_attention requires that; "
    "write exp(s - s.amax(-1, keepdim=True))"
)
_TOTAL = (
    "result: it is divided by another sum than that of the unrounded weights; npu_multi_head_latent_attention "
    "requires p.sum(-1) of p = exp(s - max s) before it is rounded"
)
_HEADS = (
    "scores: the int8 product is multiplied by more than one scale of each head; "
    "npu_multi_head_latent_attention requires a scale [N]; quantise queries by head"
)
_VALUES = (
    "result: it is multiplied by something else than scales of heads; npu_multi_head_latent_attention requires "
    "scales [N]"
)
_WIDTH = (
    "result: it is {dtype}, rotated queries are {other}; npu_multi_head_latent_attention requires one dtype; "
    "cast the result to that of the rotated queries"
)

Outcome = dict[Value, Reading | Miss]


def int8_probability_attention(
    a: Algebra, root: Value, read: Callable[[Value], Outcome | Miss | None]
) -> Outcome | Miss | None:
    """Read `root` as attention with rounded probabilities, int8_probability_attention.

    `read` is the reader of int8 attention, which reads a value that has float weights in the place of the rounded ones.
    Returns a `Miss` if `root` nearly is such an attention, None if it is anything else.
    """
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
    """Peel the weights `p` = round(127 exp(s - max s)) of a product down to s.

    Args:
        a: the algebra.
        p: left operand of the product.
        outer: factors and number by which the product is multiplied.

    Returns:
        s, the views from s to `p`, all factors but 1 / Σ exp(s - max s), and the number by which softmax(s) is to be
        multiplied. A string is the reason why `p` is not such weights; None if it does not look like them.
    """
    above = peeled(a, p, "round", outer)
    clipped = peeled(a, p, "clip", outer)
    if clipped is not None and clipped.value.attrs[0] <= 0 and clipped.value.attrs[1] >= STEPS:
        above = peeled(a, clipped.value.arg, "round", clipped)
    if above is None:
        return _CUT if _is_cut(a, p) else None
    exps = peeled(a, above.value.arg, "exp", replace(above, number=1.0))
    if exps is None:
        return _SHARES if peeled(a, above.value.arg, "softmax") else None
    scores = _scores(exps.value)
    if scores is None:
        return _LOST
    if len(exps.factors) > len(above.factors):
        return _SHARES
    if not isclose(exps.number, STEPS, rel_tol=1e-6):
        return _COUNT.format(steps=exps.number)
    if not isinstance(exps.value.shape[-1], int):
        return "keys: their number is not a static size; npu_multi_head_latent_attention requires one here"
    rest = _without_total(a, exps.value, [part for each in exps.factors for part in factors_of(a, each)])
    if rest is None:
        return _TOTAL
    factors, number = rest
    return Peeled(scores, tuple(factors), number * above.number * STEPS, exps.steps)


def _is_cut(a: Algebra, p: Value) -> bool:
    """Return True if the weights `p` are exponentials that a cast to integers truncates."""
    while p.op in ("cast", "reshape", "permute", "scale") and is_float(p):
        p = p.arg
    return p.op == "cast" and peeled(a, p.arg, "exp") is not None


def _scores(exps: Value) -> Value | None:
    """Return s of `exps` = exp(s - max s), the maximum of each row; None for another exponent."""
    for scores, less in exps.arg.operands("add"):
        top, factor = unscaled(less)
        while exact(top) is not top or top.op in ("reshape", "expand"):
            top = exact(top) if exact(top) is not top else top.arg
        if factor == -1 and top.op == "greatest" and top.attrs == (-1,) and exact(top.arg) is exact(scores):
            return scores
    return None


def _without_total(a: Algebra, exps: Value, factors: Sequence[Value]) -> tuple[list[Value], float] | None:
    """Remove 1 / Σ `exps` from `factors`; return the others without their numbers, and the product of all numbers.

    None if 1 / Σ `exps` is not one of them.
    """
    inverse, share = unscaled(a.power(proven(a.sum(exps, (-1,))), -1))
    each = [unscaled(factor) for factor in factors]
    rest = [factor for factor, _ in each if factor is not inverse]
    number = prod((more for _, more in each), start=1 / share)
    return (rest, number) if len(rest) == len(each) - 1 else None


def _renamed(a: Algebra, root: Value, plain: Value, outcome: Outcome, factors: Sequence[Value]) -> Outcome | str | None:
    """Turn `outcome`, the reading of `plain` as int8_latent_attention, into that of `root`.

    `plain` is `root` with float weights in the place of the rounded ones; `factors` multiply the result. Returns the
    reason if a scale is not one number for each head, or dtypes differ; None if `outcome` has no such reading.
    """
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
    scores = _all_per_head(a, (tokens, captures.pop("of_keys")), heads)
    if scores is None:
        return _HEADS
    values = _all_per_head(a, (*factors, captures.pop("of_values")), heads)
    if values is None:
        return _VALUES
    captures |= {"rope": rope, "of_scores": product_of(a, scores), "of_values": product_of(a, values)}
    rest = {each: what for each, what in outcome.items() if what is not reading}
    return {**rest, root: Reading(_NAME, captures, reading.relies)}


@proof
def _all_per_head(a: Algebra, factors: Sequence[Value | None], heads: Any) -> list[Value] | None:
    """Convert `factors` by `_per_head`, without absent ones; None if one is not constant for each head."""
    return [proven(_per_head(a, each, heads)) for each in factors if each is not None]


def _per_head(a: Algebra, factor: Value, heads: Any) -> Value | None:
    """Reshape a factor of rows [B, N, S, 1] to float32 [N], or [1] if it has one element.

    None if it differs between sequences or positions.
    """
    if factor.op == "mul":
        return product_of(a, _all_per_head(a, factor.args, heads) or ())
    if factor.op == "scale":
        inner = _per_head(a, factor.arg, heads)
        return inner and a.scale(inner, factor.attrs[0])
    while exact(factor) is not factor or factor.op == "expand":
        factor = exact(factor) if exact(factor) is not factor else factor.arg
    if prod(factor.shape) == 1:
        return a.cast(a.reshape(factor, (1,)), WIDE)
    lead = (1,) * (4 - factor.rank) + factor.shape
    return a.cast(a.reshape(factor, (heads,)), WIDE) if lead == (1, heads, 1, 1) else None
