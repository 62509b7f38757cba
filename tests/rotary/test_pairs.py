"""Queries and keys whose interleaved pairs are turned alike: two calls, as no operator of A2 and A3 takes both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion

B, S, N, M, D = 2, 3, 8, 2, 64
JOINT, SINGLE = "npu::npu_apply_rotary_pos_emb", "npu::npu_rotary_mul"


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Cohere, GLM: pairs of neighbours."""
    other = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos + other * sin


def complex_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's own code: pairs as complex numbers."""
    turns = torch.complex(cos[..., ::2].float(), sin[..., ::2].float())
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns).flatten(-2).type_as(x)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama of transformers."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def both(rotate):
    return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))


def inputs(repeated) -> tuple[Tensor, ...]:
    angles = repeated(torch.rand(B, S, 1, D // 2))
    q, k = (torch.randn(B, S, heads, D) for heads in (N, M))
    return tuple(each.bfloat16() for each in (q, k, angles.cos(), angles.sin()))


@pytest.mark.parametrize("rotate", [pairs, complex_pairs])
def test_they_take_two_calls_and_the_report_says_why(rotate):
    given = inputs(lambda angles: angles.repeat_interleave(2, -1))
    report = fusion.explain(both(rotate), *given, options={"target": "ascend910_93"})
    assert dict(report.ops) == {SINGLE: 2}
    told = [each.reason for each in report.refusals if each.rule == "rope"]
    assert told
    assert all("they are in interleaved order (2j, 2j + 1)" in each for each in told)


def test_halves_take_one_and_nothing_is_said():
    given = inputs(lambda angles: angles.repeat(1, 1, 1, 2))
    report = fusion.explain(both(halves), *given, options={"target": "ascend910_93"})
    assert dict(report.ops) == {JOINT: 1}
    assert not [each for each in report.refusals if each.rule == "rope"]


def test_of_queries_alone_nothing_is_said():
    q, _, cos, sin = inputs(lambda angles: angles.repeat_interleave(2, -1))
    report = fusion.explain(pairs, q, cos, sin, options={"target": "ascend910_93"})
    assert dict(report.ops) == {SINGLE: 1}
    assert not [each for each in report.refusals if each.rule == "rope"]
