"""The reader of softmax attention in any layout, from its products: out = softmax(scale · q kᵀ + mask) v.

It starts from an `attention_core`. Each assignment of the rows to sequences, heads and queries (`frames`) is tried:
`operands`, `masks`, the bias (`read_bias`) and the `output_view`. A kind of attention with other operands is read the
same way, by a function of its own for these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

from fusion import reader
from fusion.graph import Annotation, Graph, Miss, Reading, Value
from patterns.attention.core.core import Core
from patterns.attention.core.frames import Attended, Frame, per_head
from patterns.attention.core.operands import APART, SEVERAL, Operands, Outcome, heads_of, in_floats
from patterns.attention.core.output_view import named_view
from patterns.attention.core.places import is_one_call
from patterns.attention.core.row_heads import rows_as_heads
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term, hides_by_truths
from patterns.attention.masks.masks import NOT_LOST, OF_HEADS, Masks
from patterns.attention.masks.read_bias import GUARDED, Parted, bias_of, parted, stays_finite, unparted
from patterns.attention.reasons.blame import RULE, TRUTHS, missed, unproven
from patterns.attention.words import ATTENTION_MASK, SOFTMAX_ATTENTION

_REPEATED = (
    "scores: one of them is repeated for several keys; npu_fused_infer_attention_score requires a product "
    "of query and key for each key; repeat the keys in place of the scores"
)
_CUT = (
    "weights: columns are cut off behind the softmax that are no sink in the last column; "
    "npu_fused_infer_attention_score_v2 requires the weights of all keys; write torch.cat([scores, sink], "
    "-1).softmax(-1)[..., :-1]"
)
_VALUED = (
    "sink: it has a value of its own; npu_fused_infer_attention_score_v2 requires a sink without one; cut "
    "its column off the weights"
)
_OTHERS = (None, APART, _REPEATED, SEVERAL)
"""Outcomes for a product that is not q kᵀ, after which another addend of the scores is tried as q kᵀ."""
_LENGTHS = ("window", "kv_len", "kv_lens")


@reader(gives=(SOFTMAX_ATTENTION, ATTENTION_MASK), needs=("attention_core",))
def attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every `attention_core` in floats as `softmax_attention` with its `attention_mask`; else report why not."""
    assumed = Assumed.of(graph)
    for value, cores in cores_by_value(graph):
        outcome = read_attention(assumed, cores)
        reading = outcome.get(cores[0].root) if isinstance(outcome, dict) else None
        if isinstance(reading, Reading) and "empty_bias" in reading.captures and is_one_call(graph, value):
            bias = reading.captures["bias"].below("reshape", "expand")
            positions = assumed.masks(bias.shape, (), (1, 1, 1, 1)).positions
            why = unproven(bias, hides_by_truths(positions, Term("add", bias)))
            outcome = missed(f"{why}; {GUARDED}", value, (bias,))
        yield from annotated(value, cores[0], outcome)


def cores_by_value(graph: Graph) -> list[tuple[Value, list[Core]]]:
    """List each value that has an `attention_core` with its cores, the likeliest first."""
    cores: dict[Value, list[Core]] = {}
    for value, reading in graph.readings.all("attention_core"):
        cores.setdefault(value, []).append(reading.captures["core"])
    return list(cores.items())


def annotated(value: Value, core: Core, outcome: Outcome | Miss | None) -> Iterator[Annotation]:
    """Yield `outcome`, the readings or the `Miss` of `core`, with `value` in the place of the equal `core.root`."""
    if isinstance(outcome, Miss):
        yield value, outcome if core.root is value else replace(outcome, of=value)
    elif outcome:
        yield from ((value if each is core.root else each, reading) for each, reading in outcome.items())


