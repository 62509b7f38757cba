"""Bands: the contents of a mask that a model stores in a buffer, a matrix of two numbers.

Element [.., i, j] of a band is one number where low ≤ j − i ≤ high, and another elsewhere: `torch.tril` of ones, minus
infinity above the diagonal, a window. A buffer is read when the model is compiled, and again at a call that passes
another tensor, or the same one after a write.
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
    """Return the band that the tensor `x` [*ones, R, C] is; None for other contents, one number, and tensors not read.

    Not read are tensors without data (fake, meta), wrappers of other tensors, and tensors made in inference mode, whose
    writes torch does not count. Synchronises the device once, and a few times more for a matrix like a band.
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
        is_inside = x == inside
        bounds = _diagonals(is_inside)
        if bounds is None or not torch.equal(is_inside, torch.ones_like(is_inside).tril(bounds[1]).triu(bounds[0])):
            continue
        if not bool((is_inside | (x == outside)).all()):
            return None
        (low, high), (rows, columns) = bounds, x.shape
        return Band(None if low == 1 - rows else low, None if high == columns - 1 else high, inside, outside)
    return None


def _diagonals(is_inside: Tensor) -> tuple[int, int] | None:
    """Return the least and largest j - i of the true entries in the first row and column of `is_inside` [R, C].

    Every diagonal begins there. None where both have no true entry.
    """
    row, column = is_inside[0].nonzero(), is_inside[:, 0].nonzero()
    if not len(row) and not len(column):
        return None
    low = -int(column.max()) if len(column) else int(row.min())
    return low, int(row.max()) if len(row) else -int(column.min())
