"""Distances between the results of two graphs, row by row, and limits for them.

A row is one vector along the last dim. Distances are root mean squares over a row, in float64. Four runs are compared:
those of the fused and the plain graph in their own dtypes, and those of both in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Relative rms error that rounding explains in a complete model, by the coarsest dtype of its intermediates."""

SAME = 1e-10
"""Largest relative error between float64 runs of the same computation."""

_ENTRIES = 2**22  # elements compared at a time: a float64 copy of a cache would be too large


@dataclass(frozen=True)
class Distances:
    """Distances of every row of one tensor, [rows] each in float64; infinite where only one side is finite.

    Attributes:
        fused: from the fused result to float64 of the plain graph.
        plain: from the plain result to float64 of the plain graph.
        apart: from the fused to the plain result.
        size: root mean square of float64 of the plain graph.
    """

    fused: Tensor
    plain: Tensor
    apart: Tensor
    size: Tensor

    @property
    def scale(self) -> Tensor:
        """Root mean square of all rows."""
        return _rms(self.size[None])[0]


def relative_error(have: Tensor, want: Tensor) -> float:
    """Return the rms of `have` - `want` over that of `want`; infinite unless infinities and NaNs agree."""
    have, want = have.double(), want.double()
    same = (have == want) | (have.isnan() & want.isnan())
    difference = torch.where(same, 0.0, have - want)
    scale = want[want.isfinite()].norm() if want.isfinite().any() else torch.tensor(0.0)
    return float(difference.norm() / scale.clamp_min(1e-30)) if bool((~same).any()) else 0.0


def is_like(fused: Any, plain: Any) -> bool:
    """Return True if two results have the same type, and tensors the same shape, dtype and device."""
    if not isinstance(plain, Tensor) or not isinstance(fused, Tensor):
        return type(fused) is type(plain)
    return (fused.shape, fused.dtype, fused.device) == (plain.shape, plain.dtype, plain.device)


def is_close(fused: Any, plain: Any) -> bool:
    """Return True if two results differ by half a unit in the last place of each row at most; integers must be
    equal.
    """
    if not isinstance(plain, Tensor):
        return bool(fused == plain)
    if torch.equal(fused, plain):
        return True
    if not is_inexact(plain):
        return False
    limit = torch.finfo(plain.dtype).eps / 2

    def beyond(fused: Tensor, plain: Tensor) -> Tensor:
        return _distance(fused, plain) > limit * _size(plain)

    return not _by_rows(beyond, fused, plain).any()


def is_inexact(x: Tensor) -> bool:
    """Return True if `x` has rounded numbers: a floating-point or complex dtype."""
    return x.is_floating_point() or x.is_complex()


def distances(fused: Tensor, plain: Tensor, exact: Tensor) -> Distances:
    """Measure inexact results `fused` and `plain` against `exact`, float64 of the plain graph.

    Entries that the plain graph cannot represent are ignored: their number overflows its dtype, or an intermediate
    does.
    """
    largest = torch.finfo(plain.dtype).max

    def measure(fused: Tensor, plain: Tensor, exact: Tensor) -> Tensor:
        near_limit = exact.isfinite() & (exact.abs() > 0.98 * largest)
        free = near_limit | (exact.isfinite() & ~plain.isfinite())
        fused, plain, exact = (each.double().masked_fill(free, 0.0) for each in (fused, plain, exact))
        pairs = ((fused, exact), (plain, exact), (fused, plain))
        return torch.stack([*(_distance(one, other) for one, other in pairs), _size(exact)], -1)

    return Distances(*_by_rows(measure, fused, plain, exact).unbind(-1))


