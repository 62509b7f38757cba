"""Short causal convolutions are reported by the operator that CANN has for them, and what looks ahead is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, causal_conv1d_update

import fusion

B, C, K = 2, 8, 4
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def rolled(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """A state whose oldest token is dropped, weighed and summed."""
    state.copy_(torch.roll(state, shifts=-1, dims=-1))
    state[:, :, -1] = x[:, :, 0]
    return F.silu((state * weight[:, 0]).sum(-1))


def shifted(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    after = torch.cat((state[..., 1:], x), -1)
    state.copy_(after)
    return F.silu(torch.sum(after * weight.squeeze(1), dim=-1))


def padded(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.conv1d(x, weight, padding=K - 1, groups=C)[..., : x.shape[-1]])


def behind(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.conv1d(F.pad(x, (K - 1, 0)), weight, groups=C))


FORMS: dict[str, tuple[Call, int, str]] = {
    "transformers, a token": (lambda x, s, w: causal_conv1d_update(x, s, w.squeeze(1), None, "silu"), 1, "update"),
    "transformers": (lambda x, s, w: causal_conv1d_fn(x, w.squeeze(1), None, "silu"), 9, "fn"),
    "rolled": (rolled, 1, "update"),
    "shifted": (shifted, 1, "update"),
    "padded": (padded, 9, "fn"),
    "behind zeros": (behind, 9, "fn"),
}
OTHERS: dict[str, tuple[Call, int]] = {
    "tokens behind": (lambda x, s, w: F.conv1d(x, w, padding=K - 1, groups=C)[..., K - 1 :], 9),
    "on both sides": (lambda x, s, w: F.conv1d(x, w[..., :3], padding=1, groups=C), 9),
    "every second token": (lambda x, s, w: F.conv1d(x, w, stride=2, groups=C), 9),
    "dilated": (lambda x, s, w: F.conv1d(x, w, dilation=2, groups=C), 9),
    "channels that are mixed": (lambda x, s, w: F.conv1d(x, w.expand(-1, 2, -1), groups=C // 2), 9),
    "the oldest token": (lambda x, s, w: (torch.cat((x, s[..., :-1]), -1) * w[:, 0]).sum(-1), 1),
    "scores of four keys": (lambda x, s, w: (s * w[:, 0]).sum(-1), 1),
}


def reasons(call: Call, tokens: int) -> list[str]:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(C, 1, K).bfloat16(), requires_grad=False)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return call(x, state, self.weight)

    given = torch.ones(B, C, tokens).bfloat16(), torch.ones(B, C, K).bfloat16()
    report = fusion.explain(Module(), *given, options={"target": "ascend910_93"})
    return [each.reason for each in report.refusals if each.rule == "causal_conv1d"]


@pytest.mark.parametrize("name", FORMS)
def test_a_convolution_is_reported_once(name: str):
    call, tokens, form = FORMS[name]
    (reason,) = reasons(call, tokens)
    assert f"causal_conv1d_{form} of cann_ops_transformer requires an Ascend 950" in reason


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.rotates(6)
def test_what_is_no_causal_convolution_is_not_called_one(name: str):
    assert not reasons(*OTHERS[name])
