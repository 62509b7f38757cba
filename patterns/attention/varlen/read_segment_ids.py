"""Packed tokens that see the tokens of their own segment, where segment ids are data (from cu_seqlens).

    seen[i, j] = segment[i] == segment[j] (and j ≤ i)        segment[i] = number of bounds ≤ i, and similar forms

If segment ids never decrease along the tokens, each segment is contiguous: the attention is one call of the operator in
layout TND with the end of each segment. Ids that may decrease are left to the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from fusion import reader
from fusion.analysis.rounding import unscaled
from fusion.graph import Algebra, Annotation, Graph, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.varlen.segment_orders import ROWS
from patterns.attention.words import NUMBERED_ATTENTION

_OWN = ("count", "levels", "kv_len", "kv_lens", "bias", "window", "mixed")
_REPEATED = "aten.repeat_interleave.Tensor"


@reader(gives=(NUMBERED_ATTENTION,), needs=("softmax_attention",))
def segment_id_attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every attention under a block-diagonal mask made from segment ids, as `numbered_attention`."""
    for value, attention in list(graph.readings.all("softmax_attention")):
        reading = _by_segment_ids(graph, attention)
        if reading is not None:
            yield value, reading


@proof
def _by_segment_ids(graph: Graph, attention: Reading) -> Reading | None:
    captures, a = attention.captures, graph.algebra
    mask, (q, k) = captures.get("mask"), (captures["q"], captures["k"])
    must(captures["mask_kind"] == "dense")
    must(all(captures.get(name) is None for name in _OWN))
    tokens = q.shape[ROWS]
    must(q.shape[0] == k.shape[0] == 1 and k.shape[ROWS] == tokens)
    kind, segment = proven(_blocks(a, proven(mask), tokens))
    count = proven(segments_below(segment))
    ids = next((each for each in graph.places if _line(a, each, tokens) is segment), None)
    unchanged = {name: captures[name] for name in ("q", "k", "v", "scale", "sink", "output_view") if name in captures}
    how = {"mask_kind": kind, "window": None, "kv_len": None, "fully_masked_row": "zero"}  # each token sees itself
    return Reading(
        "numbered_attention", {**unchanged, **how, "segment": proven(ids), "segments": count}, attention.relies
    )


@proof
def _blocks(a: Algebra, mask: Value, tokens: Any) -> tuple[str, Value]:
    """Return the order within segments, and the segment ids [T], of a `mask` that is true where a key is hidden.

    T is `tokens`. The order is "none" or "causal_lower_right". Unproven for other masks.
    """
    hidden = mask.below("reshape", "expand")
    must(prod(mask.shape) == tokens * tokens)
    if (hidden.op, hidden.attrs) == ("compare", ("ne",)):
        return "none", proven(_both(a, hidden, tokens))
    must(hidden.op == "not")
    visible = hidden.arg.below("reshape", "expand")
    if visible.op == "and":
        parts = [each.below("reshape", "expand") for each in visible.args]
        causal = [_is_causal(each, tokens) for each in parts]
        must(sorted(causal) == [False, True])
        return "causal_lower_right", proven(_both(a, parts[causal.index(False)], tokens))
    return "none", proven(_both(a, visible, tokens))


@proof
def _both(a: Algebra, compared: Value, tokens: Any) -> Value | None:
    """Return the segment ids [T] if `compared` compares them along rows with themselves along columns; else None.

    T is `tokens`; the op is == or !=.
    """
    must(compared.op == "compare" and compared.attrs in (("eq",), ("ne",)))
    x, y = compared.args
    must(_run(x, tokens) != _run(y, tokens))  # one along the rows, one along the columns
    line = _line(a, x, tokens)
    return line if line is not None and line is _line(a, y, tokens) else None


def _run(x: Value, tokens: Any) -> bool:
    """Return True if the last dim of `x` has one entry for each of several `tokens`: `x` has ids along columns."""
    return x.shape[-1:] == (tokens,) and tokens != 1


