"""Terms that match through views: slices and concatenations of lanes, reshapes and permutes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise, product
from math import prod
from typing import Any

from fusion.graph import Algebra, Graph, Value
from fusion.language.optional_steps import Above
from fusion.language.terms import Bindings, Context, Operation, attributes, matched


@dataclass(frozen=True, eq=False)
class Lanes(Operation):
    """A term that matches x[.., start:stop] of its argument x; each bound is a number or a `Parameter`."""

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
    """A concatenation of the arguments along the last dim, each of which may itself be concatenated from two parts."""

    ops: tuple[str, ...] = ("cat",)

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op != "cat" or value.attrs[0] != value.rank - 1:
            return
        for sizes in product((1, 2), repeat=len(self.args)):
            if sum(sizes) == len(value.args):
                yield from matched(self.args, _runs(cx.graph.algebra, value.args, sizes), bound, cx)


@dataclass(frozen=True, eq=False)
class Reshaped(Above):
    """A term that matches any reshape of a value of `inner`."""

    step = "reshape"

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        for each in _forms(value, cx):
            yield from self.inner.match(each, bound, cx)


@dataclass(frozen=True, eq=False)
class Permuted(Above):
    """A term that matches inner.permute(order), in whatever form the canonical graph has that value.

    The inverse permute is applied to the value, as the algebra turns a permute of dims of size 1 into a reshape, and
    moves permutes through concatenations and sums.
    """

    order: tuple[int, ...]

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.rank == len(self.order):
            back = sorted(range(value.rank), key=self.order.__getitem__)
            yield from self.inner.match(cx.graph.algebra.permute(value, back), bound, cx)


@dataclass(frozen=True, eq=False)
class Packed(Above):
    """A term that matches `inner` in a value [B, S, ..], or in the same value packed as tokens [T = B · S, ..].

    The value is reshaped, as the algebra moves reshapes through concatenations and sums.
    """

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        yield from self.inner.match(value, bound, cx)
        if value.rank > 2:
            rows = (value.shape[0] * value.shape[1], *value.shape[2:])
            yield from self.inner.match(cx.graph.algebra.reshape(value, rows), bound, cx)


@dataclass(frozen=True, eq=False)
class HeadsFirst(Permuted):
    """A term that matches heads [B, N, S, D]: `inner` itself if the parameter `flag` is bound to True by `inner`, else
    `inner` [B, S, N, D] with the dims S and N exchanged.
    """

    order: tuple[int, ...] = (0, 2, 1, 3)
    flag: Any = None

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        yield from (each for each in self.inner.match(value, bound, cx) if each[self.flag])
        yield from (each for each in super()._match(value, bound, cx) if not each[self.flag])


def _runs(a: Algebra, parts: Sequence[Value], sizes: Sequence[int]) -> list[Value]:
    """Group consecutive `parts` into runs of the given `sizes`, each concatenated along the last dim."""
    runs = (parts[start:stop] for start, stop in pairwise((0, *accumulate(sizes))))
    return [run[0] if len(run) == 1 else a.cat(list(run), run[0].rank - 1) for run in runs]


def _forms(value: Value, cx: Context) -> Iterator[Value]:
    """Yield `value` and all values of the model that are reshapes of it, directly or through one another, each once."""
    yield from value.sources(partial(_reshaped, graph=cx.graph))


class _Reshaped(dict[Value, tuple[Value, ...]]):
    """The memo of `_reshaped` for one graph."""


def _reshaped(value: Value, graph: Graph) -> tuple[Value, ...]:
    """Return the values that `value` is a reshape of, then those that are reshapes of it; memoised in `graph`."""
    known = graph.shared(_Reshaped)
    if value not in known:
        known[value] = tuple(_one_step_from(value, graph))
    return known[value]


def _one_step_from(value: Value, graph: Graph) -> Iterator[Value]:
    if value.op == "reshape":
        yield value.arg
    if value.op == "cast" and value.arg.op == "reshape":  # the cast of a reshape is a reshape of the cast
        yield graph.algebra.cast(value.arg.arg, value.dtype)
    lanes = _lanes_of_heads(graph.algebra, value)
    if lanes is not None:
        yield lanes
    makers = graph.places.get(value, ())
    sources = (node for maker in makers for node in maker.all_input_nodes)
    for node in chain(sources, (user for maker in makers for user in maker.users)):
        other = graph.value_of.get(node)
        if not isinstance(other, Value) or other is value or other.dtype != value.dtype:
            continue
        if prod(other.shape) == prod(value.shape) and graph.algebra.reshape(other, value.shape) is value:
            yield other


def _lanes_of_heads(a: Algebra, value: Value) -> Value | None:
    """Return x[.., start · D:stop · D] for `value` = x.view(.., N, D)[.., start:stop, :]; None for any other value."""
    if value.op != "slice" or value.attrs[0] != value.rank - 2 or value.attrs[3] != 1 or value.arg.op != "reshape":
        return None
    x, width = value.arg.arg, value.shape[-1]
    if x.shape[:-1] != value.shape[:-2] or not isinstance(width, int):
        return None
    return a.cut(x, -1, *(bound * width for bound in value.attrs[1:3]))
