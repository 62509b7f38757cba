"""The reader of softmax attention in any layout, from its products: out = softmax(scale · q kᵀ + mask) v.

The product with values is read by `products`, the softmax by `weights`, the scores down to q kᵀ by `scores`. Then each
assignment of the rows to sequences, heads and queries (`frames`) is tried: `operands`, `masks`, the bias (`read_bias`)
and the `output_view`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite, prod
from typing import Any

import torch

from fusion import reader
from fusion.analysis.row_layout import uncast
from fusion.graph import Annotation, Graph, Miss, Reading, Value
from patterns.attention.core.addends import product_in
from patterns.attention.core.divided_late import Finish, stripped
from patterns.attention.core.frames import Attended, Frame, per_head
from patterns.attention.core.joined_heads import with_all_heads
from patterns.attention.core.operands import APART, SEVERAL, Outcome, Pieces, operands_of
from patterns.attention.core.output_view import named_view, view_steps
from patterns.attention.core.places import ATTENDING, is_end, is_one_call, only_arranges
from patterns.attention.core.products import contraction
from patterns.attention.core.row_heads import rows_as_heads
from patterns.attention.core.scores import Scores, scores_of
from patterns.attention.core.weights import Weights, dropped, empty_rows, weights_of
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term, hides_by_truths
from patterns.attention.masks.masks import NOT_LOST, OF_HEADS, Masks
from patterns.attention.masks.read_bias import GUARDED, Parted, bias_of, parted, stays_finite, unparted
from patterns.attention.reasons.blame import (
    RULE,
    TRUTHS,
    missed,
    unproven,
    used_weights_miss,
    why_not_decomposed,
    wide_result_miss,
)
from patterns.attention.reasons.not_softmax import OVER_QUERIES, why_not_attention, without_softmax
from patterns.attention.reasons.unclaimed import completed
from patterns.attention.words import SOFTMAX_ATTENTION
from patterns.latent.attention.int8_probabilities import int8_probability_attention
from patterns.latent.words import FOLDED_QUERY, INT8_LATENT_ATTENTION, INT8_PROBABILITY_ATTENTION
from patterns.sparse.attention.listed import Operands, listed_attention
from patterns.sparse.indexer.read import topk_mask
from patterns.sparse.lists.read_lists import shows_one
from patterns.sparse.words import LISTED_ATTENTION, TOPK_MASK

_REPEATED = (
    "one score is repeated for several keys; npu_fused_infer_attention_score requires a product of query and key for "
    "each key"
)
_CUT = "the weights are cut, but not from a sink that stands last"
_VALUED = (
    "sink: it has a value of its own; npu_fused_infer_attention_score_v2 requires a sink without one; cut its column "
    "off the weights"
)
_OTHERS = (None, APART, _REPEATED, SEVERAL)
"""Outcomes for a product that is not q kᵀ, after which another addend of the scores is tried as q kᵀ."""
_SUNK = (
    "a sink stands beside the scores of rows that a list names: this package passes none to "
    "npu_sparse_flash_attention, whose argument sinks it does not compute"
)
_SCALED = "scores of rows that a list names are multiplied by tensors: the operator multiplies all by one number"
_CLAMPED = "masked scores of rows that a list names are clamped to finite numbers"
_LENGTHS = ("window", "kv_len", "kv_lens")

_GIVEN = (
    SOFTMAX_ATTENTION, TOPK_MASK, LISTED_ATTENTION, INT8_LATENT_ATTENTION, FOLDED_QUERY, INT8_PROBABILITY_ATTENTION,
)  # fmt: skip


@reader(gives=_GIVEN)
def attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every softmax attention of the graph, with its mask if this lists keys; yield misses for lookalikes."""
    return completed(graph, _attentions(graph))


