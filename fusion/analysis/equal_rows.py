"""Rows of one number: the entry that a value has where every entry of the rows below it is the same number.

Attention of which a mask hides all keys of a query computes with such a row, and each spelling makes its own of it:
shares of 1/T, 0, NaN, or, where log T is lost beside the number, 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusion.analysis.constant_folding import COMPARE
from fusion.analysis.dtypes import held_number
from fusion.graph import Value
from fusion.graph.proof import must, proof, proven

_VIEWS = ("reshape", "expand", "permute", "slice")
UNKNOWN = 3
"""The number of keys that stands for one that is not known."""


class _Entry(NamedTuple):
    """A number, and what has it: "all" rows, "one" row each of which has its own, or every entry of a "row"."""

    number: float
    of: str


def on_equal_rows(x: Value, rows: Mapping[Value, float], alike: Mapping[Value, float] | None = None) -> float | None:
    """Compute an entry of `x`, each step rounded to its dtype; None where it is not known.

    Args:
        x: the value, of a row or with one number for each row.
        rows: the number that every entry of a row of these values is.
        alike: the number that every entry of these values is, in all rows.
    """
    known: dict[Value, _Entry | None] = {each: _Entry(number, "row") for each, number in rows.items()}
    known |= {each: _Entry(number, "all") for each, number in (alike or {}).items()}

    def of(value: Value) -> _Entry | None:
        if value not in known:
            known[value] = _entry(value, of)
        return known[value]

    with np.errstate(all="ignore"):
        found = of(x)
    return found and found.number


@proof
def _entry(x: Value, of: Callable[[Value], _Entry | None]) -> _Entry | None:
    if x.op == "full":
        return _Entry(float(x.attrs[0]), "all")
    if x.op == "where":
        condition, *sides = x.args
        chosen = sides[0 if proven(of(condition)).number else 1]
        return _Entry(proven(of(chosen)).number, _has_it(x, (condition, chosen), of))
    if x.op in _REDUCTIONS:
        axis = -1 if x.op == "largest" else x.attrs[0]
        must(len(x.attrs) == 1 and (x.op != "largest" or x.attrs == (1,)))
        pieces, row = _pieces(x.arg, axis, of)
        return _Entry(_rounded(x, _REDUCTIONS[x.op](pieces)), "one" if row else "all")
    args = [proven(of(each)) for each in x.args]
    must(args)
    if x.op == "cat":
        must(len({each.number for each in args}) == 1 and all(each.of == "all" for each in args))
        return args[0]
    if x.op in _VIEWS:
        must(_keeps_rows(x, args[0].of))
        return args[0]
    if x.op == "softmax":
        must(args[0].of == ("row" if x.attrs[0] == -1 else "all"))
        return _Entry(_rounded(x, share(x, args[0].number, counted(x.shape[x.attrs[0]]))), args[0].of)
    must(x.op in _ELEMENTWISE)
    number = _ELEMENTWISE[x.op](x, *(np.float64(each.number) for each in args))
    return _Entry(_rounded(x, number), _has_it(x, x.args, of))


def _pieces(x: Value, axis: int, of: Callable[[Value], _Entry | None]) -> tuple[list[tuple[float, int]], bool]:
    """Return the numbers along an axis of `x`, each with how many entries have it, and whether rows have their own.

    There are several where a sink stands behind scores.
    """
    pieces = x.args if x.op == "cat" and x.attrs == (x.rank + axis,) else (x,)
    entries = [proven(of(each)) for each in pieces]
    row = any(each.of != "all" for each in entries)
    alike = all(piece.shape[:-1] == x.shape[:-1] for piece in pieces)
    whole = all(each.of == "row" or piece.shape[-1] == 1 for each, piece in zip(entries, pieces, strict=True))
    must(not row or (axis == -1 and alike and whole))
    return [(each.number, counted(piece.shape[axis])) for each, piece in zip(entries, pieces, strict=True)], row


def counted(keys: Any) -> int:
    """Return a number of keys, or one that stands for a symbolic one."""
    return keys if isinstance(keys, int) else UNKNOWN


def share(softmax: Value, row: float, keys: int, sink: float | None = None) -> float:
    """Compute the weight of each of so many keys in a row of `softmax` whose scores are all `row`, beside a sink."""
    (_, empty, less), number = softmax.attrs, np.float64(row)

    def held(x: Any) -> np.float64:
        return np.float64(proven(held_number(float(x), softmax.dtype)))

    with np.errstate(all="ignore"):
        if less in ("greatest", "nothing"):
            top = 0.0 if less == "nothing" else number if sink is None else np.maximum(number, sink)
            weight = held(np.exp(number - top))
            found = weight / (keys * weight + (0.0 if sink is None else np.exp(sink - top)))
        else:
            total = held(number + np.log(keys) if less == "log_sum" else np.log(keys * held(np.exp(number))))
            found = np.exp(number - total) / (1 if sink is None else 1 + np.exp(sink - total))
    return 0.0 if empty == "zero" and np.isnan(found) and not np.isnan(row) else float(found)


def _rounded(x: Value, number: Any) -> float:
    return float(proven(held_number(float(number), x.dtype)))


def _has_it(x: Value, args: Sequence[Value], of: Callable[[Value], _Entry | None]) -> str:
    """Return what has the number of `x`; unproven where the number of one row may meet entries of another."""
    entries = [(each.shape, proven(of(each)).of) for each in args]
    found = next((each for each in ("row", "one") if any(each == one for _, one in entries)), "all")
    lead = x.shape[:-1] if found == "row" else x.shape
    must(all(one == "all" or shape in ((*lead, 1), x.shape) for shape, one in entries))
    return found


def _keeps_rows(x: Value, of: str) -> bool:
    """True if a view lets every number stand in the row in which it stood."""
    below = x.arg.shape
    if x.op not in ("reshape", "expand"):
        return of == "all"
    if of == "one" and x.op == "expand":
        return (*below[:-1], x.shape[-1]) == x.shape and below[-1:] == (1,)
    return of != "row" or x.shape[-1:] == below[-1:]


def _log_sum_exp(pieces: Sequence[tuple[float, int]]) -> float:
    return float(np.logaddexp.reduce([number + math.log(size) for number, size in pieces]))


_REDUCTIONS: Mapping[str, Callable[[Sequence[tuple[float, int]]], float]] = {
    "greatest": lambda pieces: max(number for number, _ in pieces),
    "largest": lambda pieces: max(number for number, _ in pieces),
    "least": lambda pieces: min(number for number, _ in pieces),
    "mean": lambda pieces: sum(number * size for number, size in pieces) / sum(size for _, size in pieces),
    "any": lambda pieces: any(number for number, _ in pieces),
    "log_sum_exp": _log_sum_exp,
}

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "cast": lambda x, number: number,
    "scale": lambda x, number: number * x.attrs[0],
    "shift": lambda x, number: number + x.attrs[0],
    "power": lambda x, number: np.power(number, x.attrs[0]),
    "clip": lambda x, number: np.clip(number, *x.attrs),
    "exp": lambda x, number: np.exp(number),
    "log": lambda x, number: np.log(number),
    "aten.log1p.default": lambda x, number: np.log1p(number),
    "sigmoid": lambda x, number: 1 / (1 + np.exp(-number)),
    "abs": lambda x, number: abs(number),
    "relu": lambda x, number: np.maximum(number, 0),
    "isnan": lambda x, number: np.isnan(number),
    "not": lambda x, number: not number,
    "and": lambda x, one, other: bool(one) and bool(other),
    "or": lambda x, one, other: bool(one) or bool(other),
    "compare": lambda x, one, other: COMPARE[x.attrs[0]](one, other),
    "add": lambda x, one, other: one + other,
    "mul": lambda x, one, other: one * other,
    "aten.maximum.default": lambda x, one, other: np.maximum(one, other),
    "aten.minimum.default": lambda x, one, other: np.minimum(one, other),
    "aten.logaddexp.default": lambda x, one, other: np.logaddexp(one, other),
}
