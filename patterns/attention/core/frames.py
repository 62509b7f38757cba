"""The rows of scores as sequences, heads and queries: which dims of the softmax are which.

[B, N, S]    [B, M, G, S]              as they stand
[S]    [N, S]    [M, G, S]             without a batch, where keys are repeated for heads or a sink is given to each
[B, N]    [B, M, G]    [M, G]    [N]   one query of each head, without a dim for it
[B · N, S]                             heads of all sequences in one dim
[B, X, N, S]                           several sequences of each batch: blocks, rows of an alignment, streams
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.repetition import unrepeated
from fusion.analysis.row_layout import Arrangement, Dims, arranged, arrangement, carried, once
from fusion.graph import Algebra, Value
from fusion.graph.algebra import widens
from fusion.graph.contractions import swapped
from fusion.graph.logic import number
from patterns.attention.core.row_heads import in_groups
from patterns.attention.core.scores import Scores
from patterns.attention.core.weights import Weights
from patterns.attention.masks.mask_terms import Term

NO_ROWS: Dims = ((),)
"""A dim of size 1 that no row has."""


@dataclass(frozen=True)
class Frame:
    """Rows [batch, *heads, queries] of a softmax.

    Attributes:
        shape: their sizes.
        scores, weights: each dim as a run of atoms, of the rows of the scores and of those of the weights.
        one_query: whether the last dim was added.
        opened: how many of the first dims were one, the first, of the softmax.
        joined: the sizes of those of its first dims that are one.
    """

    shape: tuple[Any, ...]
    scores: Dims
    weights: Dims
    one_query: bool = False
    opened: int = 1
    joined: tuple[Any, ...] = ()

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """B, N and S."""
        return self.shape[0], prod(self.shape[1:-1]), self.shape[-1]

    def unbatched(self, count: int = 1) -> Frame:
        """The same behind so many dims of size 1."""
        lead = NO_ROWS * count
        return replace(self, shape=(1,) * count + self.shape, scores=lead + self.scores, weights=lead + self.weights)

    def of_several_sequences(self) -> Frame:
        """The same of the first two dims as one."""
        (x, y, *scores), (u, v, *weights) = self.scores, self.weights
        shape = (self.shape[0] * self.shape[1], *self.shape[2:])
        return Frame(shape, (x + y, *scores), (u + v, *weights), joined=self.shape[:2])

    def of_one_query(self) -> Frame:
        """The same of heads, each with one query."""
        scores, weights = self.scores + NO_ROWS, self.weights + NO_ROWS
        return Frame((*self.shape, 1), scores, weights, one_query=True)

    def seen(self, a: Algebra, x: Value) -> Value:
        """What broadcasts to scores [*rows, T], with the dim for one query if it was added, and all that were one."""
        if self.joined and x.rank > len(self.shape):
            apart = (*(1,) * (len(self.shape) + 2 - x.rank), *x.shape)
            lead = apart[:2] if apart[:2] == (1, 1) else self.joined
            return a.reshape(a.expand(a.reshape(x, apart), (*lead, *apart[2:])), (prod(lead), *apart[2:]))
        if x.rank == len(self.shape) + 2 - self.opened and x.shape[0] != 1:
            return a.reshape(x, (*self.shape[: self.opened], *x.shape[1:]))
        return a.reshape(x, (*x.shape[:-1], 1, *x.shape[-1:])) if self.one_query else x

    def masked(self, a: Algebra, terms: Sequence[Term]) -> list[Term]:
        """Masks of scores [*rows, T] with these dims."""
        return [replace(each, mask=self.seen(a, each.mask)) for each in terms]


@dataclass(frozen=True)
class Attended:
    """What the rows of scores are read from: queries, keys, values, and how both products are arranged."""

    a: Algebra
    queries: Value
    keys: Value
    values: Value
    to: Arrangement
    of: Arrangement

    @classmethod
    def by(cls, a: Algebra, scores: Scores, product: Value, weights: Weights) -> Attended | None:
        """Of the products of queries and keys, and of weights and values."""
        assert scores.product is not None
        rows, queries = scores.product.shape[:-1], scores.product.arg
        to = arrangement(rows, scores.steps)
        keys = swapped(a, scores.product.args[1])
        if to is None:
            return None
        queries = arranged(a, a.expand(queries, (*rows, queries.shape[-1])), scores.steps)
        return cls(a, queries, keys, _of_lanes(a, product.args[1], keys), to, weights.rows)

    def frames(self, shape: Sequence[Any], sunk: bool) -> Iterator[Frame]:
        """The ways to read rows of this shape, the likeliest first."""
        plain = self.plain(shape)
        if len(shape) == 1:
            yield plain.unbatched(2)
            yield plain.unbatched().of_one_query()
            return
        if len(shape) in (2, 3) and self.queries.shape[:-1] == tuple(shape) and in_groups(self.queries):
            yield plain.of_one_query().unbatched(3 - len(shape))
        if len(shape) == 2:
            opened = self._opened(plain)
            yield from () if opened is None else (opened,)
            yield from (plain.unbatched(),) if self._is_repeated(plain) else ()
        yield plain
        if len(shape) == 4:
            yield plain.of_several_sequences()
        if len(shape) == 2:
            yield plain.of_one_query()
        if sunk:
            yield plain.unbatched()

    def plain(self, shape: Sequence[Any]) -> Frame:
        """The dims of the softmax as they stand."""
        return Frame(tuple(shape), self.to.after, self.of.before)

    def _is_repeated(self, frame: Frame) -> bool:
        """Whether several sequences [X, S] have the same keys: these are heads."""
        both = (each for each in self.keys_and_values(frame) if each is not None)
        return any(unrepeated(self.a, each, 0)[1] != 1 for each in both)

    def _opened(self, frame: Frame) -> Frame | None:
        """Rows [B · N, S] as [B, N, S], where both products have them so; of one dim there is no telling."""
        rows, own = frame.scores[0], frame.weights[0]
        lead = tuple(self.to.sizes[atom] for atom in rows)
        if not 1 < len(lead) < 4 or lead != tuple(self.of.sizes[atom] for atom in own):
            return None
        scores, weights = (tuple((atom,) for atom in each) for each in (rows, own))
        shape = (*lead, *frame.shape[1:])
        return Frame(shape, scores + frame.scores[1:], weights + frame.weights[1:], opened=len(lead))

    def keys_and_values(self, frame: Frame) -> list[Value | None]:
        """Keys [B, M, T, D] and values [B, M, T, E] for the rows of a frame."""
        keys = self._heads(self.keys, self.to, self.to.before, frame.scores)
        return [keys, self._heads(self.values, self.of, self.of.after, frame.weights)]

    def _heads(self, kv: Value, rows: Arrangement, own: Dims, wanted: Dims) -> Value | None:
        """Keys or values with the batch dims `own` as [B, M, T, D], each of the M heads once."""
        a = self.a
        dims = (*(1,) * (len(own) + 1 - kv.rank), *kv.shape[:-2], 1, *kv.shape[-2:])  # one for rows, what broadcasts
        placed = carried(a, a.reshape(kv, dims), rows, own, wanted)
        if placed is None:
            return None
        ends = [len(wanted[0]), sum(map(len, wanted[:-1]))]
        full = [rows.sizes[atom] for run in wanted for atom in run]
        lead, last = list(placed.shape[:-2]), placed.shape[-2:]
        if any(size != 1 for size in lead[ends[1] :]):
            return None
        shared = all(size == 1 for size in lead[: ends[0]])
        batch = lead[: ends[0]] if shared else full[: ends[0]]
        heads = _common(lead[ends[0] : ends[1]], full[ends[0] : ends[1]])
        open_ = a.expand(placed, (*batch, *heads, *lead[ends[1] :], *last))
        kv = once(a, a.reshape(open_, (prod(batch), prod(heads), *last)))
        return a.expand(kv, (prod(full[: ends[0]]), *kv.shape[1:]))


_SEEN = ("reshape", "permute", "expand", "cast")


def _of_lanes(a: Algebra, values: Value, keys: Value) -> Value:
    """Values that are gathered from lanes of what keys are gathered from, by the same places, as lanes of the keys."""
    if values.op in _SEEN:
        below = _of_lanes(a, values.arg, keys)
        if below is values.arg:
            return values
        return a.cast(below, values.dtype) if values.op == "cast" else a.seen_as(below, values)
    if values.op != "index":
        return values
    lanes = values.arg
    if lanes.op != "slice" or lanes.attrs[0] != lanes.rank - 1 or lanes.attrs[0] in values.attrs:
        return values
    shape = (*values.shape[:-1], lanes.arg.shape[-1])
    rows = a.make("index", (lanes.arg, *values.args[1:]), values.attrs, shape, values.dtype)
    return a.cut(rows, -1, *lanes.attrs[1:]) if keys.below(*_SEEN, "slice") is rows else values


def _common(lead: Sequence[Any], full: Sequence[Any]) -> list[Any]:
    """The sizes of dims of which only the last may be shared, so that neighbours share: others are repeated."""
    own = next((place for place in reversed(range(len(lead))) if lead[place] != 1), -1)
    return [*full[: own + 1], *lead[own + 1 :]]


def per_head(a: Algebra, sink: Value, frame: Frame, beside: Value) -> Value | None:
    """Return the numbers [N] of `sink`, which is repeated for all rows; None where it differs within a head.

    A number that no tensor holds is one of the device of `beside`.
    """
    heads = frame.sizes[1]
    while sink.op == "expand" or is_rounding(sink):
        sink = sink.arg
    if sink.op == "full":
        zero = a.cast(number(a, 0, beside), sink.dtype)
        return a.expand(a.shift(a.reshape(zero, (1,)), sink.attrs[0]), (heads,))
    if prod(sink.shape) == 1:
        return a.expand(a.reshape(sink, (1,)), (heads,))
    sink = frame.seen(a, sink)
    lead = (*(1,) * (len(frame.shape) + 1 - sink.rank), *sink.shape)
    return a.reshape(sink, (heads,)) if prod(lead[1:-2]) == heads == prod(lead) else None


def scaled_queries(a: Algebra, q: Value, factors: Sequence[Value], frame: Frame) -> Value:
    """Queries [B, N, S, D] times factors of rows [*rows, 1], or of one number, which are rounded with the product."""
    heads = frame.sizes[1]
    for factor in factors:
        factor = _unrounded(a, factor)
        if prod(factor.shape) == 1:
            q = a.make("mul", (q, a.reshape(factor, ())), (), q.shape, q.dtype)  # torch keeps the dtype of the tensor
            continue
        factor = frame.seen(a, factor)
        lead = (*(1,) * (len(frame.shape) + 1 - factor.rank), *factor.shape)
        own = all(size == 1 for size in lead[1:-2])
        wide = a.expand(factor, (lead[0], *(lead[1:-2] if own else frame.shape[1:-1]), *lead[-2:]))
        rows = a.reshape(wide, (lead[0], 1 if own else heads, lead[-2], 1))
        dtype = q.dtype if widens(rows.dtype, q.dtype) else rows.dtype
        product = a.mul(a.cast(q, dtype), a.cast(rows, dtype))
        assert product is not None  # rows of these scores broadcast to them
        q = a.cast(product, q.dtype)
    return q


def _unrounded(a: Algebra, x: Value) -> Value:
    """A factor before it, or what it is computed from, was cast from floats to floats."""
    if is_rounding(x):
        return _unrounded(a, x.arg)
    if x.op == "power":
        return a.power(_unrounded(a, x.arg), *x.attrs)
    return a.scale(_unrounded(a, x.arg), *x.attrs) if x.op == "scale" else x
