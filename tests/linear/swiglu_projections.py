"""y = silu(gate(x)) · up(x) with two projections of one input, as people write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import SWIGLU, Form, LookAlike, Spelling, activations, look_alike, weights

from .swiglu import reference

HIDDEN, INNER = 48, 64


def meaning(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """float64 x [.., H], gate and up [I, H]."""
    return reference(torch.cat((x @ gate.T, x @ up.T), -1))


class Projections(nn.Module):
    """Two projections and how they are joined."""

    def __init__(self, join: Callable[[Tensor, nn.Linear, nn.Linear], Tensor], gate: Tensor, up: Tensor):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False, dtype=gate.dtype) for _ in range(2))
        self.gate_proj.weight, self.up_proj.weight = nn.Parameter(gate), nn.Parameter(up)
        self.join = join

    def forward(self, x):
        return self.join(x, self.gate_proj, self.up_proj)


def called(x, gate, up):
    return F.silu(gate(x)) * up(x)


def up_first(x, gate, up):
    return up(x) * F.silu(gate(x))


def activation_module(x, gate, up):
    hidden = nn.SiLU()(gate(x))
    return hidden * up(x)


def functional(x, gate, up):
    return F.silu(F.linear(x, gate.weight)) * F.linear(x, up.weight)


def transposed_weights(x, gate, up):
    return F.silu(x @ gate.weight.t()) * (x @ up.weight.t())


def by_einsum(x, gate, up):
    g, u = (torch.einsum("bsh,ih->bsi", x, each.weight) for each in (gate, up))
    return F.silu(g) * u


def flattened_tokens(x, gate, up):
    h = x.reshape(-1, x.shape[-1])
    return (F.silu(gate(h)) * up(h)).view(*x.shape[:-1], -1)


def in_float(x, gate, up):
    return (F.silu(gate(x).float()) * up(x).float()).type_as(x)


def sigmoid_by_hand(x, gate, up):
    g = gate(x)
    return g * torch.sigmoid(g) * up(x)


def two_inputs(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x.exp(), up)


def weights_that_are_inputs(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def projected(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(21, B, S, HIDDEN), *(weights(seed, INNER, HIDDEN, center=0.0) for seed in (22, 23))


def _spelling(join: Form, note: str) -> Spelling:
    def make(dtype: torch.dtype, B: int, S: int):
        x, gate, up = (t.to(dtype) for t in projected(B, S))
        return Projections(join, gate, up).eval().requires_grad_(False), (x,)

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return (meaning(*projected(B, S)),)

    return Spelling(f"swiglu_projections/{join.__name__}", "swiglu_projections", make, {SWIGLU: 1}, expected, note)


def _other(form: Form, reason: str) -> LookAlike:
    fused = None if form is weights_that_are_inputs else meaning
    return look_alike("swiglu_projections", form, reason, (SWIGLU,), projected, fused)


SPELLINGS = (
    _spelling(called, "transformers: Llama, Mistral, Qwen"),
    _spelling(up_first, "up * silu(gate)"),
    _spelling(activation_module, "an activation module, two statements"),
    _spelling(functional, "F.linear with the weights"),
    _spelling(transposed_weights, "matmul with transposed weights"),
    _spelling(by_einsum, "einsum"),
    _spelling(flattened_tokens, "serving code: tokens flattened to two dimensions"),
    _spelling(in_float, "DeepSeek: both in float32, cast back"),
    _spelling(sigmoid_by_hand, "gate * sigmoid(gate) * up"),
)
LOOKALIKES = (
    _other(two_inputs, "different inputs"),
    _other(weights_that_are_inputs, "they are no Parameters of the module"),
)
