"""Steps of gated delta rules as several projects write them: results over 64 tokens, launches, reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import fusion

B, M, N, D, TOKENS = 2, 2, 4, 16, 64
A3 = {"target": "ascend910_93", "lower": "eager"}
ON = {**A3, "opt_in": {"delta_rule"}}
RULE = "npu::npu_recurrent_gated_delta_rule"
Step = Callable[..., Tensor]


def token(number: int, heads: int, lanes: bool = False) -> tuple[Tensor, ...]:
    """q, k, v in bfloat16, a log decay of heads or of key lanes in float32, beta in bfloat16, for one token."""
    generator = torch.Generator().manual_seed(number)
    q, k = (torch.randn(B, 1, heads, D, generator=generator).bfloat16() for _ in "qk")
    v, b = (torch.randn(B, 1, N, *each, generator=generator).bfloat16() for each in ((D,), ()))
    return q, k, v, -torch.rand(B, 1, N, *[D] * lanes, generator=generator) / 4, b.sigmoid()


def exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The step [B, 1, N, D] in float64, head by head, with the l2 norms, of a state [B, N, K, V]."""
    q, k, v, g, beta, state = (each.double() for each in (q, k, v, g, beta, state))
    y, after = torch.empty_like(v), torch.empty_like(state)
    for b in range(B):
        for n in range(N):
            own = n * q.shape[2] // N
            unit = [x[b, 0, own] / (x[b, 0, own].square().sum() + 1e-6).sqrt() for x in (q, k)]
            s = state[b, n] * g[b, 0, n].exp().reshape(-1, 1)
            s = s + torch.outer(unit[1], beta[b, 0, n] * (v[b, 0, n] - unit[1] @ s))
            y[b, 0, n], after[b, n] = unit[0] @ s * D**-0.5, s
    return y, after


