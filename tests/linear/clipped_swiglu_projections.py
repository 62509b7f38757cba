"""A bounded gate of two projections of one input, as people write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import Form, LookAlike, Spelling, look_alike, wide

from .clipped_swiglu import ALPHA, CLIPPED, LIMIT
from .swiglu_projections import Projections, projected


def meaning(x: Tensor, gate: Tensor, up: Tensor, alpha: float = 1.0, bias: float = 0.0) -> Tensor:
    """float64 x [.., H], gate and up [I, H]."""
    a, b = x @ gate.T, x @ up.T
    a = torch.where(a > LIMIT, LIMIT, a)
    b = torch.where(b > LIMIT, LIMIT, torch.where(b < -LIMIT, -LIMIT, b))
    return a * 0.5 * (1 + torch.tanh(alpha * a / 2)) * (b + bias)


def called(x, gate, up):
    return F.silu(gate(x).clamp(max=LIMIT)) * up(x).clamp(min=-LIMIT, max=LIMIT)


def in_float(x, gate, up):
    g, u = (each(x).to(wide(x.dtype)) for each in (gate, up))
    u = torch.clamp(u, min=-LIMIT, max=LIMIT)
    return (F.silu(torch.clamp(g, max=LIMIT)) * u).to(x.dtype)


def up_first(x, gate, up):
    hidden = torch.minimum(gate(x), torch.full((), LIMIT, dtype=x.dtype))
    return up(x).clip(-LIMIT, LIMIT) * (hidden * torch.sigmoid(hidden))


def as_gpt_oss(x, gate, up):
    g, u = gate(x).clamp(min=None, max=LIMIT), up(x).clamp(min=-LIMIT, max=LIMIT)
    return (u + 1) * (g * torch.sigmoid(g * ALPHA))


def bounded_below(x, gate, up):
    return F.silu(F.linear(x, gate).clamp(-0.25, LIMIT)) * F.linear(x, up).clamp(-LIMIT, LIMIT)


def other_limits(x, gate, up):
    return F.silu(F.linear(x, gate).clamp(max=LIMIT)) * F.linear(x, up).clamp(-0.5 * LIMIT, 0.5 * LIMIT)


def bounded_behind(x, gate, up):
    return F.silu(F.linear(x, gate)).clamp(max=0.25) * F.linear(x, up).clamp(-LIMIT, LIMIT)


def weights_that_are_inputs(x, gate, up):
    return called(x, lambda h: F.linear(h, gate), lambda h: F.linear(h, up))


def _spelling(join: Form, note: str, alpha: float = 1.0, bias: float = 0.0) -> Spelling:
    def make(dtype: torch.dtype, B: int, S: int):
        x, gate, up = (t.to(dtype) for t in projected(B, S))
        return Projections(join, gate, up).eval().requires_grad_(False), (x,)

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return (meaning(*projected(B, S), alpha, bias),)

    name = f"clipped_swiglu_projections/{join.__name__}"
    return Spelling(name, "clipped_swiglu_projections", make, {CLIPPED: 1}, expected, note)


def _other(form: Form, reason: str) -> LookAlike:
    exact = None if form is weights_that_are_inputs else meaning
    return look_alike("clipped_swiglu_projections", form, reason, (CLIPPED,), projected, exact)


SPELLINGS = (
    _spelling(called, "transformers: DeepSeek-V4's shared experts"),
    _spelling(in_float, "DeepSeek-V4's inference code: in float32"),
    _spelling(up_first, "the smaller of two tensors, silu written out"),
    _spelling(as_gpt_oss, "transformers: MiniMax-M3", ALPHA, 1.0),
)
LOOKALIKES = (
    _other(bounded_below, "from below as well|do not come from Parameters"),
    _other(other_limits, "the limit of the gate|requires Parameters"),
    _other(bounded_behind, "behind silu"),
    _other(weights_that_are_inputs, "they are no Parameters of the module"),
)