def _attentions(graph: Graph) -> Iterator[Annotation]:
    assumed = Assumed.of(graph)
    read, in_int8 = partial(attention, assumed), torch.int8 in graph.dtypes
    for value in list(graph.places):
        if value.op == "aten.scaled_dot_product_attention.default":  # which the canonicaliser has not expanded
            yield value, Miss("softmax_attention", why_not_decomposed(graph.places[value][0]))
        if value.op in ("cat", "matmul") and (joined := with_all_heads(graph.algebra, value)) is not None:
            yield from _named(value, joined, read(joined))
            continue
        if value.op not in ATTENDING or only_arranges(graph, value):
            continue
        outcome = read(value)
        rounded = int8_probability_attention(graph.algebra, value, read) if outcome is None and in_int8 else None
        if isinstance(rounded, Miss) and not is_end(graph, value):
            continue
        if not (outcome or rounded):
            product = stripped(value)[0]
            reason = why_not_attention(product) or without_softmax(graph, product)
            outcome = missed(reason, product) if reason else {}
        outcome = rounded or outcome or {}
        reading = outcome.get(value) if isinstance(outcome, dict) else None
        if isinstance(reading, Reading) and "empty_bias" in reading.captures and is_one_call(graph, value):
            bias = reading.captures["bias"].below("reshape", "expand")
            outcome = missed(f"{unproven(bias)}; {GUARDED}", value, (bias,))
        listed = _over_lists(assumed, value) if outcome else []
        yield from ((value, each) for each in listed if isinstance(outcome, Miss) or isinstance(each, Reading))
        if listed and isinstance(outcome, Miss):
            continue
        if isinstance(outcome, Miss):
            yield value, outcome
            continue
        yield from outcome.items()
        for diagnose in (wide_result_miss, used_weights_miss):
            miss = diagnose(graph, value, outcome.get(value))
            yield from () if miss is None else ((value, miss),)


def _named(value: Value, joined: Value, outcome: Outcome | Miss | None) -> Iterator[Annotation]:
    """Yield the readings or the `Miss` in `outcome` with `value` in the place of `joined`.

    `joined` is equal to `value`, with single heads joined to one product; `outcome` was read from it.
    """
    if isinstance(outcome, Miss):
        yield value, replace(outcome, of=value)
    elif outcome:
        yield from ((value if each is joined else each, reading) for each, reading in outcome.items())


def attention(assumed: Assumed, root: Value) -> Outcome | Miss | None:
    """Read `root` as attention, with its mask if this lists keys; a miss says why not; None if nothing looks alike."""
    outcome = _attention(assumed, root)
    if not isinstance(outcome, str):
        return outcome
    return missed(outcome, contraction(assumed.algebra, root, assumed.computed)[0])


def _attention(assumed: Assumed, root: Value) -> Outcome | Miss | str | None:
    """Read `root` as attention, taking each product among the addends of the scores for q kᵀ in turn.

    Returns a `Miss` or the reason for one if `root` only looks like attention, None if not even that.
    """
    a, walk = assumed.algebra, Scores()
    outcome: Outcome | Miss | str | None = None
    while True:
        parts = _read_parts(assumed, root, walk)
        latest = _reading(assumed, root, *parts) if isinstance(parts, tuple) else parts
        outcome = latest if not walk.biases or latest not in _OTHERS else outcome
        value = contraction(a, root, assumed.computed)[0]
        weights = weights_of(a, value.arg, walk) if value.op == "matmul" and outcome in _OTHERS else None
        product = weights and product_in(weights.softmax.arg, walk.biases)
        if product is None:
            return outcome
        walk = Scores(biases=walk.biases | {product})


def _read_parts(
    assumed: Assumed, root: Value, walk: Scores = Scores()
) -> tuple[Value, Weights, Scores, Finish] | Miss | str | None:
    """Read the product P v below `root`, its weights, their scores and the steps from the product to `root`.

    A miss or a reason if `root` is no attention; None if nothing looks alike.
    """
    a = assumed.algebra
    value, finish = contraction(a, root, assumed.computed)
    if value.op != "matmul":
        return None
    weights = weights_of(a, value.arg, walk)
    if weights is None:
        return (
            "some of the weights are dropped at random; npu_fused_infer_attention_score drops "
            "none; set the dropout to 0"
            if dropped(value.arg)
            else None
        )
    if weights.softmax.attrs[0] != -1:
        return OVER_QUERIES
    scores = scores_of(a, walk, weights.softmax.arg)
    if scores.product is None:
        return missed(scores.reason, value, scores.at) if scores.reason else None
    if not scores.scale or not isfinite(scores.scale):
        return f"scores are multiplied by {scores.scale:g}: what is hidden would not stay apart from what is seen"
    if weights.cut != (scores.sink is not None):
        return _CUT if weights.cut else _VALUED
    return value, weights, scores, finish


