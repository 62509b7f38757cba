"""Packed tokens that see the tokens of their own segment, where data says which segment each is of (cu_seqlens).

    seen[i, j] = segment[i] == segment[j] (and j ≤ i)        segment[i] = how many bounds are at most i, and the like

As a number that never falls along the tokens, each segment is a run of them: one call of the operator in TND, told
where each ends. Numbers that may fall again are left to the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from fusion import reader
from fusion.analysis.rounding import unscaled
from fusion.graph import Algebra, Found, Graph, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.attention.words import NUMBERED_ATTENTION

_TOKENS = 2
"""The dim of queries [B, N, S, D] and of keys."""
_OWN = ("count", "levels", "kv_len", "kv_lens", "bias", "window", "mixed")
_REPEATED = "aten.repeat_interleave.Tensor"


@reader(gives=(NUMBERED_ATTENTION,), needs=("softmax_attention",))
def numbered_attentions(graph: Graph) -> Iterator[Found]:
    """Attention behind a mask of blocks along the diagonal, of which data says where they end."""
    for value, attention in list(graph.readings.all("softmax_attention")):
        found = _numbered(graph, attention)
        if found is not None:
            yield value, found


@proof
def _numbered(graph: Graph, attention: Reading) -> Reading | None:
    said, a = attention.captures, graph.algebra
    mask, (q, k) = said.get("mask"), (said["q"], said["k"])
    must(said["mask_kind"] == "dense")
    must(all(said.get(name) is None for name in _OWN))
    tokens = q.shape[_TOKENS]
    must(q.shape[0] == k.shape[0] == 1 and k.shape[_TOKENS] == tokens)
    kind, segment = proven(_blocks(a, proven(mask), tokens))
    count = proven(segments_below(segment))
    held = next((each for each in graph.places if _line(a, each, tokens) is segment), None)
    kept = {name: said[name] for name in ("q", "k", "v", "scale", "sink", "output_view") if name in said}
    how = {"mask_kind": kind, "window": None, "kv_len": None, "fully_masked_row": "zero"}  # each token sees itself
    return Reading("numbered_attention", {**kept, **how, "segment": proven(held), "segments": count}, attention.relies)


@proof
def _blocks(a: Algebra, mask: Value, tokens: Any) -> tuple[str, Value]:
    """Which order there is within segments, and the numbers of tokens [T], of a mask true where a key is hidden."""
    hidden = mask.below("reshape", "expand")
    must(prod(mask.shape) == tokens * tokens)
    if (hidden.op, hidden.attrs) == ("compare", ("ne",)):
        return "none", proven(_both(a, hidden, tokens))
    must(hidden.op == "not")
    seen = hidden.arg.below("reshape", "expand")
    if seen.op == "and":
        parts = [each.below("reshape", "expand") for each in seen.args]
        causal = [_is_causal(each, tokens) for each in parts]
        must(sorted(causal) == [False, True])
        return "causal_lower_right", proven(_both(a, parts[causal.index(False)], tokens))
    return "none", proven(_both(a, seen, tokens))


@proof
def _both(a: Algebra, compared: Value, tokens: Any) -> Value | None:
    """The numbers [T] of which one says the row and one the column; None where they are not the same."""
    must(compared.op == "compare" and compared.attrs in (("eq",), ("ne",)))
    x, y = compared.args
    must(_run(x, tokens) != _run(y, tokens))  # one along the rows, one along the columns
    line = _line(a, x, tokens)
    return line if line is not None and line is _line(a, y, tokens) else None


def _run(x: Value, tokens: Any) -> bool:
    """Whether numbers run along the columns."""
    return x.shape[-1:] == (tokens,) and tokens != 1


def _line(a: Algebra, x: Value, tokens: Any) -> Value | None:
    """Numbers of each token as one line [T], however they are seen."""
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
    """Whether keys are compared so that those up to the query are seen."""
    if (compared.op, compared.attrs) != ("compare", ("le",)):
        return False
    key, query = compared.args
    alike = key.below("reshape") is query.below("reshape") and _ascends(key.below("reshape"))
    return alike and _run(key, tokens) and not _run(query, tokens)


def _ascends(x: Value) -> bool:
    return x.op == "arange" and x.attrs[1] > 0


@proof
def segments_below(segment: Value) -> int | None:
    """Return a bound above the numbers of a line, if these are proven to be never negative and never to fall."""
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
    """One more than so many bounds, of which those are counted that are at most, or below, the position of a token."""
    must(mean.op == "mean" and mean.attrs in ((-1,), (mean.arg.rank - 1,)))
    truths = mean.arg.below("cast")
    must(truths.op == "compare" and truths.attrs in (("le",), ("lt",)))
    listed, positions = truths.args
    must(listed.shape[-1:] == truths.shape[-1:] == (prod(listed.shape),) == (bounds,))  # the same for all tokens
    must(positions.shape[-1:] == (1,) and prod(positions.shape) == prod(mean.shape))
    must(_ascends(positions.below("reshape", "cast")))
    return _known(truths.shape[-1] + 1)
