"""y = gelu(gate) · up, of halves of one tensor or of two projections, as people write it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Form, LookAlike, Spelling, activations, build, look_alike, weights

GEGLU = "npu::npu_geglu"
INNER, HIDDEN = 64, 48


def reference(gate: Tensor, up: Tensor, by_tanh: bool) -> Tensor:
    """float64 [.., I] of each, Φ through erf or tanh."""
    inside = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * (1 + (inside.tanh() if by_tanh else torch.erf(gate / math.sqrt(2)))) / 2 * up


class DiffusionGate(nn.Module):
    def __init__(self, both: Tensor):
        super().__init__()
        self.proj = nn.Linear(both.shape[1], both.shape[0], bias=False, dtype=both.dtype)
        self.proj.weight = nn.Parameter(both)

    def forward(self, hidden_states):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * F.gelu(gate)


class TwoProjections(nn.Module):
    activation = nn.GELU(approximate="tanh")

    def __init__(self, both: Tensor):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False, dtype=both.dtype) for _ in range(2))
        self.gate_proj.weight, self.up_proj.weight = (nn.Parameter(each) for each in both.chunk(2))

    def forward(self, x):
        return self.activation(self.gate_proj(x)) * self.up_proj(x)


class WrittenOut(TwoProjections):
    activation = None

    def forward(self, x):
        gate = self.gate_proj(x)
        inside = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
        return self.up_proj(x) * (0.5 * gate * (1.0 + torch.tanh(inside)))


class ByErf(TwoProjections):
    def forward(self, x):
        gate = self.gate_proj(x)
        return gate * 0.5 * (1.0 + torch.erf(gate / math.sqrt(2.0))) * self.up_proj(x)


def chunked(both):
    gate, up = both.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def sliced(both):
    return both[..., INNER:] * F.gelu(both[..., :INNER])


def split_in_float(both):
    up, gate = both.float().split(INNER, dim=-1)
    return (F.gelu(gate) * up).to(both.dtype)


def viewed(both):
    gate, up = both.unflatten(-1, (2, INNER)).unbind(-2)
    return F.gelu(gate).mul(up)


def alternate_lanes(both):
    return F.gelu(both[..., ::2]) * both[..., 1::2]


def two_tensors(both):
    return F.gelu(both) * both.flip(-1)


def gelu_of_the_product(both):
    gate, up = both.chunk(2, dim=-1)
    return F.gelu(gate * up)


def gelu_of_both(both):
    gate, up = both.chunk(2, dim=-1)
    return F.gelu(gate) * F.gelu(up)


def _both(B: int, S: int) -> tuple[Tensor, ...]:
    return (activations(131, B, S, 2 * INNER),)


def _projected(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(132, B, S, HIDDEN), weights(133, 2 * INNER, HIDDEN, center=0.0)


def _spelling(form: Form, note: str, by_tanh: bool = False, gate_first: bool = True) -> Spelling:
    """`form` takes both [B, S, 2I], or x [B, S, H] with their weight [2I, H]."""
    inputs = _projected if isinstance(form, type) else _both

    def make(dtype: torch.dtype, B: int, S: int):
        x, *parameters = (t.to(dtype) for t in inputs(B, S))
        return build(form, (x,), tuple(parameters))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        x, *parameters = inputs(B, S)
        halves = (x @ parameters[0].T if parameters else x).chunk(2, -1)
        return (reference(*(halves if gate_first else halves[::-1]), by_tanh=by_tanh),)

    return Spelling(f"geglu/{form.__name__}", "geglu", make, {GEGLU: 1}, expected, note)


def _meant(both: Tensor) -> Tensor:
    return reference(*both.chunk(2, -1), by_tanh=False)


def _other(form: Form, reason: str, note: str = "") -> LookAlike:
    return look_alike("geglu", form, reason, (GEGLU,), _both, _meant, note)


SPELLINGS = (
    _spelling(DiffusionGate, "diffusers: hidden states, gate", gate_first=False),
    _spelling(TwoProjections, "transformers: Gemma", by_tanh=True),
    _spelling(WrittenOut, "Gemma's tanh written out, up first", by_tanh=True),
    _spelling(ByErf, "erf written out"),
    _spelling(chunked, "chunk, by tanh", by_tanh=True),
    _spelling(sliced, "slices, up first"),
    _spelling(split_in_float, "both in float32, the gate second", gate_first=False),
    _spelling(viewed, "two rows"),
)
LOOKALIKES = (
    _other(alternate_lanes, "every second lane of one tensor; npu_geglu"),
    _other(two_tensors, "they are neither halves of one tensor nor two linear"),
    _other(gelu_of_the_product, "", "no factor stands beside gelu"),
    _other(gelu_of_both, "they are neither halves of one tensor nor two linear"),
)