def _over_lists(assumed: Assumed, root: Value) -> list[Reading | Miss]:
    """Read `root` as attention over rows that lists of keys gather; see `listed_attention`.

    [] if `root` is no attention, or if no rows are gathered.
    """
    a, parts = assumed.algebra, _read_parts(assumed, root)
    if not isinstance(parts, tuple):
        return []
    product, weights, scores, finish = parts
    shape = weights.softmax.shape[:-1]
    assert scores.product is not None  # `_read_parts` returns no others
    attended = Attended.by(a, scores, product, weights)
    if attended is None or not 2 <= len(shape) <= 4:
        return []
    k, v = attended.keys_and_values(attended.plain(shape))
    if k is None or v is None:
        return []
    q = attended.queries
    masks = assumed.masks((*shape, k.shape[2]), scores.terms, (shape[0], prod(shape[1:-1]), shape[-1], k.shape[2]))
    steps = view_steps(weights, v.shape[-1], finish)
    rounded = assumed.rounded(root)
    narrow = rounded is not None and all(uncast(a, each).dtype is rounded for each in (q, k, v))
    operands = Operands(q, k, v, *((rounded, [*steps, ("cast", (root.dtype,))]) if narrow else (root.dtype, steps)))
    reasons = {_SUNK: scores.sink is not None, _SCALED: scores.factors, _CLAMPED: scores.floor > -inf}
    reason = next((why for why, met in reasons.items() if met), "")
    empty = empty_rows(weights, scores)
    return listed_attention(masks, operands, scores.scale, empty, reason, partial(shows_one, assumed)) or []


def _reading(
    assumed: Assumed, root: Value, product: Value, weights: Weights, scores: Scores, finish: Finish
) -> Outcome | Miss | str:
    """Read the attention `root` in the first frame of its rows that fits; the first reason if none does.

    Args:
        assumed: the graph, with the assumptions on masks that are passed in.
        root: the result of the attention.
        product: the product of weights and values.
        weights: its left factor.
        scores: what the softmax is computed over, down to q kᵀ.
        finish: the steps from `product` to `root`.
    """
    a, shape = assumed.algebra, weights.softmax.shape[:-1]
    if not 1 <= len(shape) <= 4:
        return (
            "scores of more than five dims; npu_fused_infer_attention_score requires [B, N, S, T]; "
            "flatten the first of them"
        )
    assert scores.product is not None  # `_read_parts` returns no others
    if scores.product.shape[-1] != product.args[1].shape[-2]:
        return _REPEATED if scores.product.shape[-1] == 1 else _CUT
    attended = Attended.by(a, scores, product, weights)
    if attended is None:
        return APART
    reasons: list[Miss | str] = []
    for frame in attended.frames(shape, scores.sink is not None):
        outcome = _framed(assumed, root, attended, frame, Pieces(product, weights, scores, finish))
        if not isinstance(outcome, str) and not (isinstance(outcome, Miss) and outcome.rule == RULE):
            return outcome
        reasons.append(outcome)
    return next((each for each in reasons if each != APART), APART)


def _framed(assumed: Assumed, root: Value, attended: Attended, frame: Frame, parts: Pieces) -> Outcome | Miss | str:
    """Read the attention `parts`, whose result is `root`, with its rows split into sequences, heads and queries as
    `frame`.

    `attended` are queries, keys and values. Returns a `Miss`, or the reason for one, if that is no attention.
    """
    a, scores = assumed.algebra, parts.scores
    inputs = operands_of(assumed, root, attended, frame, parts)
    if not isinstance(inputs, tuple):
        return inputs
    operands, others, (keys, width) = inputs
    captures: dict[str, Any] = {**operands, "scale": scores.scale}
    narrow = "q" in operands and operands["q"].dtype is not root.dtype
    widened = (("cast", (root.dtype,)),) if narrow and ("cast", (root.dtype,)) not in parts.finish else ()
    steps = named_view(frame.sizes, parts.weights, width, (*parts.finish, *widened))
    if steps is None:
        return "the result is arranged by several symbolic sizes; compile it for static sizes of all but one of them"
    captures["output_view"] = steps
    if scores.sink is not None:
        sink = per_head(a, scores.sink, frame, attended.queries)
        if sink is None:
            return "the sink is not one number for each head; npu_fused_infer_attention_score requires [N]"
        captures["sink"] = sink
    in_floats = "q" in operands
    seen = _masks(assumed, parts, frame, keys, operands["q"].dtype if in_floats else None)
    if isinstance(seen, Miss):
        return seen
    masks, mask = seen
    name = "softmax_attention" if in_floats else "int8_latent_attention"
    reading = Reading(name, captures | mask, masks.positions.names())
    listed = _lists(assumed, frame, keys, masks.terms, reading)
    if in_floats and mask.get("mask") not in listed:
        by_heads = rows_as_heads(a, reading)
        if by_heads is not reading:
            one = frame.with_one_query()
            listed = _lists(assumed, one, keys, one.aligned_terms(a, masks.terms), by_heads)
        reading = by_heads
    return {**others, root: reading, **listed}


