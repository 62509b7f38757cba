"""Storage formats: whether a tensor is in FRACTAL_NZ, which no shape shows and only an NPU can report.

A matrix [R, C] in FRACTAL_NZ is stored in blocks [C / L, R, L], where L elements are 32 bytes. Where C is L, both
formats have the same layout: pages that a model stores in lines of NZ, [.., R, L], have the same bytes in either, and
`npu_format_cast(pages, 29)` changes none. All the same, an operator may distinguish lines from rows by the format alone
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
    """Return True if pages [Block, .., R, L] have the same bytes in FRACTAL_NZ: L elements are 32 bytes, 16 divides
    R.
    """
    if len(shape) < 4 or dtype is None:
        return False
    rows, line = shape[-2:]
    known = isinstance(rows, int) and isinstance(line, int)
    return known and line * dtype.itemsize == _LINE and rows % _ROWS == 0


def may_be_fractal(x: Any) -> bool:
    """Return True if `x` is a tensor whose bytes are the same in FRACTAL_NZ, as `holds_lines` tests."""
    return isinstance(x, Tensor) and holds_lines(x.shape, x.dtype)


def supposed_fractal(x: Any) -> bool:
    """Return True if `x` is taken to be in FRACTAL_NZ: unless an NPU reports another format."""
    return is_fractal(x) is not False


def is_fractal(x: Any) -> bool | None:
    """Return True if `x` is in FRACTAL_NZ; None where no NPU can report it: for fake tensors and other devices."""
    npu = sys.modules.get("torch_npu")
    if npu is None or not isinstance(x, Tensor) or isinstance(x, FakeTensor) or x.device.type != "npu":
        return None
    return int(npu.get_npu_format(x)) == _NUMBER
