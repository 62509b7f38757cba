"""Rows that are turned and quantised become one operator where it takes them, and stay two calls elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from tests.engine.graphs import numbers


def quantised(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.float().abs().amax(-1, keepdim=True) / 127
    return (y.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def kept(x: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    y = x @ matrix
    return *quantised(y), y


def blocks(x: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    """One scale of several turned parts."""
    return quantised((x.unflatten(-1, (-1, matrix.shape[0])) @ matrix).flatten(-2))


def halved(x: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    return quantised((x @ matrix).half())


ONE, TWO = {"npu::npu_rotate_quant": 1}, {"npu::npu_dynamic_quant": 1}
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], int, dict[str, int], str]] = {
    "rows": (lambda x, matrix: quantised(x @ matrix), (5, 128), 128, ONE, ""),
    "heads": (lambda x, matrix: quantised(x @ matrix.t()), (2, 3, 4, 128), 128, ONE, ""),
    "scaled": (lambda x, matrix: quantised(x @ matrix * 128**-0.5), (5, 128), 128, ONE, ""),
    "few lanes": (lambda x, matrix: quantised(x @ matrix), (5, 64), 64, TWO, "D >= 128"),
    "many lanes": (lambda x, matrix: quantised(x @ matrix), (5, 1032), 1032, TWO, "K <= 1024"),
    "rows that are kept": (kept, (5, 128), 128, TWO, ""),
    "one scale of two parts": (blocks, (5, 256), 128, TWO, ""),
    "rounded to half between": (halved, (5, 128), 128, TWO, ""),
    "times a negative number": (lambda x, matrix: quantised(x @ matrix * -2), (5, 128), 128, TWO, ""),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.rotates(3)
def test_rows_are_turned_and_quantised_in_one(case: tuple[Any, ...]):
    function, rows, size, expected, reason = case
    x, matrix = (numbers(*shape).bfloat16() for shape in (rows, (size, size)))
    with torch.no_grad():
        report = fusion.explain(function, x, matrix, options={"target": "ascend910_93"})
    assert report.ops == expected
    assert not reason or any(reason in each.reason for each in report.refusals)
