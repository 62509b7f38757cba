"""y = a · sigmoid(alpha · a) · (b + bias) with bounds, of one merged projection, as people write it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import Form, LookAlike, Spelling, activations, look_alike

CLIPPED = "npu::npu_clipped_swiglu"
INNER, LIMIT, ALPHA = 24, 2.0, 1.702


def reference(x: Tensor, interleaved: bool = True, alpha: float = ALPHA, bias: float = 1.0) -> Tensor:
    """float64 [.., 2I] -> [.., I]."""
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :INNER], x[..., INNER:])
    gate = torch.where(gate > LIMIT, LIMIT, gate)
    up = torch.where(up > LIMIT, LIMIT, torch.where(up < -LIMIT, -LIMIT, up))
    return gate * 0.5 * (1 + torch.tanh(alpha * gate / 2)) * (up + bias)


def every_second(x):
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(min=None, max=LIMIT)
    up = up.clamp(min=-LIMIT, max=LIMIT)
    glu = gate * torch.sigmoid(gate * ALPHA)
    return (up + 1) * glu


def linear_last(x):
    x_glu, x_linear = x[..., ::2], x[..., 1::2]
    x_glu = torch.clamp(x_glu, max=LIMIT)
    x_linear = torch.clamp(x_linear, -LIMIT, LIMIT)
    return x_glu * torch.sigmoid(ALPHA * x_glu) * (x_linear + 1)


def pairs(x):
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    gate = torch.clamp_max(gate, LIMIT)
    return torch.sigmoid(gate * ALPHA) * gate * up.clip(-LIMIT, LIMIT).add(1)


def selected(x):
    both = x.reshape(*x.shape[:-1], INNER, 2)
    gate = torch.minimum(both[..., 0], torch.full((), LIMIT, dtype=x.dtype))
    up = both[..., 1].clamp(min=-LIMIT).clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (1 + up)


def halves(x):
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
    return (up + 1.0) * (gate * torch.sigmoid(gate * ALPHA))


def runs(x):
    gate, up = x.view(*x.shape[:-1], 2, INNER).unbind(-2)
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(min=-LIMIT, max=LIMIT)


def silu_in_float(x):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).split([INNER, INNER], dim=-1)
    return (F.silu(gate.clamp(max=LIMIT)) * up.clamp(min=-LIMIT, max=LIMIT)).to(x.dtype)


def exchanged(x):
    up, gate = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def bounded_below(x):
    gate, up = (each.clamp(-LIMIT, LIMIT) for each in (x[..., ::2], x[..., 1::2]))
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def other_limits(x):
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-0.5 * LIMIT, 0.5 * LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def bounded_behind(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=0.5 * LIMIT) * up.clamp(-LIMIT, LIMIT)


def without_the_gate(x):
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * torch.sigmoid(gate * ALPHA)


def every_third(x):
    gate, up = x[..., :INNER:2], x[..., 1:INNER:2]
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return torch.cat([(up + 1) * (gate * torch.sigmoid(gate * ALPHA))] * 2, dim=-1)


def unbounded(x):
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(ALPHA * gate) * up


def _inputs(B: int, S: int) -> tuple[Tensor, ...]:
    return (activations(91, B, S, 2 * INNER),)


def _spelling(form: Form, note: str, **meaning: Any) -> Spelling:
    def make(dtype: torch.dtype, B: int, S: int):
        return form, tuple(t.to(dtype) for t in _inputs(B, S))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return (reference(*_inputs(B, S), **meaning),)

    return Spelling(f"clipped_swiglu/{form.__name__}", "clipped_swiglu", make, {CLIPPED: 1}, expected, note)


def _other(form: Form, reason: str, note: str = "") -> LookAlike:
    return look_alike("clipped_swiglu", form, reason, (CLIPPED,), _inputs, reference, note)


SPELLINGS = (
    _spelling(every_second, "transformers: GPT-OSS"),
    _spelling(linear_last, "gpt-oss's own code"),
    _spelling(pairs, "pairs unbound"),
    _spelling(selected, "entries of pairs, the smaller of two tensors"),
    _spelling(halves, "transformers: MiniMax-M3", interleaved=False),
    _spelling(runs, "transformers: DeepSeek-V4's experts", interleaved=False, alpha=1.0, bias=0.0),
    _spelling(silu_in_float, "the same in float32", interleaved=False, alpha=1.0, bias=0.0),
)
LOOKALIKES = (
    _other(exchanged, "the first half, or lane, is up"),
    _other(bounded_below, "from below as well"),
    _other(other_limits, "it is clamped between"),
    _other(bounded_behind, "behind silu"),
    _other(without_the_gate, "it is a sigmoid alone"),
    _other(every_third, "they are neither halves, or lanes, of one"),
    _other(unbounded, "", "npu_fast_gelu of the gate, and the product"),
)