def is_further(measured: Distances, dtype: torch.dtype) -> bool:
    """Return True if the fused result of `measured` may be further from float64 than the plain one by more than
    rounding to `dtype` explains.

    The limit is low: a suspect is judged by float64 of the fused graph. A plain result that is far from float64 itself,
    such as one that breaks a tie differently, does not raise the limit.
    """
    eps = torch.finfo(dtype).eps
    fused, plain = (each / measured.size.clamp_min(1e-300) for each in (measured.fused, measured.plain))
    typical = plain.median()
    noise = (plain + typical).clamp_max(TOLERANCE[dtype])
    limit = (3 * noise + eps) * measured.size
    return bool((measured.fused > limit).any()) or bool(fused.median() > 1.25 * typical + eps / 8)


def other_rows(measured: Distances, wide: Tensor, exact: Tensor, eps: float) -> Tensor:
    """Return the rows, as booleans, in which the fused graph computes something else.

    In these `wide` and `exact`, both graphs in float64, differ by more than an eighth of a unit in the last place,
    `eps`, and the graphs in their own dtype by at least half as much. Otherwise float64 does not represent the plain
    graph: a float16 score that -65504 absorbs remains in float64, for example. `measured` are the distances of the
    result.
    """
    apart = _by_rows(_distance, wide, exact)
    limit = eps / 8 * measured.size + SAME * (measured.size + 1e-3 * measured.scale)
    return (apart > limit) & (measured.apart >= apart / 2)


def gross_rows(away: Tensor, measured: Distances, tolerance: float) -> Tensor:
    """Return the rows, as booleans, whose distance `away` from float64 no rounding explains.

    The limit is 4 times the plain graph's distance, plus `tolerance` of the size of the row and of the result.
    """
    return away > 4 * measured.plain + tolerance * (measured.size + measured.scale)


def unequal_rows(fused: Tensor, *others: Tensor) -> Tensor:
    """Return the rows, as booleans, in which an entry of the exact (integer) result `fused` equals that of none of
    `others`.
    """

    def unequal(fused: Tensor, *others: Tensor) -> Tensor:
        return torch.stack([fused != each for each in others]).all(0).any(-1)

    return _by_rows(unequal, fused, *others)


def farthest(fused: Tensor, exact: Tensor, rows: Tensor) -> tuple[int, ...]:
    """Return the index of the entry of `fused` that is furthest from `exact` in the first of the `rows`."""
    if not fused.dim():
        return ()
    row = rows.nonzero()[0, 0].cpu()
    have, want = (each.reshape(-1, each.shape[-1])[row].cpu().to(torch.complex128) for each in (fused, exact))
    away = torch.where(have == want, 0.0, (have - want).abs()).nan_to_num(torch.inf)
    return (*map(int, torch.unravel_index(row, fused.shape[:-1])), int(away.argmax()))


def _by_rows(measure: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply `measure` to tensors of one shape as rows [rows, D], some at a time, and concatenate its results."""
    flat = [_rows(each) for each in tensors]
    step = max(1, _ENTRIES // max(1, flat[0].shape[1]))
    parts = zip(*(each.split(step) for each in flat), strict=True)
    return torch.cat([measure(*(each.to(flat[0].device) for each in part)) for part in parts])


def _rows(x: Tensor) -> Tensor:
    x = torch.view_as_real(x).flatten(-2) if x.is_complex() else x
    return x.reshape(1, 1) if x.dim() == 0 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the rms of `x` - `y` over each row; infinite where infinities or NaNs do not agree."""
    x, y = x.double(), y.double()
    same = (x == y) | (x.isnan() & y.isnan())
    return _rms(torch.where(same, 0.0, x - y).nan_to_num(torch.inf, torch.inf, torch.inf))


def _size(x: Tensor) -> Tensor:
    return _rms(x.double().nan_to_num(0.0, 0.0, 0.0))


def _rms(x: Tensor) -> Tensor:
    """Return the root mean square of each row of non-negative or finite numbers, without overflow of their squares."""
    if not x.numel():
        return x.new_zeros(x.shape[:-1])
    largest = x.abs().amax(-1, keepdim=True)
    shrunk = x / largest.clamp_min(1e-300)
    rms = shrunk.square().mean(-1).sqrt() * largest[..., 0]
    return torch.where(largest[..., 0].isinf(), torch.inf, rms)
