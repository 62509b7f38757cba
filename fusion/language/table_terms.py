"""Terms that match tables of a rotation: with repeated lanes, or broadcast to the rows of the rotated tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.graph import Algebra, Value
from fusion.language.optional_steps import Above
from fusion.language.terms import Bindings, Context, Term


@dataclass(frozen=True, eq=False)
class Repeated(Above):
    """A term that matches inner.repeat_interleave(times, -1), or `inner` itself where no lanes are repeated."""

    times: int
    step = "reshape"

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        once = unrepeated(cx.graph.algebra, value, self.times)
        yield from self.inner.match(value if once is None else once, bound, cx)


@dataclass(frozen=True, eq=False)
class PerToken(Term):
    """A rotary table that broadcasts to the tensor of `operand`; `inner` is matched with it as [B or 1, S or 1, D].

    `operand` must be bound before. It is [B, N, S, D] if `heads_first` is True, [B, S, N, D] if False; a parameter
    stands for the one that it is bound to. If None, it is [S, D] or [B, S, D], or has a dim of one head.
    """

    inner: Term
    operand: Term
    heads_first: Any = None

    def below(self) -> tuple[Any, ...]:
        """Return the term of the table; `operand` is no constituent: it is bound elsewhere."""
        return (self.inner,)

    def heads(self) -> frozenset[str]:
        """Return the heads of the table's term."""
        return self.inner.heads()

    def _match(self, value: Value, bound: Bindings, cx: Context) -> Iterator[Bindings]:
        first = self.heads_first if isinstance(self.heads_first, bool) else bound.get(self.heads_first)
        table = _per_token(value, bound[self.operand].shape[:-1], first, cx)
        if table is not None:
            yield from self.inner.match(table, bound, cx)


def unrepeated(a: Algebra, value: Value, times: int) -> Value | None:
    """Return x [.., D] for `value` = x.repeat_interleave(times, -1); None for any other value."""
    if value.op == "slice" and value.attrs[0] != value.rank - 1:
        once = unrepeated(a, value.arg, times)
        return None if once is None else a.cut(once, *value.attrs)
    if value.op != "reshape":
        return None
    wide, lead = value.arg, value.shape[:-1]
    if wide.shape[-1:] == value.shape[-1:]:
        once = unrepeated(a, wide, times)
        return None if once is None else a.reshape(once, (*lead, once.shape[-1]))
    repeats = wide.op == "expand" and wide.arg.shape[-1] == 1 and wide.shape == (*wide.arg.shape[:-1], times)
    flattens = repeats and wide.rank > 1 and wide.shape[-2] * times == value.shape[-1]
    return a.reshape(wide.arg, (*lead, wide.shape[-2])) if flattens else None


def _per_token(table: Value, rows: Sequence[Any], heads_first: bool | None, cx: Context) -> Value | None:
    """Reshape `table`, which broadcasts to [*rows, D], to [B or 1, S or 1, D]; None if it differs between heads.

    The dim of heads is dropped: the second of `rows` if `heads_first` is True, the last if False; if None, the one of
    size 1.
    """
    lead = (*(1,) * (len(rows) + 1 - table.rank), *table.shape[:-1])
    if len(rows) == 3 or heads_first is not None:
        first = rows[1] == 1 if heads_first is None else heads_first
        heads = len(rows) - (2 if first else 1)
        if lead[heads] != 1 or (heads_first is None and rows[heads] != 1):
            return None
        lead = (*lead[:heads], *lead[heads + 1 :])
    lead = (*(1,) * (2 - len(lead)), *lead)
    return cx.graph.algebra.reshape(table, (*lead, table.shape[-1])) if len(lead) == 2 else None
