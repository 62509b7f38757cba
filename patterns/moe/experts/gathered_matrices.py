"""Matrices [E, M, N] of all experts, of which one is gathered for each row, and the rows that meet them."""

from __future__ import annotations

from math import prod

import torch

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.rounding import exact
from fusion.graph import Algebra, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof import proven


def gathered_rows(a: Algebra, x: Value, y: Value) -> tuple[Value, Value, Value] | None:
    """Rows [.., M], the matrices [E, M, N] of all experts, and the list by which one was gathered for each row.

    The row stands on the left of its matrix, or turned on the right; or one row beside matrices that are joined.
    """
    right, left = _gathered(a, y), _gathered(a, x)
    if right is not None and x.shape[-2] == 1:
        return a.reshape(x, (*x.shape[:-2], x.shape[-1])), *right
    if left is not None and y.shape[-1] == 1:
        return a.reshape(y, y.shape[:-1]), swapped(a, left[0]), left[1]
    whole = _gathered(a, x.arg) if x.op == "reshape" and x.arg.rank == 4 else None
    if whole is not None and y.shape[-1] == 1 and x.shape == (x.arg.shape[0], prod(x.arg.shape[1:3]), x.shape[-1]):
        return a.reshape(y, (y.shape[0], 1, y.shape[1])), swapped(a, whole[0]), whole[1]
    several = _joined(a, y) if y.op == "reshape" and x.shape[-2] == 1 else None
    return None if several is None else (x, *several)


def _joined(a: Algebra, y: Value) -> tuple[Value, Value] | None:
    """Read matrices [T, M, K · N] that are gathered for K rows of each token, or some of their lanes, as [E, M, N]."""
    part = y.arg
    lines, lanes = (part.arg, part.attrs[1:]) if part.op == "slice" and part.attrs[0] == 3 else (part, ())
    several = _gathered(a, lines.arg) if (lines.op, lines.attrs) == ("permute", (0, 3, 1, 2)) else None
    if several is None or y.shape != (*part.shape[:2], prod(part.shape[2:])):
        return None
    matrices = swapped(a, several[0])
    return (a.cut(matrices, 2, *lanes) if lanes else matrices), several[1]


def _gathered(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """Matrices [E, ..] and the list by which one of them is gathered for each row, perhaps turned then."""
    if x.op == "permute" and x.attrs == (*range(x.rank - 2), x.rank - 1, x.rank - 2):
        found = _gathered(a, x.arg)
        return None if found is None else (swapped(a, found[0]), found[1])
    if x.op == "reshape" and x.arg.op == "index" and x.shape[-2:] == x.arg.shape[-2:]:
        found = _gathered(a, x.arg)
        return None if found is None else (found[0], a.reshape(found[1], x.shape[:-2]))
    if x.op == "slice" and x.attrs[0] >= x.rank - 2:
        found, (axis, *lanes) = _gathered(a, x.arg), x.attrs
        return None if found is None else (a.cut(found[0], axis - x.rank + 3, *lanes), found[1])
    gathers = x.op == "index" and x.attrs == (0,) and x.arg.rank == 3
    return (x.arg, x.args[1]) if gathers else _in_int8(a, x)


def _in_int8(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """The same of matrices in int8 that are gathered before they are cast, and perhaps multiplied by their scales."""
    if x.op == "cast":
        found = _gathered(a, x.arg) if x.arg.dtype == torch.int8 else _in_int8(a, x.arg) if is_rounding(x) else None
        return None if found is None else (a.cast(found[0], x.dtype), found[1])
    for matrices, scales in (x.args, x.args[::-1]) if x.op == "mul" else ():
        found, lines = _in_int8(a, matrices), exact(scales)
        taken = lines.below("reshape")
        named = (taken.op, taken.attrs) == ("index", (0,)) and scales.shape == (*x.shape[:-1], 1)
        if found is not None and named and taken.args[1] is found[1]:
            channels = a.reshape(a.cast(taken.arg, scales.dtype), (*found[0].shape[:2], 1))
            return proven(a.mul(found[0], channels)), found[1]
    return None
