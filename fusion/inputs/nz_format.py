"""Storage formats, which no shape shows: whether a tensor lies in FRACTAL_NZ, as only an NPU can tell.

A matrix [R, C] in FRACTAL_NZ lies in blocks [C / L, R, L], a line of L elements being 32 bytes. Where C is L it lies so
anyway: pages that a model keeps in lines of NZ, [.., R, L], hold the same bytes in either format, and
`npu_format_cast(pages, 29)` changes none. An operator may tell lines from rows by the format alone all the same
(op-plugin: GatherPaKvCacheKernelNpuOpApi.cpp); `npu_scatter_pa_kv_cache` documents its caches in FRACTAL_NZ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_NUMBER, _LINE, _ROWS = 29, 32, 16


def holds_lines(shape: Sequence[Any], dtype: torch.dtype | None) -> bool:
    """Whether [Block, .., R, L] holds the same bytes in FRACTAL_NZ: lines of 32 bytes, R a multiple of 16."""
    if len(shape) < 4 or dtype is None:
        return False
    rows, line = shape[-2:]
    known = isinstance(rows, int) and isinstance(line, int)
    return known and line * dtype.itemsize == _LINE and rows % _ROWS == 0


def may_be_fractal(x: Any) -> bool:
    """Whether x is a tensor that holds such lines."""
    return isinstance(x, Tensor) and holds_lines(x.shape, x.dtype)


def supposed_fractal(x: Any) -> bool:
    """Whether such a tensor is taken to lie in FRACTAL_NZ: unless an NPU says that it does not."""
    return is_fractal(x) is not False


def is_fractal(x: Any) -> bool | None:
    """Whether a tensor lies in FRACTAL_NZ; None where that cannot be asked: of a fake one, elsewhere than on an NPU."""
    npu = sys.modules.get("torch_npu")
    if npu is None or not isinstance(x, Tensor) or isinstance(x, FakeTensor) or x.device.type != "npu":
        return None
    return int(npu.get_npu_format(x)) == _NUMBER