def read_attention(
    assumed: Assumed, cores: Sequence[Core], word: str = "softmax_attention", operands: Operands = in_floats
) -> Outcome | Miss | None:
    """Read the first of `cores` that is attention as `word`, with its mask; a miss says why none is.

    Args:
        assumed: facts about the graph.
        cores: the cores of one value, the likeliest first.
        word: the word of the reading.
        operands: reads the captures for queries, keys and values.

    Returns:
        The readings; None if nothing looks like attention with such operands.
    """
    outcome: Outcome | Miss | str | None = None
    for core in cores:
        latest = _read(assumed, core, word, operands)
        outcome = latest if core is cores[0] or latest not in _OTHERS else outcome
        if outcome not in _OTHERS:
            break
    return missed(outcome, cores[0].product) if isinstance(outcome, str) else outcome


def why_not_scores(core: Core) -> Miss | str | None:
    """Return why the scores of `core` are not scale · q kᵀ with masks; "" if they are, None if nothing looks like
    them.
    """
    scores, weights = core.scores, core.weights
    if scores.product is None:
        return missed(scores.reason, core.product, scores.at) if scores.reason else None
    if not scores.scale or not isfinite(scores.scale):
        return (
            f"scores: they are multiplied by {scores.scale:g} behind a mask; npu_fused_infer_attention_score "
            "requires a positive finite factor, as hidden and visible scores must differ"
        )
    if weights.cut != (scores.sink is not None):
        return _CUT if weights.cut else _VALUED
    return ""


def _read(assumed: Assumed, core: Core, word: str, operands: Operands) -> Outcome | Miss | str | None:
    """Read `core` in the first frame of its rows that fits; the first reason if none does."""
    reason = why_not_scores(core)
    if reason != "":
        return reason
    shape, scores = core.weights.softmax.shape[:-1], core.scores
    if not 1 <= len(shape) <= 4:
        return (
            "scores: they have more than five dims; npu_fused_infer_attention_score requires [B, N, S, T]; "
            "flatten the leading dims"
        )
    assert scores.product is not None  # `why_not_scores` lets no others pass
    if scores.product.shape[-1] != core.product.args[1].shape[-2]:
        return _REPEATED if scores.product.shape[-1] == 1 else _CUT
    attended = Attended.by(assumed.algebra, scores, core.product, core.weights)
    if attended is None:
        return APART
    reasons: list[Miss | str | None] = []
    for frame in attended.frames(shape, scores.sink is not None):
        outcome = _framed(assumed, core, attended, frame, word, operands)
        if isinstance(outcome, dict) or (isinstance(outcome, Miss) and outcome.rule != RULE):
            return outcome
        reasons.append(outcome)
    return next((each for each in reasons if each != APART), APART)


def _framed(
    assumed: Assumed, core: Core, attended: Attended, frame: Frame, word: str, operands: Operands
) -> Outcome | Miss | str | None:
    """Read `core` as `word`, with its rows split into sequences, heads and queries as `frame`.

    `attended` are queries, keys and values, of which `operands` reads the captures. Returns a `Miss`, or the reason for
    one, if that is no attention; None if it does not look like one.
    """
    a, scores, root = assumed.algebra, core.scores, core.root
    heads = heads_of(a, attended, frame, core)
    if isinstance(heads, str):
        return heads
    read = operands(assumed, core, frame, *heads)
    if not isinstance(read, tuple):
        return read
    captures: dict[str, Any] = {**read[0], "scale": scores.scale}
    keys, width = heads[1].shape[2], heads[2].shape[-1]
    narrow = "q" in captures and captures["q"].dtype is not root.dtype
    widened = (("cast", (root.dtype,)),) if narrow and ("cast", (root.dtype,)) not in core.finish else ()
    steps = named_view(frame.sizes, core.weights, width, (*core.finish, *widened))
    if steps is None:
        return (
            "result: it is reshaped by several symbolic sizes; a rewrite requires one at most; compile for "
            "static sizes of all but one"
        )
    captures["output_view"] = steps
    if scores.sink is not None:
        sink = per_head(a, scores.sink, frame, attended.queries)
        if sink is None:
            return "sink: it is not one number for each head; npu_fused_infer_attention_score_v2 requires [N]"
        captures["sink"] = sink
    queries = captures.get("q")
    seen = _masks(assumed, core, frame, keys, None if queries is None else queries.dtype)
    if isinstance(seen, Miss):
        return seen
    masks, mask = seen
    reading = Reading(word, captures | mask, masks.positions.names())
    terms: Sequence[Term] = masks.terms
    if queries is not None and (by_heads := rows_as_heads(a, reading)) is not reading:
        frame, reading = frame.with_one_query(), by_heads
        terms = frame.aligned_terms(a, terms)
    shown = {"frame": frame, "terms": tuple(terms), "keys": keys, "sink": captures.get("sink")}
    dense = reading.captures.get("mask")
    return {**read[1], root: reading} | ({} if dense is None else {dense: Reading("attention_mask", shown)})


