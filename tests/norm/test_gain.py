"""A gain of 1 + weight in float32 (Gemma) beside the residual add: rounded once, within a bound that is reported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.runtime.verification import relative_error

D, EPS = 640, 1e-6
OPTIONS = {"target": "ascend910_93", "plan_cache": "off"}
ADDED = "npu::npu_add_rms_norm"
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Layer(nn.Module):
    """The residual add and the norm that follows, as Gemma has it; `shift` is added to its weight."""

    def __init__(self, weight: Tensor, shift: float = 1.0) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(weight, requires_grad=False), shift

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        wide = h.to(torch.promote_types(h.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return (wide * (self.shift + self.weight.to(wide.dtype))).type_as(h), h


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(32, D, generator=generator).to(dtype) for _ in range(2))


def errors(model: Layer, dtype: torch.dtype) -> tuple[float, float]:
    """Of the norm, fused and as the model has it, each against float64."""
    given = inputs(dtype)
    exact = Layer(model.weight.double(), model.shift)(*(each.double() for each in given))[0]
    torch._dynamo.reset()
    fused = torch.compile(model, backend="cann_fusion", options=dict(OPTIONS, lower="eager"))(*given)[0]
    return relative_error(fused, exact), relative_error(model(*given)[0], exact)


@HALVES
def test_gains_as_models_have_them_stay_within_half_as_much_again(dtype: torch.dtype):
    model = Layer((0.3 * torch.randn(D, generator=torch.Generator().manual_seed(3))).to(dtype))
    report = fusion.explain(model, *inputs(dtype), options=OPTIONS)
    assert dict(report.ops) == {ADDED: 1}
    (match,) = report.matches
    assert "1 + weight is rounded once" in match.remark
    assert "no more than by the rounding of the result" in match.remark
    fused, plain = errors(model, dtype)
    assert fused <= 1.5 * plain


@HALVES
def test_gains_that_all_lie_between_two_numbers_stay_within_one_rounding_more(dtype: torch.dtype):
    half = torch.finfo(dtype).eps / 2
    fused, plain = errors(Layer(torch.full((D,), 0.98 * half).to(dtype)), dtype)
    assert fused <= 1.5 * plain + half


def test_in_float32_nothing_is_rounded_and_nothing_said():
    model = Layer(0.3 * torch.randn(D, generator=torch.Generator().manual_seed(3)))
    report = fusion.explain(model, *inputs(torch.float32), options=OPTIONS)
    assert dict(report.ops) == {ADDED: 1}
    assert not report.matches[0].remark
    fused, plain = errors(model, torch.float32)
    assert fused <= 1.5 * plain + torch.finfo(torch.float32).eps


def test_a_gain_of_two_and_the_weight_is_rounded_as_it_is():
    model = Layer((0.3 * torch.randn(D, generator=torch.Generator().manual_seed(3))).bfloat16(), shift=2.0)
    report = fusion.explain(model, *inputs(torch.bfloat16), options=OPTIONS)
    assert dict(report.ops) == {ADDED: 1}
    assert "gain gamma is rounded once to bfloat16" in report.matches[0].remark
    fused, plain = errors(model, torch.bfloat16)
    assert fused <= 1.5 * plain


def test_a_sum_with_a_row_is_no_residual_add():
    model, (x, residual) = Layer(torch.zeros(D).bfloat16()), inputs(torch.bfloat16)
    report = fusion.explain(model, x, residual[:1], options=OPTIONS)
    assert ADDED not in report.ops
    assert any("one of them is broadcast or multiplied" in each.reason for each in report.refusals)
