"""Values quantised to stored numbers: by a scale of each row (dynamic), a constant scale (static), or one of each head.

    static      int8(clamp(round(n / s + z)))       head    int8(clamp(round(x · s))), x [B, N, S, C], s [N]

n = x + bias [D], s = scale · by, z = zero_point [1] + shift; by and shift are numbers, and the tensors are absent where
there is a number alone. The scale is [1], or without a zero point also one of each channel [C]: the model's own tensor
where the model divides by it, its reciprocal in float32 where the model multiplies. The order of rounding and clamping
does not matter, nor that of rounding and adding a zero point that is proven to be a whole number.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from fusion import Encoding, encodings, reader, word
from fusion.analysis.dtypes import is_integer
from fusion.analysis.node_predicates import is_computed
from fusion.analysis.rounding import Rounded, exact, is_float, rounded, unscaled
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from patterns.quant.read_dynamic_scales import (
    ASYMMETRIC,
    FLOATS,
    OF_DTYPE,
    UNSCALED,
    dynamic,
    has_scale_of_rows,
    is_rounded_by_row,
    largest_of,
)
from patterns.quant.zero_points import addends, is_unbounded, rounded_last

_PASSED = ("cast", "clip", "clamp", "trunc", "reshape")
_BEHIND = (
    "zero point: it is added to rounded numbers and not proven to be an integer; npu_quantize rounds the sum and "
    "requires an integer; store the zero point as torch.int8"
)
_CUT = (
    "int8: numbers are cut off toward zero; npu_quantize requires rounding to the nearest; write "
    "torch.round(x) before the cast"
)
_FLOORED = (
    "int8: rows are rounded by {op}; npu_dynamic_quant rounds to the nearest and requires that; write torch.round(x) "
    "before the cast"
)
_STEPS = {"aten.floor.default": "floor", "aten.ceil.default": "ceil", "floor": "floor", "ceil": "ceil"}
_PART = "zero point: it is {zero:g}; npu_quantize requires an integer from -128 to 127; round it"
_BETWEEN = (
    "int8: quotients are clamped to {low:g} and {high:g} before the zero point is added; npu_quantize clamps the sum "
    "and requires no other bound; clamp the sum"
)
_BOUNDS = (
    "int8 {what}: they are clamped to {low:g} and {high:g}; {operator} requires bounds of -128 and 127; clamp to these"
)
UNBOUNDED = (
    "int8: numbers are cast to int32 before they are clamped, and may overflow there; npu_quantize requires "
    "the clamp first; write .round().clamp(-128, 127) before the cast"
)
_SEVERAL = (
    "scale: rows with a zero point are not divided by one scale of the whole tensor; npu_quantize requires "
    "that; use one scale beside a zero point"
)
_TIMES = (
    "scale: rows with a zero point are multiplied by it; npu_quantize requires that they are divided; write x / scale"
)
_DIVIDED = (
    "scale of queries: they are divided by it; npu_multi_head_latent_attention requires that they are multiplied by "
    "one of each head; store the inverse"
)

QUANTISE = word(
    "quantise",
    "clamp(round((x + bias) / (scale · by) + zero_point + shift)), of scheme head clamp(round(x · scale)), in numbers "
    "of an encoding",
    x="[*B, D], of scheme head [B, N, S, C]",
    encoding="the Encoding of the numbers",
    scheme='"dynamic": a scale max|x| / bound of each token; "several dims": the same over the dims `axes`; '
    '"static": a constant scale; "head": a factor of each head',
    scale="[*B, 1] or [*B], or a multiple of that, if dynamic; [1] or [D] if static; [N] of heads",
    dtype="of a dynamic scale", times="a multiple of a dynamic scale, as in token_scale",
    axes="dims of a row, as in token_scale", by="a number", shift="a number", bias="[D]",
    zero_point="[1] in the dtype of the encoding, or as the model holds it",
)  # fmt: skip
TOKEN_SCALE = word(
    "token_scale", "max|x| / bound · times over the dims `axes`, which have size 1 or are absent: [*B, 1] or [*B]",
    x="[*B, D]", encoding="the Encoding with the bound", dtype="of the scale", times="a number, absent for 1",
    axes="dims of x, absent for the last alone",
)  # fmt: skip


@reader(gives=(QUANTISE, TOKEN_SCALE))
def quantised(graph: Graph) -> Iterator[Annotation]:
    """Read every int8 value that is cast from floats, and every dynamic scale; report why others are not read."""
    largest = largest_of(graph)
    stored = {value: encoding for value in graph.places if (encoding := encodings.encoding_of(value.dtype)) is not None}
    become_stored = {value.below(*_PASSED) for value in stored}
    for value in graph.places:
        if is_rounded_by_row(value) and value not in become_stored:
            yield value, Miss("quantisation", _why_floats(graph, value))
        encoding = stored.get(value) if value.op == "cast" else None
        if encoding is None:
            continue
        below = rounded_last(graph.algebra, value.arg) if encoding.is_integer else rounded(value.arg)
        if not is_float(below.quotient):
            if any(rounded(rest).unbounded for rest, _ in addends(below.quotient)):
                yield value, Miss("quantisation", UNBOUNDED)
            continue
        if below.quotient.op in _STEPS and has_scale_of_rows(below.quotient.arg):
            yield value, Miss("quantisation", _FLOORED.format(op=_STEPS[below.quotient.op]))
            continue
        heads = _by_head(graph.algebra, encoding, below) if encoding.is_integer else None
        if heads is not None:
            yield value, _outcome("quantise", heads)
        if not is_computed(graph, value):
            continue
        tokens = dynamic(graph, value, encoding, below, largest)
        if isinstance(tokens, tuple):
            numbers, scale, multiplier = tokens
            yield value, numbers
            yield scale, multiplier
            continue
        dynamic_too = tokens not in (None, UNSCALED)
        static = _static(graph.algebra, encoding, below, dynamic_too) if encoding.is_integer else None
        if tokens is not None and not (tokens == ASYMMETRIC and static is not None):
            yield value, Miss("quantisation", tokens)
        if static is not None:
            yield value, _outcome("quantise", static)


def _why_floats(graph: Graph, rows: Value) -> str:
    """Return the reason for `rows` that are rounded by a scale of each and do not become int8: another integer dtype,
    or floats.
    """
    casts = [each for each in graph.places if each.op == "cast" and is_integer(each)]
    other = next((each for each in casts if each.arg.below(*_PASSED, "shift") is rows), None)
    return FLOATS if other is None else OF_DTYPE.format(dtype=str(other.dtype).removeprefix("torch."))


def _outcome(rule: str, outcome: Reading | str) -> Reading | Miss:
    return Miss(rule, outcome) if isinstance(outcome, str) else outcome


def _unbounded(below: Rounded, encoding: Encoding, what: str, operator: str = "npu_quantize") -> str:
    """Return the reason if `below`, the values `what` of `operator`, has other bounds than `encoding`; "" if not."""
    if below.unbounded:
        return UNBOUNDED.replace("npu_quantize", operator)
    alike = (below.low, below.high) == encoding.range
    return "" if alike else _BOUNDS.format(what=what, low=below.low, high=below.high, operator=operator)


_BY_HEAD = "npu_multi_head_latent_attention"
"""The operator that multiplies queries by a scale of each head."""


def _by_head(a: Algebra, encoding: Encoding, below: Rounded) -> Reading | str | None:
    """Read the rounded quotient `below`, x · s with a factor s [1, N, 1, 1], as a quantisation by one scale of each
    head.

    The reason if it is rounded or clipped otherwise than by the operator; None for other values.
    """
    product = below.quotient
    for x, factor in product.operands("mul"):
        heads = x.shape[1] if x.rank == 4 else 1
        if heads == 1 or (1,) * (4 - factor.rank) + factor.shape != (1, heads, 1, 1) or not below.rounded:
            continue
        scale = exact(a.reshape(factor, (heads,)))
        reason = _DIVIDED if unscaled(scale)[0].op == "power" else _unbounded(below, encoding, "queries", _BY_HEAD)
        how = {"encoding": encoding.per("channel"), "scheme": "head"}
        return reason or Reading("quantise", {"x": exact(x), "scale": scale, **how})
    return None


def _static(a: Algebra, encoding: Encoding, outer: Rounded, dynamic: bool) -> Reading | str | None:
    """Read the rounded quotient `outer`, x / s (+ zero point) with a constant s, as a static quantisation.

    The reason if it is rounded or clipped otherwise than by npu_quantize; None for other values. `dynamic` is True if
    the value is reported already, as no dynamic quantisation: wrong bounds of a quotient without zero point then give
    None.
    """
    rest, zero = _split_zero_point(outer.quotient)
    scheme = {"encoding": encoding.per("channel"), "scheme": "static"}
    inner = outer if zero is None else rounded(rest)
    how = _scaled(a, inner.quotient)
    if zero is None:
        reason = _unbounded(outer, encoding, "numbers")
        if how is None or not outer.rounded or (reason and dynamic):
            return None
        return reason or Reading("quantise", {**how, "shift": 0.0, **scheme})
    scale = None if how is None else how.get("scale")
    if how is None or (scale is not None and scale.shape != (1,)):
        return _SEVERAL if outer.rounded and _is_quotient(inner.quotient) else None
    reason = _unproven(zero, encoding, outer, inner) or (_TIMES if scale is not None and scale.op == "power" else "")
    z = {"zero_point": zero, "shift": 0.0} if isinstance(zero, Value) else {"shift": zero}
    return reason or Reading("quantise", {**how, **z, **scheme})


def _unproven(zero: Value | float, encoding: Encoding, outer: Rounded, inner: Rounded) -> str:
    """Return the reason why the zero point `zero`, added between `inner` and `outer`, differs from the operator's; ""
    if not.

    The quotient is clamped or rounded before the sum, or the sum is not rounded; `zero` is no integer of `encoding`; or
    the sum is not clipped to its range.
    """
    if not is_unbounded(inner):
        return UNBOUNDED if inner.unbounded else _BETWEEN.format(low=inner.low, high=inner.high)
    if inner.rounded:
        return _BEHIND
    if inner.cut or not outer.rounded:
        return _CUT
    low, high = encoding.range
    is_known = isinstance(zero, Value) or (float(zero).is_integer() and low <= zero <= high)
    return _unbounded(outer, encoding, "numbers") or ("" if is_known else _PART.format(zero=zero))


def _split_zero_point(value: Value) -> tuple[Value, Value | float | None]:
    """Split `value` into a rest and its zero point: a number, or a tensor [1] before its cast; None for none."""
    for rest, one in addends(value):
        if not isinstance(one, Value):
            return rest, one
        if prod(one.shape) == 1:
            one = exact(one)
            return rest, one.arg if one.op == "cast" and one.arg.dtype in (torch.int8, torch.int32) else one
    return value, None


def _scaled(a: Algebra, value: Value) -> dict[str, Any] | None:
    """Return the captures of (x + bias) / (scale · by), one scale or one of each channel; None for other values."""
    quotient, number = unscaled(value)
    parts = _factored(quotient, number)
    captures: dict[str, Any] = {}
    if parts is not None:
        (quotient, more), (factor, outside) = (unscaled(each) for each in parts)
        number *= more * outside
        scale = exact(a.power(exact(factor), -1))
        if scale.op == "power":
            scale = a.power(a.cast(exact(factor), torch.float32), -1)
        captures["scale"] = a.reshape(scale, (prod(factor.shape),))
    if (parts is None and number == 1) or not number:
        return None
    return {**captures, **_biased(a, exact(quotient)), "by": 1 / number}


def _factored(quotient: Value, number: float) -> tuple[Value, Value] | None:
    """Split `quotient` into x and one factor of all of it, or of each channel if `number` is 1; None for others."""
    pairs = quotient.operands("mul")
    for x, factor in pairs:
        if prod(factor.shape) == 1:
            return x, factor
    for x, factor in sorted(pairs, key=lambda pair: not _is_from_input(pair[1])) if number == 1 else ():
        if factor.shape[-1:] == x.shape[-1:] == (prod(factor.shape),):
            return x, factor
    return None


def _is_from_input(factor: Value) -> bool:
    """Return True if `factor` is an input, or computed from one by unary ops.

    The channels of a single token have the shape of such a factor, but are computed otherwise.
    """
    while len(factor.args) == 1:
        factor = factor.arg
    return not factor.args


def _biased(a: Algebra, x: Value) -> dict[str, Value]:
    """Return x and the bias [D] of `x` = x + bias as captures; `x` alone if there is no bias."""
    for rest, line in x.operands("add"):
        channels = line.shape[-1:] == x.shape[-1:] == (prod(line.shape),)
        if channels and rest.shape == x.shape and (prod(rest.shape) != prod(line.shape) or _is_from_input(line)):
            return {"x": exact(rest), "bias": a.reshape(exact(line), x.shape[-1:])}
    return {"x": x}


def _is_quotient(value: Value) -> bool:
    """Return True if `value` is a product with a reciprocal."""
    factors = [unscaled(each)[0] for each in value.args] if value.op == "mul" else []
    return any(each.op == "power" and each.attrs == (-1.0,) for each in factors)