def _masks(assumed: Assumed, core: Core, frame: Frame, keys: Any, dtype: Any) -> tuple[Masks, dict[str, Any]] | Miss:
    """Describe the masks and the bias of the scores of `core` with the rows of `frame`.

    Args:
        assumed: the graph, with the assumptions on masks that are passed in.
        core: the product, weights and scores of the attention.
        frame: which dims of the rows are sequences, heads and queries.
        keys: T.
        dtype: the dtype of the queries; None for int8.

    Returns:
        The masks, and the captures for masks and bias; a miss if these cannot be described.
    """
    scores = (*frame.shape, keys), frame.aligned_terms(assumed.algebra, core.scores.terms), (*frame.sizes, keys)
    masks = assumed.masks(*scores)
    split = parted(masks)
    mask, bias = _described(assumed, split, frame, dtype, core)
    is_unknown = mask.startswith((NOT_LOST, OF_HEADS)) if isinstance(mask, str) else isinstance(bias, str)
    joint = unparted(assumed, masks, dtype) if is_unknown and masks.are_shared(core.empty) else None
    lowered = isinstance(mask, str) and mask.startswith(NOT_LOST)
    finite = lowered or core.scores.floor > -inf or (joint is not None and stays_finite(joint))
    if joint is not None and finite:  # numbers that are added are exact as a bias, whether they hide a key or not
        described = _described(assumed, joint, frame, dtype, core)
        fits = isinstance(described[1], dict) and (lowered or "empty_bias" not in described[1])
        split, (mask, bias) = (joint, described) if fits else (split, (mask, bias))
    if isinstance(mask, str):
        return missed(mask, core.product, split.masks.blamed().at)
    if isinstance(bias, dict):
        return split.masks, mask | bias | ({"fully_masked_row": "zero"} if "empty_bias" in bias else {})
    (_, term), *_ = split.biases
    why = unproven(term.mask, hides_by_truths(split.masks.positions, term))
    supposed = why
    if why == TRUTHS:
        supposed = assumed.masks(*scores, suppose=True).spec(core.empty)
    why = f"{why}; and {supposed}" if isinstance(supposed, str) and supposed != why else why
    return missed(f"{why}; {bias}", core.product, term.at)


def _described(assumed: Assumed, split: Parted, frame: Frame, dtype: Any, core: Core) -> tuple[Any, Any]:
    """Return the captures of the masks, and those of the bias.

    Either is a string, the reason, if it cannot be described; the second is {} if there is no bias or the first is a
    string.

    Args:
        assumed: the graph, with the assumptions on masks that are passed in.
        split: the masks and biases of the scores.
        frame: which dims of the rows are sequences, heads and queries.
        dtype: the dtype of the queries; None for int8.
        core: the product, weights and scores of the attention.
    """
    floor = core.scores.floor
    mask = split.masks.spec(core.empty, bool(split.biases), split.over, floor)
    if isinstance(mask, str) or not split.biases:
        return mask, {}
    structured = "mask" not in mask and any(mask.get(each) not in (None, "none") for each in ("mask_kind", *_LENGTHS))
    return mask, bias_of(assumed, split, frame, dtype, core.empty.of(-inf), structured, floor)
