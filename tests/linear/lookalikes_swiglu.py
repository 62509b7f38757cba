"""Gates that resemble the fused operator, and must be refused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import SWIGLU, Form, LookAlike, activations, look_alike

from .swiglu import reference


def quick_gelu_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(1.702 * gate) * up


def sigmoid_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.sigmoid(gate) * up


def sigmoid_of_the_other(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(up) * up


def silu_on_the_second_half(gate_up):
    up, gate = gate_up.chunk(2, dim=-1)
    return up * F.silu(gate)


def alternating_channels(gate_up):
    return F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


def up_plus_one(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * (up + 1)


def clamped_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=1.0)) * up


def overlapping_slices(gate_up):
    D = gate_up.shape[-1]
    return F.silu(gate_up[..., : D // 2]) * gate_up[..., D // 2 - 1 : D - 1]


def scaled_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate * 0.5) * up


def two_tensors(gate, up):
    return F.silu(gate) * up


def _gate_up(B: int, S: int) -> tuple[Tensor, ...]:
    return (activations(51, B, S, 128),)


def _gate_and_up(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(51, B, S, 64), activations(52, B, S, 64)


def _not_swiglu(form: Form, reason: str, inputs=_gate_up, meaning=reference, note: str = "") -> LookAlike:
    return look_alike("swiglu", form, reason, (SWIGLU,), inputs, meaning, note)


LOOKALIKES = (
    _not_swiglu(quick_gelu_gate, "", note="npu_fast_gelu of the gate, and the product"),
    _not_swiglu(sigmoid_gate, "silu|sigmoid"),
    _not_swiglu(sigmoid_of_the_other, "silu|sigmoid|order|half|halves"),
    _not_swiglu(silu_on_the_second_half, "order|second half|first half"),
    _not_swiglu(alternating_channels, "every second lane of one tensor"),
    _not_swiglu(up_plus_one, "half|halves|slice|add", note="GPT-OSS shifts the linear half"),
    _not_swiglu(clamped_gate, "half|halves|slice|clamp", note="GPT-OSS clamps the gate"),
    _not_swiglu(overlapping_slices, "other slices of one tensor"),
    _not_swiglu(scaled_gate, "multiplied by 0.5 before silu", note="Falcon-H1 has a multiplier of the gate"),
    _not_swiglu(
        two_tensors,
        "they are neither halves, or lanes, of one",
        _gate_and_up,
        None,
        "the operator needs both in one tensor",
    ),
)
