"""Weights of attention without a softmax op: exponentials, or a softmax, times one number for each row.

exp(z) / (Σ exp(z) + exp(sink))      exp(z - logaddexp(lse, sink))      softmax(z) · sigmoid(lse - sink)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fusion.analysis.dtypes import rounded_number
from fusion.analysis.equal_rows import on_equal_rows
from fusion.analysis.logarithms import differences
from fusion.analysis.rounding import exact
from fusion.analysis.softmax_weights import RowShares, row_shares
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.core.empty_rows import Empty, Shift, leaf_of, result
from patterns.attention.core.scores import Scores, scores_of, swallows

_HIDING = (-math.inf, -1e4, -1e9)
"""Numbers by which models hide keys, of several magnitudes; the lowest of a dtype is added."""
_EMPTY = ("nan", "zero")
_LESS = ("greatest", "nothing", "log_sum", "log_of_sum", "unknown")


@proof
def shared(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite the weights `p` [*rows, T], exponentials of scores times one number for each row, to a softmax over the
    keys.

    With a sink, `p` is all but the last weight of a softmax over scores and sink. Of the kinds of softmax, which differ
    in rows without keys, the one that agrees with `p` for all of several numbers that hide keys; if there is none, one
    with an unknown output for such rows. None if the weights of a row, with that of a sink, are not proven to add up to
    1.
    """
    shares = proven(row_shares(a, p))
    below = scores_of(a, walk, shares.x)
    steps = p.sources(lambda each: () if each is shares.x else each.args)
    others = [less for each in steps for _, less in differences(each) if less is not shares.less]
    must(below.product is not None and not any(swallows(each, shares.x, below) for each in others))
    least = torch.finfo(proven(shares.x.dtype)).min
    numbers = [proven(rounded_number(each, shares.x.dtype)) for each in (*_HIDING, least)]
    measured = [_measured(p, shares, each) for each in numbers]
    softmaxes = list(_softmaxes(a, shares))
    alike = (each for each in softmaxes if [each.of(number) for number in numbers] == measured)
    softmax = next(alike, softmaxes[-1]).softmax  # the last one has an unknown output for rows without keys
    keys: Any = p.shape[-1]
    if shares.sink is not None:
        softmax = a.cut(softmax, -1, 0, keys) if isinstance(keys, int) else a.narrow(softmax, -1, 0, keys)
    return a.cast(softmax, p.dtype)


def _measured(p: Value, shares: RowShares, number: float) -> str:
    """Name the output, as `result` does, of the weights `p` for a row of scores that are all `number`, with a sink of
    0.
    """
    sink = {} if shares.sink is None else {leaf_of(shares.sink): 0.0}
    share = on_equal_rows(p, {shares.x: number, exact(shares.x): number}, sink)
    return "" if share is None else result(share, shares.x.shape[-1])


def _softmaxes(a: Algebra, shares: RowShares) -> Iterator[Empty]:
    """Yield each kind of softmax over the scores and the sink of `shares`: they differ in the output for rows without
    keys.
    """
    minus = None if shares.less is None else a.scale(shares.less, -1)
    scores, sink = shares.z, shares.sink
    if sink is not None:
        shifted = sink if minus is None else proven(a.add(sink, minus))
        scores = a.cat([shares.z, shifted], -1)
    for empty in _EMPTY:
        for less in _LESS:
            softmax = a.softmax(scores, -1, empty, less)
            shifts = () if minus is None or softmax.arg is shares.x else (Shift(minus, shares.x, 1.0, sink),)
            yield Empty(softmax, shifts, sink is not None)
