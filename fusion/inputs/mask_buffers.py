"""Bands: what a buffer holds where it is a mask that a model made once, a matrix of two numbers.

Element [.., i, j] of a band is one number where low ≤ j − i ≤ high, and another elsewhere: `torch.tril` of ones, minus
infinity above the diagonal, a window. A buffer is read when the model is compiled, and at every call that passes
another tensor, or one that was written to since.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion.facts import Band

_MOST = 2**26  # elements of a buffer that is read
_READ = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
}  # fmt: skip


def band_of(x: Any) -> Band | None:
    """Which band a tensor [*ones, R, C] holds; None of any other, of one number throughout, and of what is not read.

    Not read is what has no numbers (fake, meta), what wraps other tensors, and what was made in inference mode: torch
    counts no writes to it. Waits for the device once, a few times more of what looks like a band.
    """
    if type(x) is not Tensor or x.dtype not in _READ or x.is_meta or x.is_inference():
        return None
    if x.dim() < 2 or min(x.shape[-2:]) < 2 or any(size != 1 for size in x.shape[:-2]) or x.numel() > _MOST:
        return None
    with unset_fake_temporarily(), torch.no_grad():
        return _read(x.reshape(x.shape[-2:]))


def _read(x: Tensor) -> Band | None:
    numbers = sorted(set(torch.cat((x[0], x[-1])).tolist()))
    if len(numbers) != 2:
        return None
    for outside, inside in (numbers, numbers[::-1]):
        held = x == inside
        found = _diagonals(held)
        if found is None or not torch.equal(held, torch.ones_like(held).tril(found[1]).triu(found[0])):
            continue
        if not bool((held | (x == outside)).all()):
            return None
        (low, high), (rows, columns) = found, x.shape
        return Band(None if low == 1 - rows else low, None if high == columns - 1 else high, inside, outside)
    return None


def _diagonals(held: Tensor) -> tuple[int, int] | None:
    """The least and the largest j - i of what is true in the first row and column: each diagonal begins in one."""
    row, column = held[0].nonzero(), held[:, 0].nonzero()
    if not len(row) and not len(column):
        return None
    low = -int(column.max()) if len(column) else int(row.min())
    return low, int(row.max()) if len(row) else -int(column.min())