def qwen(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    y, after = torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    state.copy_(after)
    return y


def kimi(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    y, after = recurrent_kimi_delta_attention(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    state.copy_(after)
    return y


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Sums over a clone of the state, beta on the values first."""
    kind, scale = q.dtype, q.shape[-1] ** -0.5
    q, k, v, g, beta = (each[:, 0].float() for each in (q, k, v, g, beta))
    q, k = (each * (each.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
    s = state.clone() * g.exp()[..., None, None]
    new = v - (s * k[..., None]).sum(-2)
    s = s + k.unsqueeze(-1) * (new * beta[..., None]).unsqueeze(-2)
    state.copy_(s)
    return torch.einsum("bhd,bhdm->bhm", q * scale, s)[:, None].to(kind)


def by_matmul(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """A state [B, N, V, K], as serving engines keep it."""
    kind = q.dtype
    q, k, v, g, beta = (each[:, 0].float() for each in (q, k, v, g, beta))
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    s = state * g.exp()[..., None, None]
    error = (v - (s @ k[..., None]).squeeze(-1)) * beta[..., None]
    s = s + error[..., None] * k[..., None, :]
    state.copy_(s)
    return torch.matmul(s, q[..., None] * D**-0.5).squeeze(-1)[:, None].to(kind)


def weighed_last(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """beta beside the outer product, of a state [B, N, V, K]."""
    kind = q.dtype
    q, k, v, g, beta = (each[:, 0].float() for each in (q, k, v, g, beta))
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    s = state * g.exp()[..., None, None]
    error = v - torch.einsum("bnvk,bnk->bnv", s, k)
    s = s + beta[..., None, None] * torch.einsum("bnv,bnk->bnvk", error, k)
    state.copy_(s)
    return torch.einsum("bnvk,bnk->bnv", s, q * D**-0.5)[:, None].to(kind)


STEPS: dict[str, tuple[Step, int, bool]] = {
    "qwen, shared heads": (qwen, M, False),
    "qwen": (qwen, N, False),
    "kimi": (kimi, N, True),
    "naive": (naive, N, False),
    "by matmul": (by_matmul, N, False),
    "weighed last": (weighed_last, N, False),
}


VALUES_FIRST = (by_matmul, weighed_last)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_call_that_stays_near_float64(name: str):
    """Results and the state differ by 2⁻⁷ of their largest number at most, as the rule states, over 64 tokens."""
    step, heads, lanes = STEPS[name]
    fused = torch.compile(step, backend="cann_fusion", options=ON, fullgraph=True)
    state = torch.zeros(B, N, D, D)
    truth = state.double()
    for number in range(TOKENS):
        given = token(number, heads, lanes)
        y = fused(*given, state)
        wanted, truth = exact(*given, truth)
        assert (y.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
    after = truth.mT if step in VALUES_FIRST else truth
    assert (state.double() - after).abs().max() <= 2**-7 * after.abs().max()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.rotates(4)
def test_a_step_leaves_few_launches(name: str):
    """The call, two norms, and a state that is transposed before and after unless it has its values first."""
    step, heads, lanes = STEPS[name]
    report = fusion.explain(step, *token(0, heads, lanes), torch.zeros(B, N, D, D), options=ON)
    assert report.ops == {RULE: 1, "npu::npu_rms_norm": 2}
    assert report.launches[1] <= (4 if step in VALUES_FIRST else 6)


def test_steps_of_a_loop_are_a_call_each():
    def steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return torch.cat([qwen(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), state) for t in range(3)], 1)

    tokens = [torch.cat(each, 1) for each in zip(*(token(n, N) for n in range(3)), strict=True)]
    report = fusion.explain(steps, *tokens, torch.zeros(B, N, D, D), options=ON)
    assert sum(count for name, count in report.ops.items() if name.startswith(RULE)) == 3


def test_without_the_option_the_report_names_it():
    report = fusion.explain(qwen, *token(0, N), torch.zeros(B, N, D, D), options=A3)
    assert RULE not in report.ops
    (reason,) = [each.reason for each in report.refusals if each.rule == "delta_rule"]
    assert "write opt_in={'delta_rule'}" in reason


def test_a_model_in_float32_is_refused_on_a_chip():
    given = [each.float() for each in token(0, N)]
    report = fusion.explain(qwen, *given, torch.zeros(B, N, D, D), options=ON)
    assert RULE not in report.ops


CHUNKS: dict[str, tuple[Callable[..., Any], bool, str]] = {
    "qwen": (torch_chunk_gated_delta_rule, False, "requires -1 <= g <= 0"),
    "kimi": (chunk_kimi_delta_attention, True, "requires decays of heads"),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("tokens", [40, 200])
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_tokens_have_one_reason(name: str, tokens: int):
    rule, lanes, reason = CHUNKS[name]

    def chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> object:
        return rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    given = [each.expand(-1, tokens, *each.shape[2:]).contiguous() for each in token(0, N, lanes)]
    report = fusion.explain(chunks, *given, torch.zeros(B, N, D, D), options=ON)
    (refused,) = report.refusals
    assert refused.rule == "delta_rule"
    assert reason in refused.reason


LAYER = torch.nn.Parameter(torch.eye(D), requires_grad=False)


def other(change: Callable[..., Tensor]) -> Step:
    """A step in which `change` makes of k [B, N, K], v and the decayed state what is added to it."""

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        q, k, v, g, beta = (each[:, 0].float() for each in (q, k, v, g, beta))
        s = state * g.exp()[..., None, None]
        s = s + change(k, v, beta[..., None], s, state)
        state.copy_(s)
        return (s * q[..., None]).sum(-2).bfloat16()

    return step


def column(x: Tensor) -> Tensor:
    return x[..., None]


def row(x: Tensor) -> Tensor:
    return x[..., None, :]


OTHERS: dict[str, Callable[..., Tensor]] = {
    "the state before its decay": lambda k, v, b, s, old: column(k) * row(b * (v - (old * column(k)).sum(-2))),
    "a sum": lambda k, v, b, s, old: column(k) * row(b * (v + (s * column(k)).sum(-2))),
    "beta on one term": lambda k, v, b, s, old: column(k) * row(b * v - (s * column(k)).sum(-2)),
    "other betas": lambda k, v, b, s, old: column(k) * row(b * v - b.square() * (s * column(k)).sum(-2)),
    "the other axis": lambda k, v, b, s, old: column(k) * row(b * (v - (s * row(k)).sum(-1))),
    "another key": lambda k, v, b, s, old: column(k) * row(b * (v - (s * column(k.flip(1))).sum(-2))),
    "a key of lanes": lambda k, v, b, s, old: column(k * k.sigmoid()) * row(b * (v - (s * column(k)).sum(-2))),
    "beta of lanes": lambda k, v, b, s, old: column(k) * row(v.sigmoid() * (v - (s * column(k)).sum(-2))),
    "through a layer": lambda k, v, b, s, old: column(k) * row(b * (v - F.linear((s * column(k)).sum(-2), LAYER))),
    "betas of other heads": lambda k, v, b, s, old: column(k) * row(b * v - b.flip(1) * (s * column(k)).sum(-2)),
    "whole numbers": lambda k, v, b, s, old: column(k) * row(b * (v - (s * column(k)).sum(-2)).int().float()),
    "linear attention": lambda k, v, b, s, old: column(k) * row(b * v),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_delta_rule_is_left(name: str):
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYER
            self.step = other(OTHERS[name])

        def forward(self, *args: Tensor) -> Tensor:
            return self.step(*args)

    report = fusion.explain(Module(), *token(0, N), torch.zeros(B, N, D, D), options=ON)
    assert report.interruption is None
    assert RULE not in report.ops
