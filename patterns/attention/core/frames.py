"""Frames: which dims of the rows of a softmax are sequences, heads and queries.

[B, N, S]    [B, M, G, S]              one or several dims of heads
[S]    [N, S]    [M, G, S]             no dim of sequences, where keys are repeated for heads or each head has a sink
[B, N]    [B, M, G]    [M, G]    [N]   one query of each head, without a dim of queries
[B · N, S]                             heads of all sequences in one dim
[B, X, N, S]                           several sequences of each batch: blocks, rows of an alignment, streams
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.repeated_entries import unrepeated
from fusion.analysis.row_layout import Arrangement, Dims, arranged, arrangement, once, rearranged
from fusion.graph import Algebra, Value
from fusion.graph.algebra import widens
from fusion.graph.comparisons import number
from fusion.graph.contractions import swapped
from patterns.attention.core.row_heads import in_groups
from patterns.attention.core.scores import Scores
from patterns.attention.core.weights import Weights
from patterns.attention.masks.mask_terms import Term

NO_ROWS: Dims = ((),)
"""A dim of size 1, the product of no atoms."""


@dataclass(frozen=True)
class Frame:
    """The rows of a softmax as dims [batch, *heads, queries].

    Attributes:
        shape: the sizes of these dims.
        scores: each dim as a product of atoms of the layout of rows from q kᵀ to the softmax.
        weights: each dim as a product of atoms of the layout of rows from the softmax to the product with values.
        one_query: True if the last dim, of size 1, was added.
        opened: the number of first dims into which the first dim of the softmax was split.
        joined: the sizes of the first two dims of the softmax if they were joined to one; else ().
    """

    shape: tuple[Any, ...]
    scores: Dims
    weights: Dims
    one_query: bool = False
    opened: int = 1
    joined: tuple[Any, ...] = ()

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """The sizes B, N and S, with all dims of heads as one."""
        return self.shape[0], prod(self.shape[1:-1]), self.shape[-1]

    def unbatched(self, count: int = 1) -> Frame:
        """Insert `count` dims of size 1 in front."""
        lead = NO_ROWS * count
        return replace(self, shape=(1,) * count + self.shape, scores=lead + self.scores, weights=lead + self.weights)

    def with_joined_sequences(self) -> Frame:
        """Join the first two dims, both of sequences, to one."""
        (x, y, *scores), (u, v, *weights) = self.scores, self.weights
        shape = (self.shape[0] * self.shape[1], *self.shape[2:])
        return Frame(shape, (x + y, *scores), (u + v, *weights), joined=self.shape[:2])

    def with_one_query(self) -> Frame:
        """Append a dim of queries of size 1."""
        scores, weights = self.scores + NO_ROWS, self.weights + NO_ROWS
        return Frame((*self.shape, 1), scores, weights, one_query=True)

    def aligned(self, a: Algebra, x: Value) -> Value:
        """Reshape `x`, which broadcasts to the scores of the softmax, to broadcast to [*shape, T]."""
        if self.joined and x.rank > len(self.shape):
            apart = (*(1,) * (len(self.shape) + 2 - x.rank), *x.shape)
            lead = apart[:2] if apart[:2] == (1, 1) else self.joined
            return a.reshape(a.expand(a.reshape(x, apart), (*lead, *apart[2:])), (prod(lead), *apart[2:]))
        if x.rank == len(self.shape) + 2 - self.opened and x.shape[0] != 1:
            return a.reshape(x, (*self.shape[: self.opened], *x.shape[1:]))
        return a.reshape(x, (*x.shape[:-1], 1, *x.shape[-1:])) if self.one_query else x

    def aligned_terms(self, a: Algebra, terms: Sequence[Term]) -> list[Term]:
        """Reshape `terms`, masks of the scores of the softmax, to masks of scores [*shape, T]."""
        return [replace(each, mask=self.aligned(a, each.mask)) for each in terms]


@dataclass(frozen=True)
class Attended:
    """The operands of attention, before a frame is chosen.

    Attributes:
        a: the algebra of the graph.
        queries: [*rows of the softmax, D].
        keys: [.., T, D], which broadcasts to the rows of q kᵀ.
        values: [.., T, E], which broadcasts to the rows of the product with values.
        score_rows: the layout of rows from q kᵀ to the softmax.
        weight_rows: the layout of rows from the softmax to the product with values.
    """

    a: Algebra
    queries: Value
    keys: Value
    values: Value
    score_rows: Arrangement
    weight_rows: Arrangement

    @classmethod
    def by(cls, a: Algebra, scores: Scores, product: Value, weights: Weights) -> Attended | None:
        """Read the operands of `scores.product`, q kᵀ, and of `product`, P v; None if the rows have no layout."""
        assert scores.product is not None
        rows, queries = scores.product.shape[:-1], scores.product.arg
        score_rows = arrangement(rows, scores.steps)
        keys = swapped(a, scores.product.args[1])
        if score_rows is None:
            return None
        queries = arranged(a, a.expand(queries, (*rows, queries.shape[-1])), scores.steps)
        return cls(a, queries, keys, lanes_of_keys(a, product.args[1], keys), score_rows, weights.rows)

    def frames(self, shape: Sequence[Any], sunk: bool) -> Iterator[Frame]:
        """Yield the possible frames of rows of `shape`, the likeliest first; `sunk` is True with a sink."""
        plain = self.plain(shape)
        if len(shape) == 1:
            yield plain.unbatched(2)
            yield plain.unbatched().with_one_query()
            return
        if len(shape) in (2, 3) and self.queries.shape[:-1] == tuple(shape) and in_groups(self.queries):
            yield plain.with_one_query().unbatched(3 - len(shape))
        if len(shape) == 2:
            opened = self._opened(plain)
            yield from () if opened is None else (opened,)
            yield from (plain.unbatched(),) if self._is_repeated(plain) else ()
        yield plain
        if len(shape) == 4:
            yield plain.with_joined_sequences()
        if len(shape) == 2:
            yield plain.with_one_query()
        if sunk:
            yield plain.unbatched()

    def plain(self, shape: Sequence[Any]) -> Frame:
        """Return the frame with the dims of the softmax, of sizes `shape`, unchanged."""
        return Frame(tuple(shape), self.score_rows.after, self.weight_rows.before)

    def _is_repeated(self, frame: Frame) -> bool:
        """Return True if one key or value is repeated for all sequences of `frame`: its dim of sequences is one of
        heads then.
        """
        both = (each for each in self.keys_and_values(frame) if each is not None)
        return any(unrepeated(self.a, each, 0)[1] != 1 for each in both)

    def _opened(self, frame: Frame) -> Frame | None:
        """Split the first dim of `frame` [B · N, S] into atoms [B, N]; None if the two products differ in them."""
        rows, own = frame.scores[0], frame.weights[0]
        lead = tuple(self.score_rows.sizes[atom] for atom in rows)
        if not 1 < len(lead) < 4 or lead != tuple(self.weight_rows.sizes[atom] for atom in own):
            return None
        scores, weights = (tuple((atom,) for atom in each) for each in (rows, own))
        shape = (*lead, *frame.shape[1:])
        return Frame(shape, scores + frame.scores[1:], weights + frame.weights[1:], opened=len(lead))

    def keys_and_values(self, frame: Frame) -> list[Value | None]:
        """Return keys [B, M, T, D] and values [B, M, T, E] for `frame`; None for one that differs between queries."""
        keys = self._heads(self.keys, self.score_rows, self.score_rows.before, frame.scores)
        return [keys, self._heads(self.values, self.weight_rows, self.weight_rows.after, frame.weights)]

    def _heads(self, kv: Value, rows: Arrangement, own: Dims, wanted: Dims) -> Value | None:
        """Arrange keys or values `kv` as [B, M, T, D], where each of the M heads has its own row and is not repeated.

        Args:
            kv: keys or values [.., T, D].
            rows: layout of the rows of the product that `kv` is an operand of.
            own: the batch dims of that product, each as a product of atoms of `rows`.
            wanted: the dims of the frame, each as a product of atoms of `rows`.

        Returns:
            The arranged value; None if it differs between queries, or cannot be arranged.
        """
        a = self.a
        dims = (*(1,) * (len(own) + 1 - kv.rank), *kv.shape[:-2], 1, *kv.shape[-2:])  # a dim of size 1 for queries
        placed = rearranged(a, a.reshape(kv, dims), rows, own, wanted)
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


_VIEWS = ("reshape", "permute", "expand", "cast")
"""Ops between gathered keys or values and their products."""


def lanes_of_keys(a: Algebra, values: Value, keys: Value) -> Value:
    """Rewrite `values` that are gathered from lanes of the table of `keys`, by the same indices, to lanes of the keys.

    `values` itself for all others.
    """
    if values.op in _VIEWS:
        below = lanes_of_keys(a, values.arg, keys)
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
    return a.cut(rows, -1, *lanes.attrs[1:]) if keys.below(*_VIEWS, "slice") is rows else values


def _common(lead: Sequence[Any], full: Sequence[Any]) -> list[Any]:
    """Return the sizes `lead` of the dims of heads with those of `full` in all dims up to the last that is not 1 in
    `lead`.

    Dims after it stay 1: over these, query heads share a key head, and must be adjacent.
    """
    own = next((place for place in reversed(range(len(lead))) if lead[place] != 1), -1)
    return [*full[: own + 1], *lead[own + 1 :]]


def per_head(a: Algebra, sink: Value, frame: Frame, like: Value) -> Value | None:
    """Return the numbers [N] of `sink`, which is repeated for all rows; None if it differs within a head.

    A constant becomes a tensor on the device of `like`.
    """
    heads = frame.sizes[1]
    while sink.op == "expand" or is_rounding(sink):
        sink = sink.arg
    if sink.op == "full":
        zero = a.cast(number(a, 0, like), sink.dtype)
        return a.expand(a.shift(a.reshape(zero, (1,)), sink.attrs[0]), (heads,))
    if prod(sink.shape) == 1:
        return a.expand(a.reshape(sink, (1,)), (heads,))
    sink = frame.aligned(a, sink)
    lead = (*(1,) * (len(frame.shape) + 1 - sink.rank), *sink.shape)
    return a.reshape(sink, (heads,)) if prod(lead[1:-2]) == heads == prod(lead) else None


def scaled_queries(a: Algebra, q: Value, factors: Sequence[Value], frame: Frame) -> Value:
    """Multiply `q` [B, N, S, D] by `factors` of rows [*rows, 1] or of one element, without their own rounding."""
    heads = frame.sizes[1]
    for factor in factors:
        factor = _before_rounding(a, factor)
        if prod(factor.shape) == 1:
            q = a.make("mul", (q, a.reshape(factor, ())), (), q.shape, q.dtype)  # torch keeps the dtype of the tensor
            continue
        factor = frame.aligned(a, factor)
        lead = (*(1,) * (len(frame.shape) + 1 - factor.rank), *factor.shape)
        own = all(size == 1 for size in lead[1:-2])
        wide = a.expand(factor, (lead[0], *(lead[1:-2] if own else frame.shape[1:-1]), *lead[-2:]))
        rows = a.reshape(wide, (lead[0], 1 if own else heads, lead[-2], 1))
        dtype = q.dtype if widens(rows.dtype, q.dtype) else rows.dtype
        product = a.mul(a.cast(q, dtype), a.cast(rows, dtype))
        assert product is not None  # the factors broadcast to the scores
        q = a.cast(product, q.dtype)
    return q


def _before_rounding(a: Algebra, x: Value) -> Value:
    """Drop the casts between floats from `x`, and from the base of its powers and multiples."""
    if is_rounding(x):
        return _before_rounding(a, x.arg)
    if x.op == "power":
        return a.power(_before_rounding(a, x.arg), *x.attrs)
    return a.scale(_before_rounding(a, x.arg), *x.attrs) if x.op == "scale" else x