def _lists(assumed: Assumed, frame: Frame, keys: Any, terms: Sequence[Term], reading: Reading) -> Outcome:
    """Map the mask of the attention `reading`, or the list in it, to a `topk_mask` reading or a `Miss`.

    With a sink, each list is mapped to a `Miss`. {} if the mask lists no keys.
    """
    mask = reading.captures.get("mask")
    masks = assumed.masks((*frame.shape, keys), terms, (*frame.sizes, keys), keep_lists=True)
    listed = {} if mask is None else topk_mask(masks, mask, assumed.sorted_by_scores)
    sink = reading.captures.get("sink")
    if sink is None:
        return dict(listed)
    lists = (each.captures["places"] for each in listed.values() if isinstance(each, Reading))
    return {places: Miss("sparse_attention", _SUNK, (sink,)) for places in lists}


def _masks(assumed: Assumed, parts: Pieces, frame: Frame, keys: Any, dtype: Any) -> tuple[Masks, dict[str, Any]] | Miss:
    """Describe the masks and the bias of the scores of `parts` with the rows of `frame`.

    Args:
        assumed: the graph, with the assumptions on masks that are passed in.
        parts: the product, weights and scores of the attention.
        frame: which dims of the rows are sequences, heads and queries.
        keys: T.
        dtype: the dtype of the queries; None for int8.

    Returns:
        The masks, and the captures for masks and bias; a miss if these cannot be described.
    """
    scores = (*frame.shape, keys), frame.aligned_terms(assumed.algebra, parts.scores.terms), (*frame.sizes, keys)
    masks = assumed.masks(*scores)
    split = parted(masks)
    mask, bias = _described(assumed, split, frame, dtype, parts)
    is_unknown = mask.startswith((NOT_LOST, OF_HEADS)) if isinstance(mask, str) else isinstance(bias, str)
    joint = unparted(assumed, masks, dtype) if is_unknown and masks.are_shared(parts.empty) else None
    lowered = isinstance(mask, str) and mask.startswith(NOT_LOST)
    finite = lowered or parts.scores.floor > -inf or (joint is not None and stays_finite(joint))
    if joint is not None and finite:  # numbers that are added are exact as a bias, whether they hide a key or not
        described = _described(assumed, joint, frame, dtype, parts)
        fits = isinstance(described[1], dict) and (lowered or "empty_bias" not in described[1])
        split, (mask, bias) = (joint, described) if fits else (split, (mask, bias))
    if isinstance(mask, str):
        return missed(mask, parts.product, split.masks.blamed().at)
    if isinstance(bias, dict):
        return split.masks, mask | bias | ({"fully_masked_row": "zero"} if "empty_bias" in bias else {})
    (_, term), *_ = split.biases
    why = unproven(term.mask, hides_by_truths(split.masks.positions, term))
    supposed = why
    if why == TRUTHS:
        supposed = assumed.masks(*scores, suppose=True).spec(parts.empty)
    why = f"{why}; and {supposed}" if isinstance(supposed, str) and supposed != why else why
    return missed(f"{why}; {bias}", parts.product, term.at)


def _described(assumed: Assumed, split: Parted, frame: Frame, dtype: Any, parts: Pieces) -> tuple[Any, Any]:
    """Return the captures of the masks, and those of the bias.

    Either is a string, the reason, if it cannot be described; the second is {} if there is no bias or the first is a
    string.

    Args:
        assumed: the graph, with the assumptions on masks that are passed in.
        split: the masks and biases of the scores.
        frame: which dims of the rows are sequences, heads and queries.
        dtype: the dtype of the queries; None for int8.
        parts: the product, weights and scores of the attention.
    """
    floor = parts.scores.floor
    mask = split.masks.spec(parts.empty, bool(split.biases), split.over, floor)
    if isinstance(mask, str) or not split.biases:
        return mask, {}
    structured = "mask" not in mask and any(mask.get(each) not in (None, "none") for each in ("mask_kind", *_LENGTHS))
    return mask, bias_of(assumed, split, frame, dtype, parts.empty.of(-inf), structured, floor)