def _line(a: Algebra, x: Value, tokens: Any) -> Value | None:
    """Reshape `x`, one number for each of `tokens` tokens, to [T], with its slices and scales after the reshape.

    None if `x` has another number of elements.
    """
    if prod(x.shape) != tokens:
        return None
    match x.op:
        case "scale":
            below = _line(a, x.arg, tokens)
            return below and a.scale(below, *x.attrs)
        case "slice":
            axis, *cut = x.attrs
            below = _line(a, x.arg, x.arg.shape[axis])
            return below and a.cut(below, 0, *cut[:2]) if cut[2:] in ([], [1]) else None
        case _:
            return a.reshape(x, (tokens,))


def _is_causal(compared: Value, tokens: Any) -> bool:
    """Return True if `compared` is key position ≤ query position, for T = `tokens` positions 0, 1, … of each.

    Both come from one arange, keys along the last dim.
    """
    if (compared.op, compared.attrs) != ("compare", ("le",)):
        return False
    key, query = compared.args
    alike = key.below("reshape") is query.below("reshape") and _ascends(key.below("reshape"))
    return alike and _run(key, tokens) and not _run(query, tokens)


def _ascends(x: Value) -> bool:
    return x.op == "arange" and x.attrs[1] > 0


@proof
def segments_below(segment: Value) -> int | None:
    """Return a bound above all segment ids, if `segment` is proven nonnegative and nondecreasing; else None."""
    x = segment.below("reshape", "cast")
    x = x.arg.below("reshape", "cast") if x.op == "slice" and x.arg.below("reshape", "cast").op == "cumsum" else x
    must(x.dtype is not None and not x.dtype.is_floating_point)
    match x.op:
        case "scale" | "mean":
            counted, number = unscaled(x)
            return _counted(counted.below("reshape"), number)
        case "searchsorted":
            bounds, numbers = x.args
            must(bounds.rank == 1 and _ascends(numbers.below("reshape", "cast")))
            return _known(bounds.shape[0] + 1)
        case "cumsum":
            marks = x.arg.below("reshape", "cast")
            must(marks.op == "add_rows" and x.rank == 1)
            none, each, _ = marks.args
            must((none.op, none.attrs) == ("full", (0,)) and _is_one(each))
            return _known(prod(each.shape) + 1)
        case "index":
            numbers, repeated = x.args[0], x.args[1].below("reshape", "cast")
            must((numbers.op, numbers.attrs) == ("arange", (0, 1)) and repeated.op == _REPEATED)
            return _known(prod(repeated.arg.shape))
        case _:
            must(x.op == _REPEATED)
            return _known(prod(x.arg.shape))


def _known(count: Any) -> int | None:
    return count if isinstance(count, int) else None


def _is_one(marks: Value) -> bool:
    below = marks.below("expand", "reshape", "cast")
    return (below.op, below.attrs) in (("full", (1,)), ("full", (1.0,)))


@proof
def _counted(mean: Value, bounds: float) -> int | None:
    """Return an exclusive upper bound of the segment ids `mean` · `bounds`, ids found by counting bounds.

    `mean` must be the share of a list of `bounds` bounds that are ≤, or <, a token's position; else unproven.
    """
    must(mean.op == "mean" and mean.attrs in ((-1,), (mean.arg.rank - 1,)))
    truths = mean.arg.below("cast")
    must(truths.op == "compare" and truths.attrs in (("le",), ("lt",)))
    listed, positions = truths.args
    must(listed.shape[-1:] == truths.shape[-1:] == (prod(listed.shape),) == (bounds,))  # one list for all tokens
    must(positions.shape[-1:] == (1,) and prod(positions.shape) == prod(mean.shape))
    must(_ascends(positions.below("reshape", "cast")))
    return _known(truths.shape[-1] + 1)
