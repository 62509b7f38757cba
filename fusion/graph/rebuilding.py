"""Recipes: plain torch that computes a value, which no node holds, from the tensors of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fusion.graph.dims import Dim
from fusion.graph.proof_steps import proven
from fusion.graph.value import Value

Sizes = Callable[[Dim], "int | torch.SymInt"]
Recipe = Callable[..., Tensor]


def _reshape(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    symbolic = [position for position, size in enumerate(value.shape) if not isinstance(size, int)]
    if len(symbolic) == 1:
        return x.reshape([size if isinstance(size, int) else -1 for size in value.shape])
    return x.reshape([sizes(size) for size in value.shape])


def _expand(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    same = [-1 if old == new else sizes(new) for old, new in zip(value.arg.shape, value.shape, strict=True)]
    return x.expand(same)


def _slice(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    axis, start, stop, step = value.attrs
    return torch.ops.aten.slice.Tensor(x, axis, start, stop, step)


def _narrow(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    axis, start, length = value.attrs
    return torch.ops.aten.slice.Tensor(x, axis, sizes(start), sizes(start + length))


def _wrap(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    end: Any = sizes(value.attrs[0])
    return torch.where(x < 0, x + end, x)


def _at_most(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    end: Any = sizes(value.attrs[0])
    return x.clamp(0, end)


def _filled(value: Value, sizes: Sizes, condition: Tensor, *rest: Tensor) -> Tensor:
    number, *other = value.attrs
    return torch.where(condition, number, *(rest or other)).to(value.dtype)


def _from_size(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    size: Any = sizes(value.attrs[0])
    return torch.full((), size, dtype=value.dtype, device=x.device)


def _steps(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    start, count = value.attrs[0], sizes(value.shape[0])
    return torch.arange(start, start + count, device=x.device)


def _chosen(value: Value, sizes: Sizes, places: Tensor) -> Tensor:
    shape = [sizes(size) for size in value.shape]
    return torch.zeros(shape, dtype=torch.bool, device=places.device).scatter(-1, places.long(), True)


def _power(value: Value, sizes: Sizes, x: Tensor) -> Tensor:
    exponent = value.attrs[0]
    named = {-0.5: torch.rsqrt, 0.5: torch.sqrt, -1.0: torch.reciprocal}
    return named[exponent](x) if exponent in named else torch.pow(x, exponent)


def _matmul(value: Value, sizes: Sizes, x: Tensor, y: Tensor) -> Tensor:
    if (x.dim(), y.dim()) != (4, 3) or x.shape[1] != y.shape[0]:
        return torch.matmul(x, y)
    rows = x.transpose(0, 1).flatten(1, 2)  # [N, B·S, K], the rows of each head: no copy of the matrices for each batch
    return torch.bmm(rows, y).unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def _index(value: Value, sizes: Sizes, x: Tensor, *places: Tensor) -> Tensor:
    return x[(*[slice(None)] * value.attrs[0], *places)]


def _number(value: Value) -> float:
    """Return the factor or offset of `value`, an int for integer dtypes, which a float would promote."""
    number = value.attrs[0]
    return number if value.dtype is None or value.dtype.is_floating_point else int(number)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "reshape": _reshape,
        "expand": _expand,
        "slice": _slice,
        "narrow": _narrow,
        "power": _power,
        "matmul": _matmul,
        "chosen": _chosen,
        "index": _index,
        "gathered": lambda value, sizes, x, places: x.gather(-1, places.long()),
        "softmax": lambda value, sizes, x: x.softmax(value.attrs[0]),
        "wrap": _wrap,
        "filled": _filled,
        "number": _from_size,
        "steps": _steps,
        "flip": lambda value, sizes, x: x.flip(value.attrs),
        "permute": lambda value, sizes, x: x.permute(value.attrs),
        "cat": lambda value, sizes, *pieces: torch.cat(pieces, value.attrs[0]),
        "cast": lambda value, sizes, x: x.to(value.dtype),
        "scale": lambda value, sizes, x: x * _number(value),
        "shift": lambda value, sizes, x: x + _number(value),
        "mul": lambda value, sizes, x, y: x * y,
        "add": lambda value, sizes, x, y: x + y,
        "mean": lambda value, sizes, x: x.mean(value.attrs, keepdim=True),
        "real": lambda value, sizes, z: torch.view_as_real(z).select(-1, 0),
        "imag": lambda value, sizes, z: torch.view_as_real(z).select(-1, 1),
        "remainder": lambda value, sizes, x: x.remainder(sizes(value.attrs[0])),
        "clamp": lambda value, sizes, x: x.clamp(*(each if math.isfinite(each) else None for each in value.attrs)),
        "parts": lambda value, sizes, z: torch.view_as_real(z).movedim(-1, 0),
        "at_most": _at_most,
        "count": lambda value, sizes, x: x.sum(-1),
        "below": lambda value, sizes, x: x < value.attrs[0],
        "not": lambda value, sizes, x: x.logical_not(),
        "and": lambda value, sizes, x, y: x & y,
        "or": lambda value, sizes, x, y: x | y,
        "power_of": lambda value, sizes, x: torch.pow(value.attrs[0], x),
        "exp": lambda value, sizes, x: x.exp(),
        "sigmoid": lambda value, sizes, x: x.sigmoid(),
    }
)


def buildable(value: Value) -> bool:
    """Return True if a recipe computes `value`.

    Not a mean of integers, which torch lacks, nor an index of non-adjacent dims, whose result torch moves to the front.
    """
    match value.op:
        case "mean":
            return proven(value.dtype).is_floating_point
        case "index":
            return value.attrs == tuple(range(value.attrs[0], value.attrs[0] + len(value.attrs)))
        case op:
            return op in RECIPES


def build(value: Value, sizes: Sizes, *args: Any) -> Tensor:
    """Compute `value` from the tensors of its arguments `args`; `sizes` converts a symbolic dim to a size."""
    return RECIPES[value.op](value, sizes, *args)
