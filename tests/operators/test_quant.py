"""What the laws of all operators do not say of those on whole numbers of 8 bits."""

from __future__ import annotations

import pytest
import torch

from fusion.operators import OPERATORS
from tests.operators.cases import DTYPES
from tests.operators.quant_cases import grid
from tests.operators.quant_references import rows

QUANT = OPERATORS["npu::npu_dynamic_quant"].fallback
PRODUCT = OPERATORS["npu::npu_quant_matmul"].fallback
NORM = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].fallback


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_quantised_to_the_nearest_whole_number(dtype: torch.dtype):
    torch.manual_seed(0)
    x = grid(64, 96).to(dtype)
    whole, scale = QUANT(x)
    expected, scales = rows(x.double())
    assert torch.equal(whole.double(), expected)
    torch.testing.assert_close(scale.double(), scales, rtol=1e-7, atol=0)
    assert whole.abs().amax(-1).eq(127).all()


def test_halves_go_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert QUANT(x)[0].tolist() == [[127, 0, 2, 2, 0, -2]]


def test_a_row_of_zeros_has_no_scale_and_no_numbers():
    whole, scale = QUANT(torch.zeros(2, 8, dtype=torch.bfloat16))
    assert not whole.any()
    assert not scale.any()


def test_products_of_whole_numbers_are_exact_however_many():
    """The largest sums, far beyond what float32 counts, and a single one that must not be lost in them."""
    x1 = torch.full((2, 60000), -128, dtype=torch.int8)
    x2 = torch.full((60000, 2), -128, dtype=torch.int8)
    x2[-1, 1] = -127
    ones = torch.ones(2, dtype=torch.float64)
    out = PRODUCT(x1, x2, ones, pertoken_scale=ones, output_dtype=15)
    assert out.tolist() == [[60000 * 128**2, 60000 * 128**2 - 128]] * 2


@pytest.mark.parametrize(("code", "dtype"), [(5, torch.float16), (15, torch.bfloat16)])
def test_a_product_is_rounded_once(code: int, dtype: torch.dtype):
    torch.manual_seed(0)
    x1, x2 = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((9, 64), (64, 32)))
    scale, tokens, bias = torch.rand(32) / 64, torch.rand(9) / 64, torch.randn(32)
    out = PRODUCT(x1, x2, scale, pertoken_scale=tokens, bias=bias, output_dtype=code)
    exact = (x1.double() @ x2.double()) * scale.double() * tokens.double()[:, None] + bias.double()
    assert (out == exact.to(dtype)).double().mean() > 0.999


def test_the_norm_is_quantised_before_it_is_rounded():
    torch.manual_seed(0)
    x1, x2, gamma = (torch.randn(*shape).bfloat16() for shape in ((64, 256), (64, 256), (256,)))
    whole, _, total, scale, _ = NORM(x1, x2, gamma)
    assert torch.equal(total, x1 + x2)
    wide = x1.double() + x2.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma.double()
    agreeing = [(whole.double() == rows(each.double())[0]).double().mean().item() for each in (exact, exact.bfloat16())]
    assert agreeing[0] > 0.999
    assert agreeing[1] < 0.99
    torch.testing.assert_close(scale.double(), exact.abs().amax(-1) / 127, rtol=1e-6, atol=0)
