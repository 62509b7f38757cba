"""Scores of a router: sigmoid, softmax or sqrt(softplus) of its logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusion.analysis.dtypes import rows_below
from fusion.graph import Graph, Value
from fusion.graph.dims import INDEX_DTYPES


def scores_of(x: Value) -> tuple[str, Value] | None:
    """Return the name of the function that gives the scores `x`, perhaps cast or reshaped, and its logits; None for
    others.

    It is a sigmoid, a softmax over the last dim, or the square root of a softplus.
    """
    x = rows_below(x)
    if x.op == "sigmoid" or (x.op == "softmax" and x.attrs[0] == -1):
        return x.op, x.arg
    logits = _below_softplus(rows_below(x.arg)) if (x.op, x.attrs) == ("power", (0.5,)) else None
    return None if logits is None else ("sqrt_softplus", logits)


def _below_softplus(x: Value) -> Value | None:
    """Return z if `x` is softplus(z): as one call, as log1p(exp(z)) and z above 20, or as log1p(exp(-|z|)) + relu(z);
    else None.
    """
    if x.op == "softplus":
        return x.arg
    if x.op == "where":
        condition, above, below = x.args
        bound = condition.arg if (condition.op, condition.attrs) == ("compare", ("lt",)) else x
        is_bound = (bound.op, bound.attrs) == ("full", (20,)) and condition.args[1] is above
        return above if is_bound and _below_log1p(below) is above else None
    for logarithm, positive in x.operands("add"):
        exponent = _below_log1p(logarithm)
        if positive.op != "relu" or exponent is None or (exponent.op, exponent.attrs) != ("scale", (-1.0,)):
            continue
        magnitude = exponent.arg
        return positive.arg if magnitude.op == "abs" and magnitude.arg is positive.arg else None
    return None


def _below_log1p(x: Value) -> Value | None:
    """Return z if `x` is log1p(exp(z)), else None."""
    return x.arg.arg if x.op == "aten.log1p.default" and x.arg.op == "exp" else None


def with_casts(graph: Graph, value: Value) -> Iterator[Value]:
    """Yield `value` and its casts in the graph: between index dtypes, or to float32, bfloat16 and float16."""
    kinds = INDEX_DTYPES if value.dtype in INDEX_DTYPES else {torch.float32, torch.bfloat16, torch.float16}
    yield value
    for each in list(graph.places):
        if each.op == "cast" and each.arg is value and each.dtype in kinds:
            yield each
