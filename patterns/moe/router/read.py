"""Routers with a correction bias, with groups, or with sigmoid scores  (DeepSeek-V2, 2024; DeepSeek-V3, 2024).

    scores = sigmoid, softmax or sqrt(softplus) of logits    choice = scores + bias
    group  = max, or the sum of the two largest, of choice in each of G groups
    experts = the k largest of choice in the best groups     weights = scores at the experts

Outside of the best groups `choice` is filled with -inf. A fill of 0 is equivalent without a bias: no score is negative,
so 0 is never larger than a score of the best groups, and among equal numbers topk may choose any.

A stable sort chooses the first of equal scores, and so does argmax, the choice of one expert. npu_moe_gating_top_k does
so without groups, as its kernel sorts all scores of a token by one Sort of Ascend C, which is stable; with groups it
merges them in the order of the groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from fusion import reader
from fusion.analysis.dtypes import elements_below, is_rounding
from fusion.analysis.intervals import uncast
from fusion.analysis.rounding import is_float, unscaled
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from patterns.moe.one_hot import one_hot_places
from patterns.moe.router.group_masks import Grouped, hidden_groups
from patterns.moe.router.scores import scores_of, with_casts
from patterns.moe.words import CHOSEN_SCORES, EXPERT_CHOICE

RULE = "expert_routing"
_ALL = {"groups": 1, "kept": 1, "group_score": "max"}
_STABLE = "stable_largest_index"
_FIRST = "first_greatest"
_IN_GROUPS = (
    "experts: chosen in groups by {by}; npu_moe_gating_top_k keeps equal scores in order without groups "
    "alone; write topk where their order is free"
)
_ROUNDED = (
    "experts: chosen by {by} of scores in {dtypes}; npu_moe_gating_top_k sorts them in float32, where others "
    "are equal; write topk where their order is free"
)
_BY_LOGITS = (
    "experts: chosen by {by} of logits; npu_moe_gating_top_k sorts scores, of which more are equal, and the "
    "order of equal ones in npu_moe_gating_top_k_softmax_v2 is not documented; write topk where it is free"
)
_NO_SCORES = (
    "scores: the top-k is of something else than sigmoid or softmax of logits, plus a bias; "
    "npu_moe_gating_top_k requires one of both; write topk of logits.sigmoid() + bias"
)


@reader(gives=(EXPERT_CHOICE, CHOSEN_SCORES))
def expert_choices(graph: Graph) -> Iterator[Annotation]:
    """Read every expert_choice and chosen_scores: top-k indices of a router, and its scores at these; report misses."""
    lists = [each for each in list(graph.places) if _lists_some(each) and is_float(each.arg)]
    for places in lists:
        gate = _gate(graph.algebra, places)
        if gate is None and (_gathers_choice(graph, places) or _divides_choice(graph, places)):
            gate = _NO_SCORES
        if gate is None and _takes_first(places) and _become_scores(graph, places):
            gate = _BY_LOGITS.format(by=_how(places))
        if isinstance(gate, str):
            yield places, Miss(RULE, gate)
        elif gate is not None:
            yield from _readings(graph, places, *gate)


def _lists_some(places: Value) -> bool:
    """Return True if `places` are top-k indices, from a topk, from a stable sort of which not all indices are taken, or
    from argmax.
    """
    is_part = places.op == _STABLE and places.attrs != places.arg.shape[-1:]
    return places.op == "largest_index" or is_part or (places.op == _FIRST and not places.attrs)


def _takes_first(places: Value) -> bool:
    """Return True if `places` list the first of equal scores, by a stable sort or argmax."""
    return places.op in (_STABLE, _FIRST)


def _how(places: Value) -> str:
    """Name the call that lists the first of equal scores at `places`."""
    return "argmax" if places.op == _FIRST else "a stable sort"


def _best(a: Algebra, places: Value) -> Value:
    """Build the scores [*T, K] at `places`, the largest of each row."""
    if places.op == _FIRST:
        return a.reduce("greatest", places.arg, [-1])
    return a.make(places.op.removesuffix("_index"), places.args, places.attrs, places.shape, places.arg.dtype)


def _become_scores(graph: Graph, places: Value) -> bool:
    """Return True if the model takes a softmax or sigmoids of the largest scores, or a softmax of all of them."""
    best = _best(graph.algebra, places)
    sources = {best, places.arg} if places.op == _FIRST else {best}
    return any(
        each.op in ("softmax", "sigmoid") and each.arg.below("cast", "reshape") in sources for each in graph.places
    )


def _gathers_choice(graph: Graph, places: Value) -> bool:
    """Return True if `places` is a top-k of numbers + bias [E], or · bias, and the model gathers the numbers there."""
    choice = places.arg
    for numbers, bias in (*choice.operands("add"), *choice.operands("mul")):
        if bias.shape == (*[1] * (bias.rank - 1), choice.shape[-1]) and numbers.shape == choice.shape:
            return any(_reads(graph.algebra, each, numbers, places) for each in graph.places)
    return False


def _divides_choice(graph: Graph, places: Value) -> bool:
    """Return True if the model divides the values of the top-k `places` by their sum, and they are no scores."""
    best = _best(graph.algebra, places)
    sums = [each for each in graph.places if each.op == "mul" and _scores(graph.algebra, places.arg) is None]
    inverse = graph.algebra.power(graph.algebra.mean(best, [-1]), -1)
    return any(unscaled(x)[0] is best and unscaled(by)[0] is inverse for each in sums for x, by in each.operands())


def _readings(graph: Graph, places: Value, gate: dict[str, Any], scores: Value) -> Iterator[Annotation]:
    """Read `places` as expert_choice by the router `gate`, and `scores` gathered there as chosen_scores.

    A miss where none are gathered.
    """
    best = _best(graph.algebra, places)
    largest = list(_with_views(graph, best, places))
    weights = largest if gate["bias"] is None else []
    for taken in [each for each in list(graph.places) if _reads(graph.algebra, each, scores, places)]:
        weights += _with_views(graph, taken, places)
    if not weights:
        biased = (
            "weights: they are the scores with the bias; npu_moe_gating_top_k gives those without and "
            "requires that; gather the weights from the scores before the bias"
        )
        others = (
            "weights: they are not the scores of the chosen experts; npu_moe_gating_top_k requires "
            "scores.gather(-1, experts)"
        )
        yield places, Miss(RULE, biased if largest else others)
        return
    captures = {name: each for name, each in gate.items() if each is not None}
    chosen = [("expert_choice", places), *(("chosen_scores", each) for each in weights)]
    for word, value in ((word, each) for word, source in chosen for each in with_casts(graph, source)):
        squeezed = value.rank < places.arg.rank
        yield value, Reading(word, {**captures, "dtype": value.dtype, "squeezed": squeezed})


def _with_views(graph: Graph, value: Value, places: Value) -> Iterator[Value]:
    """Yield `value` [*T, K] of a node; by argmax `places`, also as [*T], and [*T, 1], of other nodes."""
    if places.op != _FIRST:
        yield from [value] if value in graph.places else []
        return
    lead, below = places.arg.shape[:-1], value.below("reshape")
    for each in list(graph.places):
        if each.below("reshape") is below and each.shape in (lead, (*lead, 1)):
            yield each


def _reads(a: Algebra, gathered: Value, scores: Value, places: Value) -> bool:
    """Return True if `gathered` takes `scores`, perhaps cast or reshaped, at `places`, or sums them by the one-hot
    encoding of argmax `places`.
    """
    if gathered.op == "take":
        x, at = gathered.args
        views = ("reshape",) if places.op == _FIRST else ()
        return uncast(at, *views) is uncast(places, *views) and _are(a, x, scores)
    total, factor = unscaled(gathered)
    total = total.below("reshape")
    if total.op != "mean" or total.attrs != (-1,) or total.arg.op != "mul" or factor != total.arg.shape[-1]:
        return False
    sides = ((x, one_hot_places(flags.below("cast"))) for x, flags in total.arg.operands())
    return places.op == _FIRST and any(at is places and _are(a, x, scores) for x, at in sides)


def _are(a: Algebra, x: Value, scores: Value) -> bool:
    """Return True if `x` is `scores`, perhaps cast or reshaped to as many experts in the last dim."""
    if x.shape[-1:] != scores.shape[-1:] or prod(x.shape) != prod(scores.shape):
        return False
    # a gather from one row drops its leading dims, and the reshape moves below functions of each element
    return elements_below(x) is elements_below(a.reshape(scores, x.shape))


# what is chosen from ------------------------------------------------------------------------------------------------


def _gate(a: Algebra, places: Value) -> tuple[dict[str, Any], Value] | str | None:
    """Return the captures of the router that chooses `places`, and its scores; a reason for a near miss; or None."""
    masked = hidden_groups(a, places.arg, lambda choice: _scores(a, choice) is not None)
    if isinstance(masked, str):
        return masked
    choice = places.arg if masked is None else masked.choice
    parts = _scores(a, choice)
    if parts is None:
        return None if masked is None else _NO_SCORES
    scores, bias = parts
    (norm, source), is_stable = scores_of(scores) or ("", scores), _takes_first(places)
    if masked is None and not is_stable and (norm == "softmax" and bias is None):
        return None  # a softmax without a bias or groups is read by the forms of SoftmaxShares
    groups = _groups(masked, choice, bias) if masked else _ALL
    if isinstance(groups, str):
        return groups
    disorder = _why_other_order(scores, choice, groups) if is_stable else ""
    if disorder:
        return disorder.format(by=_how(places))
    logits = a.reshape(source, choice.shape)
    count = 1 if places.op == _FIRST else places.attrs[0]
    return {"logits": logits, "bias": bias, "norm": norm, **groups, "count": count}, scores


def _why_other_order(scores: Value, choice: Value, groups: dict[str, Any]) -> str:
    """Return the reason why the operator may list equal scores in another order than a stable sort, or "".

    It may if groups are selected, or if the model rounds the scores before it sorts.
    """
    if groups["groups"] > 1:
        return _IN_GROUPS
    rounded = {choice.dtype, scores.dtype, *(each.dtype for each in _casts(scores))} - {torch.float32}
    dtypes = ", ".join(sorted(str(each).removeprefix("torch.") for each in rounded))
    return _ROUNDED.replace("{dtypes}", dtypes) if rounded else ""


def _casts(scores: Value) -> Iterator[Value]:
    """Yield `scores` and the values below their casts and reshapes, down to the sigmoid or softmax."""
    yield scores
    while is_rounding(scores) or scores.op == "reshape":
        scores = scores.arg
        yield scores


def _scores(a: Algebra, choice: Value) -> tuple[Value, Value | None] | None:
    """Split `choice` into the scores of all experts and the bias [E], None without one; None if there are no scores."""
    if _is_score(choice):
        return choice, None
    if choice.op != "add":
        return None
    for scores, bias in choice.operands():
        if (
            _is_score(scores)
            and scores.shape == choice.shape
            and bias.shape == (*[1] * (bias.rank - 1), choice.shape[-1])
        ):
            return scores, a.reshape(bias, bias.shape[-1:])
    return None


def _is_score(x: Value) -> bool:
    """Return True if `x` is a function of logits that gives scores, perhaps cast or reshaped."""
    return scores_of(x) is not None


# groups -------------------------------------------------------------------------------------------------------------


def _groups(masked: Grouped, choice: Value, bias: Value | None) -> dict[str, Any] | str:
    """Return the captures groups, kept and group_score of the groups that `masked` selects; the reason if the operator
    has no such groups.

    `choice` are the scores that experts are chosen by, and `bias` is what is added to the scores before, or None.
    """
    listed = masked.groups
    if listed.op != "largest_index":
        return (
            "groups: those that stay are not the top-k of one score for each group; npu_moe_gating_top_k "
            "requires group_scores.topk(k, -1)"
        )
    scored = _scored(listed.arg)
    if scored is None or scored[0].below("reshape") is not choice.below("reshape"):
        return (
            "groups: they are not chosen by the largest, or the sum of the two largest, of the scores of "
            "their experts (with the bias where there is one); npu_moe_gating_top_k requires one of both; "
            "write choice.unflatten(-1, (groups, -1)).topk(2, -1)[0].sum(-1)"
        )
    grouped, score = scored
    groups, selected, experts = listed.arg.shape[-1], listed.attrs[0], choice.shape[-1]
    if grouped.shape[-1] != masked.size or groups * masked.size != experts:
        return (
            "groups: they are not runs of neighbouring experts; npu_moe_gating_top_k requires view(T, groups, "
            "E / groups)"
        )
    if selected == groups:
        return _ALL
    if masked.fill == 0 and bias is not None:
        return (
            "groups: scores of those outside of the top-k are filled with 0, which wins against a negative "
            "score with a bias; npu_moe_gating_top_k requires -inf; write masked_fill(~mask, -inf)"
        )
    if masked.fill not in (0, -math.inf):
        return (
            f"groups: scores of those outside of the top-k are filled with {masked.fill}; npu_moe_gating_top_k "
            "requires -inf; write masked_fill(~mask, -inf)"
        )
    return {"groups": groups, "kept": selected, "group_score": score}


def _scored(x: Value) -> tuple[Value, str] | None:
    """Read `x` [*T, G] as scores of groups: return the scores [*T, G, E / G] of the experts in each, and "max" or
    "sum".

    "sum" is that of the two largest. None if `x` is anything else.
    """
    # a positive factor, such as that of a mean instead of a sum, changes no order
    while x.op == "reshape" or (x.op == "scale" and x.attrs[0] > 0):
        x = x.arg
    if x.op == "greatest" and x.attrs == (-1,):
        return x.arg, "max"
    if x.op == "mean" and x.attrs == (-1,):
        best = x.arg.below("reshape")
        return (best.arg, "sum") if best.op == "largest" and best.attrs == x.arg.shape[-1:] == (2,) else None
    return (x.arg, "max") if x.op == "largest" and x.attrs == (1,) else None
