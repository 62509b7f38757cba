"""Terms that look through views: some lanes of a tensor, its elements with other dims, or a table that broadcasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, product
from math import prod
from typing import Any

from fusion.graph import Algebra, Graph, Value
from fusion.language.steps import Above
from fusion.language.terms import Bindings, Context, Operation, Term, attributes, matched


@dataclass(frozen=True, eq=False)
class Lanes(Operation):
    """Lanes start … stop of the last dim; each bound is a number or a `Parameter`."""

    ops: tuple[str, ...] = ("slice",)
    start: Any = 0
    stop: Any = None

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op != "slice" or value.attrs[0] != value.rank - 1 or value.attrs[3] != 1:
            return
        known = attributes((self.start, self.stop), value.attrs[1:3], bound)
        if known is not None:
            yield from self.args[0].match(value.arg, known, cx)


@dataclass(frozen=True, eq=False)
class Joined(Operation):
    """Tensors one behind the other along the last dim, each of which may be two that are joined, as halves are."""

    ops: tuple[str, ...] = ("cat",)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op != "cat" or value.attrs[0] != value.rank - 1:
            return
        for sizes in product((1, 2), repeat=len(self.args)):
            if sum(sizes) == len(value.args):
                yield from matched(self.args, _runs(cx.graph.algebra, value.args, sizes), bound, cx)


@dataclass(frozen=True, eq=False)
class Reshaped(Above):
    """A value that is `inner`, or its elements in the same order with other dims."""

    step = "reshape"

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        for each in _forms(value, cx):
            yield from self.inner.match(each, bound, cx)


@dataclass(frozen=True, eq=False)
class Permuted(Above):
    """A value that is `inner` with its dims in another order, whatever that has become.

    Of dims of size 1 an order is a shape, and it is taken through what joins or adds.
    """

    order: tuple[int, ...]

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.rank == len(self.order):
            back = sorted(range(value.rank), key=self.order.__getitem__)
            yield from self.inner.match(cx.graph.algebra.permute(value, back), bound, cx)


@dataclass(frozen=True, eq=False)
class Packed(Above):
    """A value [B, S, ..] that is `inner`, or `inner` of tokens without their sequences [T, ..].

    What joins or adds takes the shape as its own.
    """

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        yield from self.inner.match(value, bound, cx)
        if value.rank > 2:
            rows = (value.shape[0] * value.shape[1], *value.shape[2:])
            yield from self.inner.match(cx.graph.algebra.reshape(value, rows), bound, cx)


@dataclass(frozen=True, eq=False)
class HeadsFirst(Permuted):
    """Heads [B, N, S, D] that are `inner` where `told` is bound to True, else `inner` [B, S, N, D] turned."""

    order: tuple[int, ...] = (0, 2, 1, 3)
    told: Any = None

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        yield from (found for found in self.inner.match(value, bound, cx) if found[self.told])
        yield from (found for found in super()._match(value, bound, cx) if not found[self.told])


@dataclass(frozen=True, eq=False)
class Repeated(Above):
    """A value that is `inner` with each of its lanes `times` over, one beside the other; or `inner` itself."""

    times: int
    step = "reshape"

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        once = _once(cx.graph.algebra, value, self.times)
        yield from self.inner.match(value if once is None else once, bound, cx)


@dataclass(frozen=True, eq=False)
class PerToken(Term):
    """A table that `of` is multiplied by, taken as [B or 1, S or 1, D].

    `of`, which is bound before, is [B, S, D], [S, D] or has heads before or behind S: `heads_first` says where, itself
    or what it is bound to; None for a single head or for none.
    """

    inner: Term
    of: Term
    heads_first: Any = None

    def below(self) -> tuple[Any, ...]:
        """The table."""
        return (self.inner,)

    def heads(self) -> frozenset[str]:
        """Those of the table."""
        return self.inner.heads()

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        first = self.heads_first if isinstance(self.heads_first, bool) else bound.get(self.heads_first)
        table = _per_token(value, bound[self.of].shape[:-1], first, cx)
        if table is not None:
            yield from self.inner.match(table, bound, cx)


def _runs(a: Algebra, parts: Sequence[Value], sizes: Sequence[int]) -> list[Value]:
    """So many parts each, joined along the last dim."""
    runs = (parts[start:stop] for start, stop in pairwise((0, *accumulate(sizes))))
    return [run[0] if len(run) == 1 else a.cat(list(run), run[0].rank - 1) for run in runs]


def _forms(value: Value, cx: Context) -> Iterator[Value]:
    """`value`, and what the model has of it in other dims, elements in the same order, each once."""
    found = {value: None}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        new = [other for other in _reshaped(each, cx.graph) if other not in found]
        found |= dict.fromkeys(new)
        waiting.extend(reversed(new))


class _Reshaped(dict[Value, tuple[Value, ...]]):
    """What was found for values of one graph."""


def _reshaped(value: Value, graph: Graph) -> tuple[Value, ...]:
    """What is reshaped to `value` in one step, then what it is reshaped to: rows may be flattened and opened again."""
    known = graph.shared(_Reshaped)
    if value not in known:
        known[value] = tuple(_one_step_from(value, graph))
    return known[value]


def _one_step_from(value: Value, graph: Graph) -> Iterator[Value]:
    if value.op == "reshape":
        yield value.arg
    if value.op == "cast" and value.arg.op == "reshape":  # a cast stands above what it was below
        yield graph.algebra.cast(value.arg.arg, value.dtype)
    lanes = _lanes_of_heads(graph.algebra, value)
    if lanes is not None:
        yield lanes
    makers = graph.places.get(value, ())
    sources = (node for maker in makers for node in maker.all_input_nodes)
    for node in chain(sources, (user for maker in makers for user in maker.users)):
        other = graph.held.get(node)
        if not isinstance(other, Value) or other is value or other.dtype != value.dtype:
            continue
        if prod(other.shape) == prod(value.shape) and graph.algebra.reshape(other, value.shape) is value:
            yield other


def _lanes_of_heads(a: Algebra, value: Value) -> Value | None:
    """Lanes of a tensor whose last dim was opened into heads [.., N, D], of which `value` is a run; None for others."""
    if value.op != "slice" or value.attrs[0] != value.rank - 2 or value.attrs[3] != 1 or value.arg.op != "reshape":
        return None
    whole, width = value.arg.arg, value.shape[-1]
    if whole.shape[:-1] != value.shape[:-2] or not isinstance(width, int):
        return None
    return a.cut(whole, -1, *(bound * width for bound in value.attrs[1:3]))


def _once(a: Algebra, value: Value, times: int) -> Value | None:
    """[.., D] of a value [.., D · times] that has each of its lanes so many times over."""
    if value.op == "slice" and value.attrs[0] != value.rank - 1:
        once = _once(a, value.arg, times)
        return None if once is None else a.cut(once, *value.attrs)
    if value.op != "reshape":
        return None
    wide, lead = value.arg, value.shape[:-1]
    if wide.shape[-1:] == value.shape[-1:]:
        once = _once(a, wide, times)
        return None if once is None else a.reshape(once, (*lead, once.shape[-1]))
    lanes = wide.op == "expand" and wide.arg.shape[-1] == 1 and wide.shape == (*wide.arg.shape[:-1], times)
    whole = lanes and wide.rank > 1 and wide.shape[-2] * times == value.shape[-1]
    return a.reshape(wide.arg, (*lead, wide.shape[-2])) if whole else None


def _per_token(table: Value, rows: Sequence[Any], heads_first: bool | None, cx: Context) -> Value | None:
    """A table that broadcasts to `rows`, which are all dims but the last, without the dim of heads."""
    lead = (*(1,) * (len(rows) + 1 - table.rank), *table.shape[:-1])
    if len(rows) == 3 or heads_first is not None:
        first = rows[1] == 1 if heads_first is None else heads_first
        heads = len(rows) - (2 if first else 1)
        if lead[heads] != 1 or (heads_first is None and rows[heads] != 1):
            return None
        lead = (*lead[:heads], *lead[heads + 1 :])
    lead = (*(1,) * (2 - len(lead)), *lead)
    return cx.graph.algebra.reshape(table, (*lead, table.shape[-1])) if len(lead) == 2 else None
