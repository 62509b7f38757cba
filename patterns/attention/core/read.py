"""Softmax attention, read from contractions: out = softmax(scale · q kᵀ + mask) v, in whatever layout it is written.

From the product with values (`products`) and the softmax (`weights`) down to that of queries and keys (`scores`); then,
for each way in which rows of scores may be sequences, heads and queries (`frames`), the `operands`, the `masks`, the
bias (`read_bias`) and the `output_view`.
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
from fusion.graph import Found, Graph, Miss, Reading, Value
from patterns.attention.core.addends import product_in
from patterns.attention.core.divided_late import Finish, stripped
from patterns.attention.core.frames import Attended, Frame, per_head
from patterns.attention.core.joined_heads import of_all_heads
from patterns.attention.core.operands import APART, SEVERAL, Outcome, Parts, operands_of
from patterns.attention.core.output_view import named_view, view_steps
from patterns.attention.core.places import ATTENDING, is_end, is_one_call, only_arranges
from patterns.attention.core.products import contraction
from patterns.attention.core.row_heads import told_apart
from patterns.attention.core.scores import Scores, scores_of
from patterns.attention.core.weights import Weights, dropped, empty_rows, weights_of
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term, hides_by_truths
from patterns.attention.masks.masks import NOT_LOST, OF_HEADS, Masks
from patterns.attention.masks.read_bias import GUARDED, Parted, bias_of, parted, stays_finite, unparted
from patterns.attention.reasons.blame import RULE, TRUTHS, kept_wide, left_whole, missed, unproven, weights_kept
from patterns.attention.reasons.not_softmax import OVER_QUERIES, unlike, without_softmax
from patterns.attention.reasons.unclaimed import completed
from patterns.attention.words import SOFTMAX_ATTENTION
from patterns.latent.attention.int8_probabilities import int8_probability_attention
from patterns.latent.words import FOLDED_QUERY, INT8_LATENT_ATTENTION, INT8_PROBABILITY_ATTENTION
from patterns.sparse.attention.listed import Operands, listed_attention
from patterns.sparse.indexer.read import topk_mask
from patterns.sparse.lists.read_lists import shows_one
from patterns.sparse.words import LISTED_ATTENTION, TOPK_MASK

_REPEATED = "one score is repeated for several keys"
_CUT = "the weights are cut, but not from a sink that stands last"
_VALUED = (
    "sink: it has a value of its own; npu_fused_infer_attention_score_v2 requires a sink without one; cut its column "
    "off the weights"
)
_OTHERS = (None, APART, _REPEATED, SEVERAL)
"""Why a product is not that of queries and keys, where what is added to it may be."""
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
def attentions(graph: Graph) -> Iterator[Found]:
    """Every attention that nodes compute, its mask if that lists keys; why what looks like one is none."""
    return completed(graph, _attentions(graph))


def _attentions(graph: Graph) -> Iterator[Found]:
    assumed = Assumed.of(graph)
    read, in_int8 = partial(attention, assumed), torch.int8 in graph.dtypes
    for value in list(graph.places):
        if value.op == "aten.scaled_dot_product_attention.default":  # which is written out wherever it can be
            yield value, Miss("softmax_attention", left_whole(graph.places[value][0]))
        if value.op in ("cat", "matmul") and (whole := of_all_heads(graph.algebra, value)) is not None:
            yield from _named(value, whole, read(whole))
            continue
        if value.op not in ATTENDING or only_arranges(graph, value):
            continue
        outcome = read(value)
        rounded = int8_probability_attention(graph.algebra, value, read) if outcome is None and in_int8 else None
        if isinstance(rounded, Miss) and not is_end(graph, value):
            continue
        if not (outcome or rounded):
            product = stripped(value)[0]
            reason = unlike(product) or without_softmax(graph, product)
            outcome = missed(reason, product) if reason else {}
        outcome = rounded or outcome or {}
        reading = outcome.get(value) if isinstance(outcome, dict) else None
        if isinstance(reading, Reading) and "empty_bias" in reading.captures and is_one_call(graph, value):
            bias = reading.captures["bias"].below("reshape", "expand")
            outcome = missed(f"{unproven(bias)}; {GUARDED}", value, (bias,))
        listed = _listed(assumed, value) if outcome else []
        yield from ((value, each) for each in listed if isinstance(outcome, Miss) or isinstance(each, Reading))
        if listed and isinstance(outcome, Miss):
            continue
        if isinstance(outcome, Miss):
            yield value, outcome
            continue
        yield from outcome.items()
        for kept in (kept_wide, weights_kept):
            said = kept(graph, value, outcome.get(value))
            yield from () if said is None else ((value, said),)


def _named(value: Value, whole: Value, outcome: Outcome | Miss | None) -> Iterator[Found]:
    """What is read of a value in another form, of the value itself."""
    if isinstance(outcome, Miss):
        yield value, replace(outcome, of=value)
    elif outcome:
        yield from ((value if each is whole else each, said) for each, said in outcome.items())


def attention(assumed: Assumed, root: Value) -> Outcome | Miss | None:
    """What `root` is if it is attention, and its mask if that lists keys; why it is none; None if it is not like it."""
    outcome = _attention(assumed, root)
    if not isinstance(outcome, str):
        return outcome
    return missed(outcome, contraction(assumed.algebra, root, assumed.computed)[0])


def _attention(assumed: Assumed, root: Value) -> Outcome | Miss | str | None:
    """By each product among what is added up to the scores, until one is that of queries and keys."""
    a, walk = assumed.algebra, Scores()
    outcome: Outcome | Miss | str | None = None
    while True:
        found = _found(assumed, root, walk)
        latest = _reading(assumed, root, *found) if isinstance(found, tuple) else found
        outcome = latest if not walk.biases or latest not in _OTHERS else outcome
        value = contraction(a, root, assumed.computed)[0]
        weights = weights_of(a, value.arg, walk) if value.op == "matmul" and outcome in _OTHERS else None
        product = weights and product_in(weights.softmax.arg, walk.biases)
        if product is None:
            return outcome
        walk = Scores(biases=walk.biases | {product})


def _found(
    assumed: Assumed, root: Value, walk: Scores = Scores()
) -> tuple[Value, Weights, Scores, Finish] | Miss | str | None:
    """The product with values below `root`, the weights, their scores, and how the product is arranged; or why not."""
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
        return missed(scores.odd, value, scores.at) if scores.odd else None
    if not scores.scale or not isfinite(scores.scale):
        return f"scores are multiplied by {scores.scale:g}: what is hidden would not stay apart from what is seen"
    if weights.cut != (scores.sink is not None):
        return _CUT if weights.cut else _VALUED
    return value, weights, scores, finish


def _listed(assumed: Assumed, root: Value) -> list[Reading | Miss]:
    """Attention over rows that the model gathers by lists, or why it is none; nothing if nothing is gathered so."""
    a, found = assumed.algebra, _found(assumed, root)
    if not isinstance(found, tuple):
        return []
    product, weights, scores, finish = found
    shape = weights.softmax.shape[:-1]
    assert scores.product is not None  # as of all that is found
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
    said = {_SUNK: scores.sink is not None, _SCALED: scores.factors, _CLAMPED: scores.floor > -inf}
    beyond = next((why for why, met in said.items() if met), "")
    empty = empty_rows(weights, scores)
    return listed_attention(masks, operands, scores.scale, empty, beyond, partial(shows_one, assumed)) or []


def _reading(
    assumed: Assumed, root: Value, product: Value, weights: Weights, scores: Scores, finish: Finish
) -> Outcome | Miss | str:
    a, shape = assumed.algebra, weights.softmax.shape[:-1]
    if not 1 <= len(shape) <= 4:
        return (
            "scores of more than five dims; npu_fused_infer_attention_score requires [B, N, S, T]; "
            "flatten the first of them"
        )
    assert scores.product is not None  # as of all that is found
    if scores.product.shape[-1] != product.args[1].shape[-2]:
        return _REPEATED if scores.product.shape[-1] == 1 else _CUT
    attended = Attended.by(a, scores, product, weights)
    if attended is None:
        return APART
    odd: list[Miss | str] = []
    for frame in attended.frames(shape, scores.sink is not None):
        found = _framed(assumed, root, attended, frame, Parts(product, weights, scores, finish))
        if not isinstance(found, str) and not (isinstance(found, Miss) and found.rule == RULE):
            return found
        odd.append(found)
    return next((each for each in odd if each != APART), APART)


def _framed(assumed: Assumed, root: Value, attended: Attended, frame: Frame, of: Parts) -> Outcome | Miss | str:
    """What it is if the rows are those of a frame."""
    a, scores = assumed.algebra, of.scores
    found = operands_of(assumed, root, attended, frame, of)
    if not isinstance(found, tuple):
        return found
    operands, beside, (keys, width) = found
    captures: dict[str, Any] = {**operands, "scale": scores.scale}
    narrow = "q" in operands and operands["q"].dtype is not root.dtype
    widened = (("cast", (root.dtype,)),) if narrow and ("cast", (root.dtype,)) not in of.finish else ()
    steps = named_view(frame.sizes, of.weights, width, (*of.finish, *widened))
    if steps is None:
        return "the result is arranged by several symbolic sizes; compile it for static sizes of all but one of them"
    captures["output_view"] = steps
    if scores.sink is not None:
        sink = per_head(a, scores.sink, frame, attended.queries)
        if sink is None:
            return "the sink is not one number for each head; npu_fused_infer_attention_score requires [N]"
        captures["sink"] = sink
    in_floats = "q" in operands
    seen = _seen(assumed, of, frame, keys, operands["q"].dtype if in_floats else None)
    if isinstance(seen, Miss):
        return seen
    masks, mask = seen
    name = "softmax_attention" if in_floats else "int8_latent_attention"
    reading = Reading(name, captures | mask, masks.positions.names())
    listed = _lists(assumed, frame, keys, masks.terms, reading)
    if in_floats and mask.get("mask") not in listed:
        told = told_apart(a, reading)
        if told is not reading:
            one = frame.of_one_query()
            listed = _lists(assumed, one, keys, one.masked(a, masks.terms), told)
        reading = told
    return {**beside, root: reading, **listed}


def _lists(assumed: Assumed, frame: Frame, keys: Any, terms: Sequence[Term], reading: Reading) -> Outcome:
    """What the mask of an attention is if it lists keys."""
    mask = reading.captures.get("mask")
    masks = assumed.masks((*frame.shape, keys), terms, (*frame.sizes, keys), keep_lists=True)
    listed = {} if mask is None else topk_mask(masks, mask, assumed.sorted_by_scores)
    sink = reading.captures.get("sink")
    if sink is None:
        return dict(listed)
    lists = (each.captures["places"] for each in listed.values() if isinstance(each, Reading))
    return {places: Miss("sparse_attention", _SUNK, (sink,)) for places in lists}


def _seen(assumed: Assumed, of: Parts, frame: Frame, keys: Any, dtype: Any) -> tuple[Masks, dict[str, Any]] | Miss:
    """The masks of the scores, and what is said of them and of a bias; or why it cannot be said."""
    of_scores = (*frame.shape, keys), frame.masked(assumed.algebra, of.scores.terms), (*frame.sizes, keys)
    masks = assumed.masks(*of_scores)
    found = parted(masks)
    mask, bias = _told(assumed, found, frame, dtype, of)
    untold = mask.startswith((NOT_LOST, OF_HEADS)) if isinstance(mask, str) else isinstance(bias, str)
    whole = unparted(masks, dtype) if untold and masks.are_shared(of.empty) else None
    lowered = isinstance(mask, str) and mask.startswith(NOT_LOST)
    finite = lowered or of.scores.floor > -inf or (whole is not None and stays_finite(whole))
    if whole is not None and finite:  # numbers that are added are exact as a bias, whether they hide a key or not
        told = _told(assumed, whole, frame, dtype, of)
        fits = isinstance(told[1], dict) and (lowered or "empty_bias" not in told[1])
        found, (mask, bias) = (whole, told) if fits else (found, (mask, bias))
    if isinstance(mask, str):
        return missed(mask, of.product, found.masks.blamed().at)
    if isinstance(bias, dict):
        return found.masks, mask | bias | ({"fully_masked_row": "zero"} if "empty_bias" in bias else {})
    (_, term), *_ = found.biases
    why = unproven(term.mask, hides_by_truths(found.masks.positions, term))
    supposed = why
    if why == TRUTHS:
        supposed = assumed.masks(*of_scores, suppose=True).spec(of.empty)
    why = f"{why}; and {supposed}" if isinstance(supposed, str) and supposed != why else why
    return missed(f"{why}; {bias}", of.product, term.at)


def _told(assumed: Assumed, found: Parted, frame: Frame, dtype: Any, of: Parts) -> tuple[Any, Any]:
    """What is said of the masks, and of the bias beside them, {} without one; each a reason where it cannot be said."""
    floor = of.scores.floor
    mask = found.masks.spec(of.empty, bool(found.biases), found.over, floor)
    if isinstance(mask, str) or not found.biases:
        return mask, {}
    in_words = "mask" not in mask and any(mask.get(each) not in (None, "none") for each in ("mask_kind", *_LENGTHS))
    return mask, bias_of(assumed, found, frame, dtype, of.empty.of(-inf), in_words, floor)
