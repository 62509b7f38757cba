"""One scale for all heads and lanes of a token is that of one row, whatever the order of the dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.options import Options
from fusion.testing import LEVELS, Level, Trial, capture, means_what_it_says, trial_of
from tests.engine.graphs import numbers

B, S, M, D = 2, 3, 4, 32
Form = Callable[[Tensor], Any]


def quantised(x: Tensor, dims: tuple[int, ...], least: float = 1e-8) -> tuple[Tensor, Tensor]:
    """By the largest magnitude over `dims`, in float32."""
    scale = x.float().abs().amax(dims, keepdim=True).clamp(min=least) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def tokens_first(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, (-2, -1))


def heads_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [B, M, S, D]."""
    return quantised(x.transpose(1, 2), (1, 3))


def without_dims(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scale without the dims of one entry, multiplied by its inverse."""
    scale = x.abs().amax((2, 3)).float() / 127
    return torch.clamp(torch.round(x * (1 / scale)[..., None, None]), -127, 127).to(torch.int8), scale


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude in place of the scale."""
    most = x.float().abs().amax((-1, -2), keepdim=True)
    return (x.float() * (127 / most)).round().to(torch.int8), most


def of_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [T, M, D]."""
    return quantised(x.flatten(0, 1), (1, 2))


def tried(form: Form, dtype: torch.dtype, level: Level) -> Trial:
    options = Options(target="ascend910_93", lower="eager", plan_cache="off")
    return trial_of(capture(form, (numbers(B, S, M, D).to(dtype),), level), options)


def operators(t: Trial) -> list[str]:
    return [str(each.target).split(".")[1] for each in t.fused.graph.nodes if str(each.target).startswith("npu.")]


@pytest.mark.rotates(12)
@pytest.mark.parametrize("form", [tokens_first, heads_first, without_dims, largest, of_tokens])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_they_are_one_operator(form: Form, dtype: torch.dtype, level: Level):
    t = tried(form, dtype, level)
    assert not t.outcome.failures
    assert operators(t) == ["npu_dynamic_quant"]
    means_what_it_says(t)


def of_a_channel(x: Tensor) -> tuple[Tensor, Tensor]:
    """The dims of the scale are those of others than of the rows that are divided."""
    scale = x.float().abs().amax((1, 2), keepdim=True) / 127
    return (x.transpose(1, 3).float() / scale.transpose(1, 3)).round().to(torch.int8), scale


def of_other_dims(x: Tensor) -> tuple[Tensor, Tensor]:
    """As many scales, which divide other numbers."""
    square = x[:, :, :S]
    scale = square.float().abs().amax((2, 3)) / 127
    return (square.float() / scale[:, None, :, None]).round().to(torch.int8), scale


def of_the_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, (0, 1, 2, 3))


@pytest.mark.parametrize("form", [of_other_dims, of_the_tensor])
def test_what_is_divided_by_other_scales_is_none(form: Form):
    t = tried(form, torch.bfloat16, "composite")
    assert operators(t) == []
    assert [each.reason for each in t.outcome.refusals if each.rule == "quantisation"]


def test_rows_may_be_turned_behind_their_scales():
    t = tried(of_a_channel, torch.bfloat16, "composite")
    assert not t.outcome.failures
    means_what_it_says(t)
