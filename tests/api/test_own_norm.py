"""A fused norm of another package, whose form is made of words of this one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

import fusion
from tests.api.third_party import add_layer_norm_quant as package

NAME = "own_norms::add_layer_norm_quant"


def block(a: Tensor, b: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = a + b
    rows = layer_norm(total, gamma.shape, gamma, beta, 1e-5).float()
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round().to(torch.int8), scale, total


def inputs(width: int) -> tuple[Tensor, ...]:
    shapes = (3, 7, width), (3, 7, width), (width,), (width,)
    draw = torch.Generator().manual_seed(5)
    return tuple(torch.randn(each, generator=draw).bfloat16() for each in shapes)


@pytest.mark.parametrize(("width", "ops"), [(64, {NAME: 1}), (48, None)])
def test_it_is_planned_where_its_limits_allow(width: int, ops: dict[str, int] | None):
    rules = fusion.installed() + package.library()
    report = fusion.explain(block, *inputs(width), rules=rules, options={"target": "ascend910_93"})
    assert report.ops == ops if ops else NAME not in report.ops
    assert ops or any("D % 32 == 0" in each.reason for each in report.refusals)


def test_it_computes_what_the_model_computes():
    given, rules = inputs(64), fusion.installed() + package.library()
    run = torch.compile(block, backend=fusion.FusionBackend({"target": "host", "lower": "eager"}, rules))
    with torch.no_grad():
        numbers, scale, total = run(*given)
    exact, wide, summed = block(*(each.double() for each in given))
    assert (numbers.int() - exact.int()).abs().max() <= 1
    for have, want in ((scale, wide), (total, summed)):
        torch.testing.assert_close(have.double(), want.double(), rtol=2e-2, atol=1e-2)
