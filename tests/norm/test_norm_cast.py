"""The norm that a router of experts reads in float32, beside the experts that read it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from fusion.runtime.verification import relative_error

H, E, EPS = 64, 8, 1e-6
CAST, ADDED = "npu::npu_add_rms_norm_cast", "npu::npu_add_rms_norm"
Read = Callable[[Tensor, Tensor], Tensor]


def all_tokens(y: Tensor, router: Tensor) -> Tensor:
    """DeepSeek-V3, GLM-4.5: tokens in one dim, hidden states and weight in float32."""
    return F.linear(y.view(-1, y.shape[-1]).type(torch.float32), router.type(torch.float32))


def as_they_are(y: Tensor, router: Tensor) -> Tensor:
    """MiniMax, Ernie: the weight is kept in float32."""
    return y.to(router.dtype) @ router.mT


def flattened_behind(y: Tensor, router: Tensor) -> Tensor:
    """The cast first."""
    return torch.matmul(y.to(router.dtype).reshape(-1, y.shape[-1]), router.t())


class Layer(nn.Module):
    """The end of an attention block, and what experts and their router read."""

    def __init__(self, read: Read, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(H, generator=generator).to(dtype))
        self.router = nn.Parameter(
            torch.randn(E, H, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
        )
        self.up = nn.Parameter(torch.randn(H, H, generator=generator).to(dtype))
        self.read = read

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        residual = residual + x
        h = residual.to(torch.promote_types(x.dtype, torch.float32))
        y = self.gain * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return y @ self.up.mT, self.read(y, self.router), residual


def inputs(dtype: torch.dtype, *lead: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lead))
    return tuple(torch.randn(*lead, H, generator=generator).to(dtype) for _ in range(2))


READS = (all_tokens, as_they_are, flattened_behind)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lead", [(1, 5), (2, 3), (4,)], ids=str)
@pytest.mark.parametrize("read", READS, ids=lambda each: each.__name__)
def test_it_is_one_call_with_the_sum_and_the_norm(read: Read, lead: tuple[int, ...], dtype: torch.dtype):
    model, given = Layer(read, dtype).requires_grad_(False), inputs(dtype, *lead)
    report = fusion.explain(model, *given, options={"target": "ascend910_93"})
    assert dict(report.ops) == {CAST: 1}, report
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="cann_fusion", options={"target": "ascend910_93"}, dynamic=len(lead) == 1)
    results, plain = compiled(*given), model(*given)
    exact = Layer(read, dtype).to(torch.float64).requires_grad_(False)(*(each.double() for each in given))
    for have, own, truth in zip(results, plain, exact, strict=True):
        assert relative_error(have, truth) <= 1.5 * relative_error(own, truth) + torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("read", "dtype"),
    [
        (all_tokens, torch.float32),  # which is not cast
        (lambda y, router: y.double() @ router.double().mT, torch.bfloat16),
        (lambda y, router: y @ router.to(y.dtype).mT, torch.bfloat16),
    ],
    ids=["in_float32", "to_float64", "no_cast"],
)
def test_what_is_not_widened_to_float32_is_the_norm_alone(read: Any, dtype: torch.dtype):
    report = fusion.explain(Layer(read, dtype), *inputs(dtype, 2, 3), options={"target": "ascend910_93"})
    assert dict(report.ops) == {ADDED: 1}
    assert not [each for each in report.refusals if each.rule == "encoded_norm"]
