"""Attention over a latent in whole numbers whose weights are rounded too: out = (round(127 p) k8) · of_values / Σ p.

    p = exp(s - max s), s = scale · (of_scores · (q8 k8ᵀ) + q_rope k_ropeᵀ)

`of_scores` [N] holds a factor of each head, `of_values` [N] or [1] one of each head or of all, times the number
`values_by`. It is read as the attention with p / Σ p in place of the rounded weights, which arranges everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isclose, prod
from typing import Any

import torch

from fusion.analysis.factored_products import WIDE, scaled_int8
from fusion.analysis.factored_products import below as of_below
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.analysis.row_layout import Step
from fusion.graph import Algebra, Reading, Value

STEPS = 127
NAME = "int8_probability_attention"
_COUNT = "weights are rounded to steps of 1 / {steps:g}, by the operator to 1 / 127"
_SHARES = "shares of 1 are rounded, where the operator rounds exp(s - max s) and divides by its sum behind the product"
_CUT = "weights are cut off toward zero, where the operator rounds to the nearest"
_LOST = "what is rounded is not exp(s - max s) of a row"
_TOTAL = "the result is not divided by the sum of the weights as they were before they were rounded"
_HEADS = "scores are multiplied by something else than one scale of each head"
_VALUES = "the result is multiplied by something else than scales of heads"
_WIDTH = "the result is of {dtype}, rotated queries are of {other}"

Outcome = dict[Value, Reading | str]


@dataclass(frozen=True)
class _Steps:
    """What stands above a value: how it is arranged, factors of rows [.., 1] or of all, and a number."""

    arranged: tuple[Step, ...] = ()
    factors: tuple[Value, ...] = ()
    number: float = 1.0


def int8_probability_attention(
    a: Algebra, root: Value, read: Callable[[Value], Outcome | str | None]
) -> Outcome | str | None:
    """What `root` is if it is such attention; why it is none; None if it is not like it. `read` reads attention."""
    product = _down(a, root, _Steps(), "matmul")
    if product is None or scaled_int8(a, product[0].args[1]) is None:
        return None
    (matmul, outer), values = product, product[0].args[1]
    weights = _weights(a, matmul.arg, replace(outer, arranged=()))
    if weights is None or isinstance(weights, str):
        return weights
    scores, factors, number, inner = weights
    shares = a.make("softmax", (scores,), (-1, "nan"), scores.shape, scores.dtype)
    both = (_arranged(a, shares, inner), a.scale(values, number))
    stand_in = _arranged(a, a.make("matmul", both, (), matmul.shape, WIDE), outer.arranged)
    outcome = read(a.cast(stand_in, root.dtype))
    if not isinstance(outcome, dict):
        return outcome
    return _renamed(a, root, outcome, factors)


def _down(a: Algebra, z: Value, so: _Steps, to: str) -> tuple[Value, _Steps] | None:
    """The value of an op below casts, factors and arrangements that leave the last dim alone."""
    while z.op != to:
        below = z.arg if z.args else z
        if not is_float(z) and not _holds_rounded(z):
            return None
        if z.op == "scale":
            so = replace(so, number=so.number * z.attrs[0])
        elif z.op == "mul":
            small = [each for each in z.args if prod(each.shape) == 1 or each.shape[-1:] == (1,)]
            inner = [each for each in z.args if each.shape == z.shape and each not in small]
            if len(small) != 1 or len(inner) != 1:
                return None
            so, below = replace(so, factors=(*so.factors, small[0])), inner[0]
        elif z.op in ("reshape", "permute") and z.shape[-1:] == below.shape[-1:]:
            step: Step = (z.op, z.shape if z.op == "reshape" else z.attrs)
            kept = tuple(of_below(a, z, each) for each in so.factors)
            so = replace(so, arranged=(step, *so.arranged), factors=kept)
        elif z.op != "cast":
            return None
        z = below
    return z, so


def _holds_rounded(z: Value) -> bool:
    """Whether whole numbers hold what was rounded, and nothing else."""
    return z.dtype is not torch.bool and z.below("cast", "reshape", "permute", "clip").op == "round"


def _arranged(a: Algebra, x: Value, steps: Sequence[Step]) -> Value:
    for op, how in steps:
        shape = (*how[:-1], x.shape[-1])
        x = a.reshape(x, shape) if op == "reshape" else a.permute(x, how)
    return x


def _weights(a: Algebra, p: Value, so: _Steps) -> tuple[Value, list[Value], float, tuple[Step, ...]] | str | None:
    """Scores, factors but the sum of their exponentials, the number that is left, and how the weights are arranged."""
    above = _down(a, p, so, "round")
    clipped = None if above is not None else _down(a, p, so, "clip")
    if clipped is not None and clipped[0].attrs[0] <= 0 and clipped[0].attrs[1] >= STEPS:
        above = _down(a, clipped[0].arg, clipped[1], "round")
    if above is None:
        return _CUT if _is_cut(a, p) else None
    below = _down(a, above[0].arg, _Steps(), "exp")
    if below is None:
        return _SHARES if _down(a, above[0].arg, _Steps(), "softmax") else None
    exps, steps = below
    scores = _scores(exps)
    if scores is None:
        return _LOST
    if steps.factors:
        return _SHARES
    if not isclose(steps.number, STEPS, rel_tol=1e-6):
        return _COUNT.format(steps=steps.number)
    if not isinstance(exps.shape[-1], int):
        return "the number of keys is not known before"
    factors = [_behind(a, each, steps.arranged, above[0].arg) for each in above[1].factors]
    found = _without_total(a, exps, [part for each in factors for part in _parts(each)])
    if found is None:
        return _TOTAL
    rest, number = found
    return scores, rest, number * above[1].number * STEPS, (*steps.arranged, *above[1].arranged)


def _is_cut(a: Algebra, p: Value) -> bool:
    """Whether weights are made whole numbers without being rounded."""
    while p.op in ("cast", "reshape", "permute", "scale") and is_float(p):
        p = p.arg
    return p.op == "cast" and is_float(p.arg) and _down(a, p.arg, _Steps(), "exp") is not None


def _behind(a: Algebra, factor: Value, steps: Sequence[Step], z: Value) -> Value:
    """A factor below arrangements that were made after the exponentials were taken."""
    for _ in reversed(steps):
        while z.op not in ("reshape", "permute"):
            z = z.arg
        factor, z = of_below(a, z, factor), z.arg
    return factor


def _scores(exps: Value) -> Value | None:
    """Scores of which the largest of each row is subtracted before exponentials are taken."""
    for scores, less in (exps.arg.args, exps.arg.args[::-1]) if exps.arg.op == "add" else ():
        top, factor = unscaled(less)
        while exact(top) is not top or top.op in ("reshape", "expand"):
            top = exact(top) if exact(top) is not top else top.arg
        if factor == -1 and top.op == "greatest" and top.attrs == (-1,) and exact(top.arg) is exact(scores):
            return scores
    return None


def _parts(factor: Value) -> list[Value]:
    """The factors of a product."""
    return [part for each in factor.args for part in _parts(each)] if factor.op == "mul" else [factor]


def _without_total(a: Algebra, exps: Value, factors: Sequence[Value]) -> tuple[list[Value], float] | None:
    """Factors but 1 / Σ exp, and the number that these were multiplied by."""
    total = a.sum(exps, (-1,))
    if total is None:
        return None
    inverse, share = unscaled(a.power(total, -1))
    if not share:
        return None
    number, rest, divided = 1 / share, list[Value](), 0
    for each in factors:
        factor, more = unscaled(each)
        number *= more
        if factor is inverse:
            divided += 1
        else:
            rest.append(factor)
    return (rest, number) if divided == 1 else None


def _renamed(a: Algebra, root: Value, outcome: Outcome, factors: Sequence[Value]) -> Outcome | str | None:
    """The reading of attention whose weights are not rounded as that of `root`."""
    made = {value: each for value, each in outcome.items() if _is(each, "int8_latent_attention")}
    if len(made) != 1:
        return None
    ((value, reading),) = made.items()
    folded = {each: what for each, what in outcome.items() if _is(what, "folded_query")}
    assert isinstance(reading, Reading)
    captures = dict(reading.captures)
    rotated = folded[captures["rope"]]
    assert isinstance(rotated, Reading)
    rope = rotated.captures["rope"]
    if rope.dtype != root.dtype:
        return _WIDTH.format(dtype=root.dtype, other=rope.dtype)
    heads = captures["query"].shape[1]
    of_heads = _of_heads(a, captures.pop("tokens"), heads)
    of_keys, by = captures.pop("of_keys", None), captures.pop("keys_by")
    of_scores = None if of_heads is None else a.scale(of_heads, by)
    of_scores = of_scores if of_keys is None or of_scores is None else a.mul(of_scores, of_keys)
    if of_scores is None:
        return _HEADS
    inside = [captures.pop("of_values")] if "of_values" in captures else []
    values = [_of_heads(a, each, heads) for each in (*factors, *inside)]
    of_values = _product(a, [each for each in values if each is not None])
    if len([each for each in values if each is not None]) != len(values):
        return _VALUES
    optional = {} if of_values is None else {"of_values": of_values}
    captures |= {"rope": rope, "of_scores": of_scores, **optional}
    rest = {each: what for each, what in outcome.items() if each is not value and each not in folded}
    return {**rest, root: Reading(NAME, captures, reading.relies)}


def _is(each: Reading | str, op: str) -> bool:
    return isinstance(each, Reading) and each.op == op


def _product(a: Algebra, factors: Sequence[Value]) -> Value | None:
    made: Value | None = None
    for each in factors:
        made = each if made is None else a.mul(made, each)
    return made


def _of_heads(a: Algebra, factor: Value, heads: Any) -> Value | None:
    """A factor of rows [B, N, S, 1], the same for all sequences and positions, as [N]; one of all as [1]."""
    if factor.op == "mul":
        parts = [_of_heads(a, each, heads) for each in factor.args]
        known = [each for each in parts if each is not None]
        return _product(a, known) if len(known) == len(parts) else None
    if factor.op == "scale":
        inner = _of_heads(a, factor.arg, heads)
        return None if inner is None else a.scale(inner, factor.attrs[0])
    while exact(factor) is not factor or factor.op == "expand":
        factor = exact(factor) if exact(factor) is not factor else factor.arg
    if prod(factor.shape) == 1:
        return a.cast(a.reshape(factor, (1,)), WIDE)
    lead = (1,) * (4 - factor.rank) + factor.shape
    return a.cast(a.reshape(factor, (heads,)), WIDE) if lead == (1, heads, 1, 1) else None
