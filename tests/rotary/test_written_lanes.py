"""Rotations whose lanes are changed in place: products of the sines added into slices of those of the cosines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion.options import Options
from fusion.testing import capture, trial_of
from tests.engine.graphs import names

NPU = Options(target="ascend910_93", lower="eager")
SHAPE, D = (2, 4, 16, 64), 64
H = D // 2
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) by their definition."""
    return torch.cat([x[..., :H] * cos - x[..., H:] * sin, x[..., H:] * cos + x[..., :H] * sin], -1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i + 1]) by their definition."""
    return torch.stack([x[..., ::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., ::2] * sin], -1).flatten(-2)


def rows_by_addcmul(x, cos, sin):
    """LTX-2."""
    y, c, s = x.unflatten(-1, (2, H)), cos.unsqueeze(-2), sin.unsqueeze(-2)
    out = y * c
    out[..., :1, :].addcmul_(-s, y[..., 1:, :])
    out[..., 1:, :].addcmul_(s, y[..., :1, :])
    return out.flatten(-2)


def selected_rows(x, cos, sin):
    y = x.unflatten(-1, (2, H))
    out = y * cos.unsqueeze(-2)
    out.select(-2, 0).addcmul_(y[..., 1, :], sin, value=-1)
    out.select(-2, 1).addcmul_(y[..., 0, :], sin)
    return out.flatten(-2)


def added_to_halves(x, cos, sin):
    out = x * torch.cat([cos, cos], -1)
    out[..., :H] -= x[..., H:] * sin
    out[..., H:] += x[..., :H] * sin
    return out


def narrowed_halves(x, cos, sin):
    out = x * torch.cat([cos, cos], -1)
    out.narrow(-1, H, H).add_(x.narrow(-1, 0, H) * sin)
    out.narrow(-1, 0, H).sub_(x.narrow(-1, H, H).mul(sin))
    return out


def chunks_of_a_buffer(x, cos, sin):
    first, second = x.chunk(2, -1)
    out = torch.empty_like(x)
    low, high = out.chunk(2, -1)
    low.copy_(first * cos).addcmul_(second, sin, value=-1)
    high.copy_(second * cos).addcmul_(first, sin)
    return out


def out_of_place(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([torch.addcmul(first * cos, second, -sin), torch.addcmul(second * cos, first, sin)], -1)


def from_zeros(x, cos, sin):
    out = torch.zeros_like(x)
    out[..., :H] += x[..., :H] * cos
    out[..., :H] -= x[..., H:] * sin
    out[..., H:] += x[..., H:] * cos + x[..., :H] * sin
    return out


def strided_lanes(x, cos, sin):
    out = x * cos.repeat_interleave(2, -1)
    out[..., ::2].addcmul_(x[..., 1::2], sin, value=-1)
    out[..., 1::2].addcmul_(x[..., ::2], sin)
    return out


def selected_lanes(x, cos, sin):
    y = x.unflatten(-1, (H, 2))
    out = y * cos.unsqueeze(-1)
    out[..., 0].addcmul_(y[..., 1], sin, value=-1)
    out[..., 1].addcmul_(y[..., 0], sin)
    return out.flatten(-2)


HALVES: tuple[Form, ...] = (
    rows_by_addcmul, selected_rows, added_to_halves, narrowed_halves, chunks_of_a_buffer, out_of_place, from_zeros,
)  # fmt: skip
PAIRS: tuple[Form, ...] = (strided_lanes, selected_lanes)
CASES = [*((form, halves) for form in HALVES), *((form, pairs) for form in PAIRS)]


def fused_result(form: Form) -> tuple[list[str], Tensor, tuple[Tensor, ...]]:
    """Calls, result and inputs of the fused `form` in bfloat16."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE, generator=generator).bfloat16()
    angles = torch.rand(SHAPE[2], H, generator=generator) * 6
    inputs = x, angles.cos().bfloat16(), angles.sin().bfloat16()
    trial = trial_of(capture(form, inputs), NPU)
    (result,) = trial.fused(*trial.inputs())
    return names(trial.fused), result, inputs


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("form", "reference"), CASES, ids=[form.__name__ for form, _ in CASES])
@pytest.mark.rotates(3)
def test_lanes_that_are_changed_in_place_are_rotated(form: Form, reference: Form):
    calls, result, inputs = fused_result(form)
    assert [each for each in calls if each.startswith("npu.")] == ["npu.npu_rotary_mul.default"]
    assert error(result, reference(*(each.double() for each in inputs))) < 4e-3


def two_minus(x, cos, sin):
    out = x * torch.cat([cos, cos], -1)
    out[..., :H].addcmul_(x[..., H:], sin, value=-1)
    out[..., H:].addcmul_(x[..., :H], sin, value=-1)
    return out


def twice(x, cos, sin):
    """A third product in half of the lanes."""
    out = rows_by_addcmul(x, cos, sin)
    out[..., :H].addcmul_(x[..., :H], sin)
    return out


def of_changed_lanes(x, cos, sin):
    """The second half adds what the first has become."""
    out = x * torch.cat([cos, cos], -1)
    out[..., :H].addcmul_(x[..., H:], sin, value=-1)
    out[..., H:].addcmul_(out[..., :H], sin)
    return out


def one_half(x, cos, sin):
    out = x * torch.cat([cos, cos], -1)
    out[..., :H].addcmul_(x[..., H:], sin, value=-1)
    return out


@pytest.mark.parametrize("form", [two_minus, twice, of_changed_lanes, one_half], ids=lambda form: form.__name__)
def test_other_sums_of_products_keep_their_numbers(form: Form):
    _, result, inputs = fused_result(form)
    assert error(result, form(*(each.double() for each in inputs))) < 6e-3
