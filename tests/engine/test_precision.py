"""No plan holds a number in less range than the model gives it, and float64 is not demoted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion import Rule, bounded, lowering, pattern, rounding, tensor
from fusion.frontend.library import installed
from fusion.language import Refused
from fusion.options import Options
from fusion.testing import Trial, capture, trial_of

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
A3 = Options(target="ascend910_93", lower="eager")
Code = Callable[..., Any]


def fused(function: Code, *inputs: Tensor, library: fusion.Library | None = None) -> Trial:
    return trial_of(capture(function, inputs), A3, library)


def rules(t: Trial) -> list[str]:
    return sorted(each.match.rule.name for each in t.outcome.chosen)


def reasons(t: Trial) -> str:
    return "\n".join(each.reason for each in t.outcome.refusals)


def same(t: Trial, **tolerance: float) -> None:
    """The fused graph gives what the original gives."""
    torch.testing.assert_close(t.fused(*t.inputs()), t.captured.graph(*t.captured.inputs), **tolerance)


def full(value: float, dtype: torch.dtype = F16) -> Tensor:
    return torch.full((1, 2, 64), value, dtype=dtype)


# sums ---------------------------------------------------------------------------------------------------------------


def norm(h: Tensor, dtype: torch.dtype) -> Tensor:
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


def sum_in_float32(x, r, g):
    return norm(x.float() + r.float(), x.dtype) * g


def both_in_float32(x, r, g):
    h = x.float() + r.float()
    return norm(h, x.dtype) * g, h.to(x.dtype)


def rounded_sum(x, r, g):
    h = x + r
    return norm(h.float(), x.dtype) * g, h


@pytest.mark.parametrize("function", [sum_in_float32, both_in_float32])
def test_a_sum_that_overflows_float16_is_added_as_the_model_adds_it(function: Code):
    t = fused(function, full(40000.0), full(30000.0), torch.ones(64, dtype=F16))
    same(t, atol=1e-2, rtol=1e-2)
    said = "the sum of the addends: the model holds it in float32; the operator requires it in float16"
    assert said in reasons(t)


@pytest.mark.parametrize(("function", "dtype"), [(rounded_sum, F16), (both_in_float32, BF16), (sum_in_float32, BF16)])
def test_a_sum_is_part_of_the_norm_where_its_range_is_that_of_the_model(function: Code, dtype: torch.dtype):
    inputs = (torch.randn(1, 2, 64).to(dtype) for _ in range(2))
    t = fused(function, *inputs, torch.ones(64, dtype=dtype))
    assert rules(t) == ["add_norm"]
    assert "npu_add_rms_norm" in str(t.fused.graph)


@pytest.mark.parametrize("value", [1e-7, 1e5])
def test_a_gain_that_float16_does_not_hold_is_not_rounded_to_it(value: float):
    t = fused(lambda x, r, g: (norm((x + r).float(), F32) * g).half(), full(1e-4), full(2e-4), torch.full((64,), value))
    same(t)
    assert "npu_add_rms_norm" not in str(t.fused.graph)


def test_a_gain_of_1_and_a_weight_in_float16_is_within_it():
    x, r = torch.randn(2, 1, 2, 64).half()
    t = fused(lambda x, r, w: (norm((x + r).float(), F32) * (1 + w.float())).half(), x, r, torch.randn(64).half())
    assert rules(t) == ["add_norm"]


# products and scales ------------------------------------------------------------------------------------------------


def divided(x, g, s):
    return (norm(x.float(), x.dtype) * g / s).round().clamp(-128, 127).to(torch.int8)


def test_a_factor_that_only_the_rewrite_would_compute_is_not_built_in_float16():
    """γ / s is 4 · 10⁵ where neither γ nor s is near an end of float16."""
    x, g, s = (
        torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).half(),
        torch.full((64,), 1e-5).half(),
        torch.full((1,), 2e-6).half(),
    )
    same(fused(divided, x, g, s))


def behind(x, w, s):
    return ((x @ w.to(x.dtype).t()).float() * s).to(x.dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_scale_behind_a_product_is_not_multiplied_into_the_weight_in_float16(dtype: torch.dtype):
    w, s = torch.randint(-2, 2, (8, 64), dtype=torch.int8), torch.full((8,), 60000.0)
    t = fused(behind, torch.full((2, 64), 1e-3, dtype=dtype), w, s)
    assert ("the weight times its scale: the model holds it in float32" in reasons(t)) == (dtype is F16)
    same(t, atol=1e-2, rtol=1e-2)


def by_token(x, dtype):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    kept = scale.to(dtype)
    return (x.float() / kept.float()).round().clamp(-128, 127).to(torch.int8), kept


def test_rows_are_not_divided_by_other_scales_than_the_model_keeps_in_float16():
    t = fused(lambda x: by_token(x, F16), torch.randn(4, 64).half() * 1e-4)
    assert rules(t) == []
    assert "the model divides by them in float16" in reasons(t)
    same(t)
    assert rules(fused(lambda x: by_token(x, F32), torch.randn(4, 64).half())) == ["quantisation"]


# rules that say nothing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgetful(Rule):
    """abs(x) · 4, by way of a larger number."""

    def reference(self, x: Tensor) -> Tensor:
        """Four times the magnitude."""
        return x.abs() * 4

    @pattern
    def written(self, p, x=tensor("*B D")):
        """A magnitude times 4."""
        return p.scale(p.op("abs", x), 4.0)

    @lowering
    def run(self, x: Tensor):
        """The same of a larger number."""
        return torch.ops.npu.npu_swiglu(torch.cat((x * 8, x), -1))


@dataclass(frozen=True)
class Stated(Forgetful):
    """The same with a statement."""

    @lowering
    def run(self, x: Tensor):
        """The same."""
        with bounded():
            larger = x * 8
        return torch.ops.npu.npu_swiglu(torch.cat((larger, x), -1))


@pytest.mark.parametrize(("rule", "dtype", "count"), [
    (Forgetful(), F16, 0), (Forgetful(), BF16, 1), (Stated(), F16, 1),
])  # fmt: skip
def test_what_a_lowering_computes_in_float16_without_a_word_is_refused(rule: Rule, dtype: torch.dtype, count: int):
    library = replace(installed(), rules=(rule,))
    t = fused(lambda x: x.abs() * 4, torch.ones(64, 64, dtype=dtype), library=library)
    cheap = [each for each in t.outcome.refusals if "the result of mul: the model does not hold it" in each.reason]
    assert len(t.outcome.chosen) == count or count
    assert bool(cheap) == (dtype is F16 and not count)


def test_statements_refuse_what_has_more_range():
    with rounding("a sum", BF16, BF16), rounding("a sum", F32, BF16):
        pass
    for held, to in ((F32, F16), (BF16, F16), (F64, F32), (F64, BF16)):
        with pytest.raises(Refused, match="a sum: the model holds it in"), rounding("a sum", held, to):
            raise AssertionError


# float64 ------------------------------------------------------------------------------------------------------------


def route(x, b):
    scores = x.sigmoid()
    experts = (scores + b).topk(4, -1)[1]
    weights = scores.gather(1, experts)
    return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20)


def wide_norm(x, b):
    return norm(x, x.dtype) * b


def narrow_norm(x, b):
    return norm(x.float(), x.dtype) * b


def gated(x, b):
    a, c = (x * b).chunk(2, -1)
    return torch.nn.functional.silu(a) * c


@pytest.mark.parametrize("function", [route, wide_norm, narrow_norm, gated])
def test_float64_is_computed_in_float64_on_a_host_and_by_no_operator_of_a_chip(function: Code):
    x, b = torch.randn(32, 64).double(), torch.randn(64).double()
    x[:, 1], b[1] = x[:, 0] + 1e-12, b[0]
    b[:2] += 5
    host = trial_of(capture(function, (x, b)), Options(target="host", lower="eager"))
    same(host, rtol=1e-12, atol=0)
    chip = fused(function, x, b)
    assert "npu." not in str(chip.fused.graph), chip.fused.graph
    assert "float64" in reasons(chip)
