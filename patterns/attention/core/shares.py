"""Weights that are shares of a row without a softmax that says so: exponentials, times numbers of each row.

exp(z) / (Σ exp(z) + exp(sink))      exp(z - logaddexp(lse, sink))      softmax(z) · sigmoid(lse - sink)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fusion.analysis.dtypes import held_number
from fusion.analysis.equal_rows import on_equal_rows
from fusion.analysis.logarithms import differences
from fusion.analysis.rounding import exact
from fusion.analysis.row_sums import RowShares, row_shares
from fusion.graph import Algebra, Value
from fusion.graph.proof import must, proof, proven
from patterns.attention.core.empty_rows import Empty, Shift, leaf_of, result
from patterns.attention.core.scores import Scores, scores_of, swallows

_HIDING = (-math.inf, -1e4, -1e9)
"""Numbers of several magnitudes that hide keys, beside the least of a dtype."""
_EMPTY = ("nan", "zero")
_LESS = ("greatest", "nothing", "log_sum", "log_of_sum", "unknown")


@proof
def shared(a: Algebra, p: Value, walk: Scores) -> Value | None:
    """Rewrite weights `p` [*rows, T] as those of a softmax over scores, and of a sink behind them if there is one.

    What rows without keys give is computed from `p` for several numbers that may hide keys; the softmax gives the same.
    """
    found = proven(row_shares(a, p))
    below = scores_of(a, walk, found.x)
    steps = p.sources(lambda each: () if each is found.x else each.args)
    others = [less for each in steps for _, less in differences(each) if less is not found.less]
    must(below.product is not None and not any(swallows(each, found.x, below) for each in others))
    least = torch.finfo(proven(found.x.dtype)).min
    numbers = [proven(held_number(each, found.x.dtype)) for each in (*_HIDING, least)]
    measured = [_measured(p, found, each) for each in numbers]
    softmaxes = list(_softmaxes(a, found))
    alike = (each for each in softmaxes if [each.of(number) for number in numbers] == measured)
    softmax = next(alike, softmaxes[-1]).softmax  # the last one tells nothing of rows without keys
    keys: Any = p.shape[-1]
    return a.cast(softmax if found.sink is None else a.cut(softmax, -1, 0, keys), p.dtype)


def _measured(p: Value, found: RowShares, number: float) -> str:
    """Compute what weights make of a row of one number, beside a sink of 0."""
    sink = {} if found.sink is None else {leaf_of(found.sink): 0.0}
    share = on_equal_rows(p, {found.x: number, exact(found.x): number}, sink)
    return "" if share is None else result(share, found.x.shape[-1])


def _softmaxes(a: Algebra, found: RowShares) -> Iterator[Empty]:
    """Build a softmax of each kind over the scores, with what is subtracted from them and from the sink."""
    minus = None if found.less is None else a.scale(found.less, -1)
    scores, sink = found.z, found.sink
    if sink is not None:
        beside = sink if minus is None else proven(a.add(sink, minus))
        scores = a.cat([found.z, beside], -1)
    for empty in _EMPTY:
        for less in _LESS:
            softmax = a.softmax(scores, -1, empty, less)
            shifts = () if minus is None or softmax.arg is found.x else (Shift(minus, found.x, 1.0, sink),)
            yield Empty(softmax, shifts, sink is not None)
