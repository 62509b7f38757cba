"""What the laws of all operators do not say of those on int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion.operators import OPERATORS
from tests.operators.cases import DTYPES
from tests.operators.quant_cases import grid
from tests.operators.quant_references import rows

QUANT = OPERATORS["npu::npu_dynamic_quant"].fallback
PRODUCT = OPERATORS["npu::npu_quant_matmul"].fallback
NORM = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].fallback
STATIC_SUM = OPERATORS["npu::npu_add_rms_norm_quant"].fallback
STATIC = OPERATORS["npu::npu_rms_norm_quant"].fallback


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


def test_a_static_norm_is_quantised_before_it_is_rounded():
    """In bfloat16; the float16 kernel multiplies by the gain in float16, and with an offset the sum is rounded."""
    torch.manual_seed(0)
    x1, x2, gamma, beta = (torch.randn(*shape, dtype=torch.float64) for shape in ((64, 256), (64, 256), (256,), (256,)))
    exact = {
        dtype: [each.to(dtype).double() for each in (x1, x2, gamma, beta)] for dtype in (torch.bfloat16, torch.float16)
    }

    def share(dtype: torch.dtype, expected: Tensor, **more: Tensor) -> float:
        """How many whole numbers are those expected, by scales of 1 / 32."""
        scale = torch.full((256,), 1 / 32, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        whole, other, total = STATIC_SUM(*(each.to(dtype) for each in (x1, x2, gamma)), scale, None, **more)
        assert torch.equal(total, x1.to(dtype) + x2.to(dtype))
        assert not other.any()
        return (whole.double() == (expected * 32).round().clamp(-128, 127)).double().mean().item()

    def unit(total: Tensor) -> Tensor:
        return total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    a, b, gain, line = exact[torch.bfloat16]
    assert share(torch.bfloat16, unit(a + b) * gain) > 0.999
    assert share(torch.bfloat16, (unit(a + b) * gain).bfloat16().double()) < 0.99
    rounded = (a + b).bfloat16().double()
    assert share(torch.bfloat16, unit(rounded) * gain + line, beta=beta.bfloat16()) > 0.999
    assert share(torch.bfloat16, unit(a + b) * gain + line, beta=beta.bfloat16()) < 0.99
    a, b, gain, _ = exact[torch.float16]
    n = (unit((a + b).half().double()).half() * gain.half()).double()
    assert share(torch.float16, n) > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_static_norm_alone_divides_and_is_rounded_to_float16_between(dtype: torch.dtype):
    torch.manual_seed(0)
    x, gamma, beta = (torch.randn(*shape).to(dtype) for shape in ((64, 256), (256,), (256,)))
    scale, zero = torch.tensor([1 / 64], dtype=dtype), torch.tensor([-7], dtype=torch.int8)
    whole = STATIC(x, gamma, beta, scale, zero).double()
    wide = x.double()
    n = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma.double() + beta.double()
    once = n * 64 - 7
    twice, once = (each.round().clamp(-128, 127) for each in (once.half().double(), once))
    assert (whole == twice).double().mean() > 0.999
    assert 0.9 < (whole == once).double().mean() < 0.999
