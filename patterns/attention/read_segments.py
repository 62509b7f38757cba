"""Sequences of different lengths, one after the other, that are attended to by themselves (Dao et al., 2022, "varlen").

    out = [attention(q[s₀:s₁], k[t₀:t₁], v[t₀:t₁]), attention(q[s₁:s₂], k[t₁:t₂], v[t₁:t₂]), ..]

A loop over segments of packed tokens is one call of the operator, which is told where each ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from fusion import reader
from fusion.graph import Algebra, Found, Graph, Reading, Value, but_ones
from fusion.graph.proof import must, proof, proven
from patterns.attention.words import SEGMENTED_ATTENTION

_VIEWS = ("permute", "reshape")
_ROWS = 2
"""The dim of queries [B, N, S, D]."""
_ALIKE = ("scale", "window", "sink", "fully_masked_row")
_OWN = ("count", "levels", "kv_len", "kv_lens", "bias")


@reader(gives=(SEGMENTED_ATTENTION,), needs=("softmax_attention",))
def segmented_attentions(graph: Graph) -> Iterator[Found]:
    """What is joined of attentions along their queries."""
    for value in graph.places:
        found = segmented(graph, value) if value.op == "cat" and len(value.args) > 1 else None
        if found is not None:
            yield value, found


@proof
def segmented(graph: Graph, joined: Value) -> Reading | None:
    """The segments of which a value joins the results, each with what it attends to."""
    a = graph.algebra
    parts = [proven(_part(graph, each)) for each in joined.args]
    first, every = parts[0].reading.captures, [each.reading.captures for each in parts]
    must(all(each.get(name) == first.get(name) for each in every for name in _ALIKE))
    must(all(each.get(name) is None for each in every for name in _OWN))
    ends, key_ends, value_ends = (proven(_ends([each[name] for each in every])) for name in ("q", "k", "v"))
    must(key_ends == value_ends)  # torch reads as many values as there are keys
    steps = proven(_steps([(each.plain, each.seen) for each in parts], _ROWS))
    must(steps.to == joined.attrs[0] and all(each.seen is steps.applied(a, each.plain) for each in parts))
    whole = {name: _joined(a, [each[name] for each in every]) for name in ("q", "k", "v")}
    captures = {name: first[name] for name in _ALIKE if name in first} | whole
    captures |= {"mask_kind": proven(_kind(every)), "kv_len": None, "ends": ends, "key_ends": key_ends}
    relied = frozenset[str]().union(*(each.reading.relies for each in parts))
    return Reading("segmented_attention", captures | {"output_view": steps.of(ends[-1])}, relied)


@dataclass(frozen=True)
class _Part:
    """Attention whose result is joined: what is read of it, its result [1, N, S, E], and how that is seen."""

    reading: Reading
    plain: Value
    seen: Value


@proof
def _part(graph: Graph, value: Value) -> _Part | None:
    """What a value that is joined is, if it is a result of attention, perhaps turned."""
    a, views = graph.algebra, list[Value]()
    while (reading := graph.readings.one(value, "softmax_attention")) is None:
        must(value.op in _VIEWS)
        views.append(value)
        value = value.arg
    q, v = reading.captures["q"], reading.captures["v"]
    plain = seen = a.make("attended", (value,), (), (*q.shape[:3], v.shape[3]), value.dtype)
    for op, how in reading.captures["output_view"]:
        must(op in _VIEWS and not any(isinstance(each, str) for each in how))
        seen = a.permute(seen, how) if op == "permute" else a.reshape(seen, how)
    for each in reversed(views):
        seen = a.seen_as(seen, each)
    return _Part(reading, plain, seen)


def _kind(every: Sequence[Mapping[str, Any]]) -> str | None:
    """What is seen in every segment; None where that differs, or a query may see nothing.

    Of one query and one key there is no order. The operator counts orders from the last key.
    """
    sizes = [(each["q"].shape[_ROWS], each["k"].shape[_ROWS]) for each in every]
    kinds = {each["mask_kind"] for each, size in zip(every, sizes, strict=True) if size != (1, 1)} or {"none"}
    told = {
        "none": True,
        "causal_lower_right": all(queries <= keys for queries, keys in sizes),
        "causal_upper_left": all(queries == keys for queries, keys in sizes),
    }
    kind = kinds.pop()
    return kind if not kinds and told.get(kind, False) else None


def _ends(parts: Sequence[Value]) -> tuple[int, ...] | None:
    """Where each part of packed tokens ends; None of several sequences, or of lengths that are not known, or are 0."""
    sizes: list[Any] = [each.shape[_ROWS] for each in parts]
    packed = all(each.rank == 4 and each.shape[0] == 1 for each in parts)
    return tuple(accumulate(sizes)) if packed and all(isinstance(each, int) and each for each in sizes) else None


def _joined(a: Algebra, parts: Sequence[Value]) -> Value:
    """Parts [1, N, S, D] one behind the other: what they are cut from, or joined anew."""
    return _uncut(a, parts) or a.cat(parts, _ROWS)


@proof
def _uncut(a: Algebra, parts: Sequence[Value]) -> Value | None:
    """What parts are cut from, each where the one before it ends."""
    ends = list(accumulate(each.shape[_ROWS] for each in parts))
    cuts = zip(parts, [0, *ends], strict=False)
    cut, before = proven(next((each for each in cuts if each[0].op == "slice" and each[0].attrs[0] == _ROWS), None))
    start = cut.attrs[1] - before
    must(start >= 0 and all(_is_cut(a, cut.arg, start + end, part) for part, end in zip(parts, ends, strict=True)))
    return a.cut(cut.arg, _ROWS, start, start + ends[-1])


def _is_cut(a: Algebra, whole: Value, end: int, part: Value) -> bool:
    """Whether a part is the rows before `end` of what it is cut from; one row is cut before it was turned as well."""
    size: Any = part.shape[_ROWS]
    axis = _ROWS
    if a.cut(whole, axis, end - size, end) is part:
        return True
    while size == 1 and whole.op in _VIEWS:
        if whole.op == "reshape":
            if but_ones(whole.shape) != but_ones(whole.arg.shape) or whole.shape[axis] == 1:
                return False
            axis = _places(whole.arg)[len(but_ones(whole.shape[:axis]))]
        else:
            axis = whole.attrs[axis]
        whole = whole.arg
        if a.reshape(a.cut(whole, axis, end - 1, end), part.shape) is part:
            return True
    return False


@dataclass(frozen=True)
class _Steps:
    """How a tensor is turned, whatever the size of one dim is, `rows` below and `to` above: reshapes say it by None."""

    steps: tuple[tuple[str, tuple[Any, ...]], ...]
    rows: int
    to: int

    def of(self, size: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """The steps for so many rows."""
        return tuple((op, tuple(size if each is None else each for each in how)) for op, how in self.steps)

    def applied(self, a: Algebra, plain: Value) -> Value:
        """What they make of a tensor."""
        for op, how in self.of(plain.shape[self.rows]):
            plain = a.permute(plain, how) if op == "permute" else a.reshape(plain, how)
        return plain


@proof
def _steps(turned: Sequence[tuple[Value, Value]], rows: int) -> _Steps | None:
    """The steps from tensors to how they are seen, by the first with more rows than one; None where dims are joined."""
    plain, seen = proven(next((both for both in turned if both[0].shape[rows] != 1), None))
    views = [seen]
    while views[-1] is not plain:
        must(views[-1].op in _VIEWS)
        views.append(views[-1].arg)
    to, steps = rows, list[tuple[str, tuple[Any, ...]]]()
    for below, view in pairwise(reversed(views)):
        if view.op == "permute":
            to = view.attrs.index(to)
            steps.append(("permute", view.attrs))
            continue
        must(but_ones(below.shape) == but_ones(view.shape))
        number = len(but_ones(below.shape[:to]))
        to = _places(view)[number]
        steps.append(("reshape", (*view.shape[:to], None, *view.shape[to + 1 :])))
    return _Steps(tuple(steps), rows, to)


def _places(x: Value) -> list[int]:
    """The dims of more than one entry."""
    return [place for place, size in enumerate(x.shape) if size != 1]
