"""What is rounded to whole numbers is seen below casts that keep them."""

from __future__ import annotations

import pytest
import torch

from fusion.analysis.rounding import Rounded, rounded
from fusion.graph import Algebra


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_rounded_numbers_are_kept_by_floats_of_16_bits(dtype: torch.dtype):
    a = Algebra()
    x = a.make("input", (), ("x",), (8,), torch.float32)
    cast = a.cast(a.unary("round", x), dtype)
    bounded = a.make("clip", (cast,), (-128.0, 127.0), (8,), dtype)
    kept = dtype is not torch.float8_e4m3fn  # which makes 128 of 127
    assert rounded(bounded) == (Rounded(x, -128, 127, rounded=True) if kept else Rounded(cast, -128, 127))


def test_rounded_numbers_may_have_other_dims():
    a = Algebra()
    x = a.make("input", (), ("x",), (8,), torch.float32)
    assert rounded(a.reshape(a.unary("round", x), (2, 4))) == Rounded(x, rounded=True)
