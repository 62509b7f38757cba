"""Operands of a matmul of rows with matrices [E, M, N] of experts, of which one is gathered for each row."""

from __future__ import annotations

from math import prod

import torch

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.rounding import exact
from fusion.graph import Algebra, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof_steps import proven


def gathered_rows(a: Algebra, x: Value, y: Value) -> tuple[Value, Value, Value] | None:
    """Read the matmul of `x` and `y` as a product of rows with a matrix of experts that is gathered for each row.

    Returns the rows [.., M], the matrices [E, M, N] of all experts, and the indices [..] of the gather. Rows are [1, M]
    on the left or [M, 1] on the right; one row may also be multiplied by the K matrices of its token at once, joined to
    [M, K · N] on the right or to [K · N, M] on the left. None if no matrices are gathered.
    """
    right, left = _gathered(a, y), _gathered(a, x)
    if right is not None and x.shape[-2] == 1:
        return a.reshape(x, (*x.shape[:-2], x.shape[-1])), *right
    if left is not None and y.shape[-1] == 1:
        return a.reshape(y, y.shape[:-1]), swapped(a, left[0]), left[1]
    joint = _gathered(a, x.arg) if x.op == "reshape" and x.arg.rank == 4 else None
    if joint is not None and y.shape[-1] == 1 and x.shape == (x.arg.shape[0], prod(x.arg.shape[1:3]), x.shape[-1]):
        return a.reshape(y, (y.shape[0], 1, y.shape[1])), swapped(a, joint[0]), joint[1]
    merged = _joined(a, y) if y.op == "reshape" and x.shape[-2] == 1 else None
    return None if merged is None else (x, *merged)


def _joined(a: Algebra, y: Value) -> tuple[Value, Value] | None:
    """Read `y` [T, M, K · N] as the K matrices of each token, gathered and joined along their columns.

    Returns the matrices [E, M, N] of all experts and the indices [T, K]; None if `y` is anything else.
    """
    part = y.arg
    lines, lanes = (part.arg, part.attrs[1:]) if part.op == "slice" and part.attrs[0] == 3 else (part, ())
    matrices = _gathered(a, lines.arg) if (lines.op, lines.attrs) == ("permute", (0, 3, 1, 2)) else None
    if matrices is None or y.shape != (*part.shape[:2], prod(part.shape[2:])):
        return None
    full = swapped(a, matrices[0])
    return (a.cut(full, 2, *lanes) if lanes else full), matrices[1]


def _gathered(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """Read `x` [.., M, N] as one matrix for each row, gathered: the matrices [E, M, N] and the indices [..]; else
    None.
    """
    if x.op == "permute" and x.attrs == (*range(x.rank - 2), x.rank - 1, x.rank - 2):
        below = _gathered(a, x.arg)
        return None if below is None else (swapped(a, below[0]), below[1])
    if x.op == "reshape" and x.arg.op == "index" and x.shape[-2:] == x.arg.shape[-2:]:
        below = _gathered(a, x.arg)
        return None if below is None else (below[0], a.reshape(below[1], x.shape[:-2]))
    if x.op == "slice" and x.attrs[0] >= x.rank - 2:
        below, (axis, *lanes) = _gathered(a, x.arg), x.attrs
        return None if below is None else (a.cut(below[0], axis - x.rank + 3, *lanes), below[1])
    gathers = x.op == "index" and x.attrs == (0,) and x.arg.rank == 3
    return (x.arg, x.args[1]) if gathers else _in_int8(a, x)


def _in_int8(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """Read `x` [.., M, N] as int8 matrices that are gathered, then cast, and perhaps multiplied by scales [.., M, 1].

    Returns the matrices [E, M, N], cast and scaled before the gather, and the indices [..]; None if `x` is anything
    else, as when the scales are gathered by other indices.
    """
    if x.op == "cast":
        below = _gathered(a, x.arg) if x.arg.dtype == torch.int8 else _in_int8(a, x.arg) if is_rounding(x) else None
        return None if below is None else (a.cast(below[0], x.dtype), below[1])
    for matrices, scales in x.operands("mul"):
        below, lines = _in_int8(a, matrices), exact(scales)
        taken = lines.below("reshape")
        is_gather = (taken.op, taken.attrs) == ("index", (0,)) and scales.shape == (*x.shape[:-1], 1)
        if below is not None and is_gather and taken.args[1] is below[1]:
            channels = a.reshape(a.cast(taken.arg, scales.dtype), (*below[0].shape[:2], 1))
            return proven(a.mul(below[0], channels)), below[1]
    return None
