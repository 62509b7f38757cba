"""Terms that look through views: some lanes of a tensor, or its elements with other dims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from fusion.graph import Value
from fusion.language.terms import Bindings, Context, Parameter, Tensorial, Term


@dataclass(frozen=True, eq=False)
class Lanes(Tensorial):
    """Lanes start … stop of the last dim; each bound is a number or a `Parameter`."""

    whole: Term
    start: Any
    stop: Any

    def below(self) -> tuple[Any, ...]:
        """What it is cut from."""
        return (self.whole,)

    def heads(self) -> frozenset[str]:
        """A slice."""
        return frozenset(("slice",))

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        if value.op != "slice" or value.attrs[0] != value.rank - 1 or value.attrs[3] != 1:
            return
        known = dict(bound)
        for want, have in zip((self.start, self.stop), value.attrs[1:3], strict=True):
            if (known.setdefault(want, have) if isinstance(want, Parameter) else want) != have:
                return
        yield from self.whole.match(value.arg, known, cx)


@dataclass(frozen=True, eq=False)
class Reshaped(Tensorial):
    """A value that is `inner`, or its elements in the same order with other dims."""

    inner: Term

    def below(self) -> tuple[Any, ...]:
        """What it shows."""
        return (self.inner,)

    def heads(self) -> frozenset[str]:
        """Those of what is reshaped, or a reshape."""
        inner = self.inner.heads()
        return inner | {"reshape"} if inner else inner

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        for each in _forms(value, cx):
            yield from self.inner.match(each, bound, cx)


@dataclass(frozen=True, eq=False)
class Squeezed(Tensorial):
    """A value without its dims of size 1, the last dim excepted: what two tables have in common that broadcast."""

    inner: Term

    def below(self) -> tuple[Any, ...]:
        """What it shows."""
        return (self.inner,)

    def heads(self) -> frozenset[str]:
        """Those of what is left."""
        return self.inner.heads()

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        yield from self.inner.match(_squeezed(value, cx), bound, cx)


def _forms(value: Value, cx: Context) -> Iterator[Value]:
    """`value`, and what the model reshapes to it, each once: what is flattened and opened again is itself."""
    found = {value: None}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        new = [below for below in _sources(each, cx) if below not in found]
        found |= dict.fromkeys(new)
        waiting.extend(reversed(new))


def _sources(value: Value, cx: Context) -> Iterator[Value]:
    """What is reshaped to `value` in one step."""
    if value.op == "reshape":
        yield value.arg
    for node in cx.graph.places.get(value, ()):
        for source in node.all_input_nodes:
            below = cx.graph.held.get(source)
            if isinstance(below, Value) and below is not value and _is_reshaped(below, value, cx):
                yield below


def _is_reshaped(source: Value, value: Value, cx: Context) -> bool:
    same = prod(source.shape) == prod(value.shape) and source.dtype == value.dtype
    return same and cx.graph.algebra.reshape(source, value.shape) is value


def _squeezed(value: Value, cx: Context) -> Value:
    kept = (*(size for size in value.shape[:-1] if size != 1), *value.shape[-1:])
    return cx.graph.algebra.reshape(value, kept)
