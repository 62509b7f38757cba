"""Evaluation of a value for rows whose entries are all the same number.

A query whose keys are all masked has such a row of scores. What attention returns for it depends on how the softmax is
written: weights of 1/T, 0 or NaN; or of 1, where log T is rounded away next to the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusion.analysis.constant_folding import COMPARE
from fusion.analysis.dtypes import rounded_number
from fusion.graph import Value
from fusion.graph.proof_steps import must, proof, proven

_VIEWS = ("reshape", "expand", "permute", "slice")
UNKNOWN = 3
"""The number of keys that is used for a symbolic one."""


class _Entry(NamedTuple):
    """A number, and its scope: "all" if every element is the number, "row" if every element of the row in question is,
    "one" if the value has one element for each row, and that of the row in question is.
    """

    number: float
    scope: str


def on_equal_rows(x: Value, rows: Mapping[Value, float], alike: Mapping[Value, float] | None = None) -> float | None:
    """Compute the element of `x` in one row of scores, of which all are the same number; each step is rounded to its
    dtype.

    None where the element is unknown, or differs within the row.

    Args:
        x: a value with equal elements in the row, or with one element for each row.
        rows: value -> the number that all its elements in the row are.
        alike: value -> the number that all its elements in all rows are.
    """
    known: dict[Value, _Entry | None] = {each: _Entry(number, "row") for each, number in rows.items()}
    known |= {each: _Entry(number, "all") for each, number in (alike or {}).items()}

    def entry_of(value: Value) -> _Entry | None:
        if value not in known:
            known[value] = _entry(value, entry_of)
        return known[value]

    with np.errstate(all="ignore"):
        entry = entry_of(x)
    return entry and entry.number


@proof
def _entry(x: Value, entry_of: Callable[[Value], _Entry | None]) -> _Entry | None:
    if x.op == "full":
        return _Entry(float(x.attrs[0]), "all")
    if x.op == "where":
        condition, *sides = x.args
        chosen = sides[0 if proven(entry_of(condition)).number else 1]
        return _Entry(proven(entry_of(chosen)).number, _scope(x, (condition, chosen), entry_of))
    if x.op in _REDUCTIONS:
        axis = -1 if x.op == "largest" else x.attrs[0]
        must(len(x.attrs) == 1 and (x.op != "largest" or x.attrs == (1,)))
        pieces, row = _pieces(x.arg, axis, entry_of)
        must(pieces and all(size > 0 for _, size in pieces))
        return _Entry(_rounded(x, _REDUCTIONS[x.op](pieces)), "one" if row else "all")
    args = [proven(entry_of(each)) for each in x.args]
    must(args)
    if x.op == "cat":
        must(len({each.number for each in args}) == 1 and all(each.scope == "all" for each in args))
        return args[0]
    if x.op in _VIEWS:
        must(_keeps_rows(x, args[0].scope))
        return args[0]
    if x.op == "softmax":
        must(args[0].scope == ("row" if x.attrs[0] == -1 else "all"))
        return _Entry(_rounded(x, share(x, args[0].number, counted(x.shape[x.attrs[0]]))), args[0].scope)
    must(x.op in _ELEMENTWISE)
    number = _ELEMENTWISE[x.op](x, *(np.float64(each.number) for each in args))
    return _Entry(_rounded(x, number), _scope(x, x.args, entry_of))


def _pieces(x: Value, axis: int, entry_of: Callable[[Value], _Entry | None]) -> tuple[list[tuple[float, int]], bool]:
    """List (number, how many entries have it) along the dim `axis` of `x`; also return True if that holds for one row
    alone.

    There are several numbers if `x` is a concatenation, as of scores and a sink. Unproven if a piece is not known.
    """
    pieces = x.args if x.op == "cat" and x.attrs == (x.rank + axis,) else (x,)
    entries = [proven(entry_of(each)) for each in pieces]
    row = any(each.scope != "all" for each in entries)
    alike = all(piece.shape[:-1] == x.shape[:-1] for piece in pieces)
    covers = all(each.scope == "row" or piece.shape[-1] == 1 for each, piece in zip(entries, pieces, strict=True))
    must(not row or (axis == -1 and alike and covers))
    return [(each.number, counted(piece.shape[axis])) for each, piece in zip(entries, pieces, strict=True)], row


def counted(keys: Any) -> int:
    """Return the number of `keys`, or `UNKNOWN` for a symbolic size."""
    return keys if isinstance(keys, int) else UNKNOWN


def share(softmax: Value, row: float, keys: int, sink: float | None = None) -> float:
    """Compute the weight that `softmax` gives to each of `keys` scores that are all `row`.

    With `sink`, a score of that number is in the row as well.
    """
    (_, empty, less), number = softmax.attrs, np.float64(row)

    def rounded(x: Any) -> np.float64:
        return np.float64(proven(rounded_number(float(x), softmax.dtype)))

    with np.errstate(all="ignore"):
        if less in ("greatest", "nothing"):
            top = 0.0 if less == "nothing" else number if sink is None else np.maximum(number, sink)
            weight = rounded(np.exp(number - top))
            result = weight / (keys * weight + (0.0 if sink is None else np.exp(sink - top)))
        else:
            total = rounded(number + np.log(keys) if less == "log_sum" else np.log(keys * rounded(np.exp(number))))
            result = np.exp(number - total) / (1 if sink is None else 1 + np.exp(sink - total))
    return 0.0 if empty == "zero" and np.isnan(result) and not np.isnan(row) else float(result)


def _rounded(x: Value, number: Any) -> float:
    return float(proven(rounded_number(float(number), x.dtype)))


def _scope(x: Value, args: Sequence[Value], entry_of: Callable[[Value], _Entry | None]) -> str:
    """Return the scope, as in `_Entry`, of the number of `x`, which is computed elementwise from `args`.

    Unproven if an element of the row would be combined with an element of another row.
    """
    entries = [(each.shape, proven(entry_of(each)).scope) for each in args]
    scope = next((each for each in ("row", "one") if any(each == one for _, one in entries)), "all")
    lead = x.shape[:-1] if scope == "row" else x.shape
    must(all(one == "all" or shape in ((*lead, 1), x.shape) for shape, one in entries))
    return scope


def _keeps_rows(x: Value, scope: str) -> bool:
    """Return True if the view `x` keeps each element in its row; `scope` is that of the argument, as in `_Entry`."""
    below = x.arg.shape
    if x.op not in ("reshape", "expand"):
        return scope == "all"
    if scope == "one" and x.op == "expand":
        return (*below[:-1], x.shape[-1]) == x.shape and below[-1:] == (1,)
    return scope != "row" or x.shape[-1:] == below[-1:]


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
