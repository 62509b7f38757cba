"""y = silu(first half) · second half of one merged projection, as people write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import SWIGLU, Form, Spelling, activations, build, weights

INNER = 64


def reference(gate_up: Tensor) -> Tensor:
    """float64 [..., 2I] -> [..., I], silu through tanh."""
    gate, up = gate_up[..., : gate_up.shape[-1] // 2], gate_up[..., gate_up.shape[-1] // 2 :]
    return 0.5 * gate * (1 + torch.tanh(gate / 2)) * up


class MergedProjection(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor):
        super().__init__()
        self.gate_up_proj = nn.Linear(gate_up.shape[1], gate_up.shape[0], bias=False, dtype=gate_up.dtype)
        self.down_proj = nn.Linear(down.shape[1], down.shape[0], bias=False, dtype=down.dtype)
        self.activation_fn = nn.SiLU()
        self.gate_up_proj.weight = nn.Parameter(gate_up)
        self.down_proj.weight = nn.Parameter(down)

    def forward(self, hidden_states):
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


def functional_projection(x, gate_up, down):
    gate, up = F.linear(x, gate_up).split(INNER, dim=-1)
    return F.silu(gate) * up @ down.t()


def matmul_projection(x, gate_up, down):
    h = torch.matmul(x, gate_up.transpose(0, 1))
    return torch.matmul(F.silu(h[..., :INNER]) * h[..., INNER:], down.transpose(0, 1))


def chunked(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sliced(gate_up):
    d = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :d]) * gate_up[..., d:]


def split_by_sizes(gate_up):
    gate, up = torch.split(gate_up, [INNER, INNER], dim=-1)
    return up * F.silu(gate)


def unbound_view(gate_up):
    gate, up = gate_up.view(*gate_up.shape[:-1], 2, -1).unbind(dim=-2)
    return F.silu(gate) * up


def narrowed(gate_up):
    return F.silu(gate_up.narrow(-1, 0, INNER)) * gate_up.narrow(-1, INNER, INNER)


def tensor_split(gate_up):
    gate, up = gate_up.tensor_split(2, dim=-1)
    return torch.mul(F.silu(gate), up)


def sigmoid_by_hand(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def sigmoid_last(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return up * (torch.sigmoid(gate) * gate)


def gate_times_up_first(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate * up * gate.sigmoid()


def exponential(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def exponential_inverse(gate_up):
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * (1.0 / (1.0 + torch.exp(-gate))) * up).to(gate_up.dtype)


def silu_in_float(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).to(gate_up.dtype) * up


def all_in_float(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).type_as(gate_up)


def in_place(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def flattened_tokens(gate_up):
    h = gate_up.reshape(-1, gate_up.shape[-1])
    gate, up = h.chunk(2, dim=1)
    return (F.silu(gate) * up).view(*gate_up.shape[:-1], -1)


def _gate_up(B: int, S: int) -> tuple[Tensor, ...]:
    return (activations(11, B, S, 2 * INNER),)


def _projected(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(12, B, S, 48), weights(13, 2 * INNER, 48, center=0.0), weights(14, 48, INNER, center=0.0)


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return reference(x @ gate_up.T) @ down.T


def _spelling(
    label: str,
    form: Form,
    note: str,
    inputs: Callable[[int, int], tuple[Tensor, ...]] = _gate_up,
    meaning: Callable[..., Tensor] = reference,
) -> Spelling:
    """`form` takes gate_up [B, S, 2I], or x [B, S, H] with gate_up [2I, H] and down [H, I]."""

    def make(dtype: torch.dtype, B: int, S: int):
        x, *parameters = (t.to(dtype) for t in inputs(B, S))
        return build(form, (x,), tuple(parameters))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return (meaning(*inputs(B, S)),)

    return Spelling(f"swiglu/{label}", "swiglu", make, {SWIGLU: 1}, expected, note)


SPELLINGS = (
    _spelling("merged_projection", MergedProjection, "transformers: Phi-3, GLM-4", _projected, _mlp),
    _spelling("functional_projection", functional_projection, "F.linear, split by size, @", _projected, _mlp),
    _spelling("matmul_projection", matmul_projection, "matmul with transposed weights, slices", _projected, _mlp),
    _spelling("chunked", chunked, "chunk, silu(gate) * up"),
    _spelling("sliced", sliced, "native path of vLLM: two slices"),
    _spelling("split_by_sizes", split_by_sizes, "split by sizes, up * silu(gate)"),
    _spelling("unbound_view", unbound_view, "xFormers: view as [2, I], unbind"),
    _spelling("narrowed", narrowed, "narrow"),
    _spelling("tensor_split", tensor_split, "tensor_split and torch.mul"),
    _spelling("sigmoid_by_hand", sigmoid_by_hand, "gate * sigmoid(gate) * up"),
    _spelling("sigmoid_last", sigmoid_last, "up * (sigmoid(gate) * gate)"),
    _spelling("gate_times_up_first", gate_times_up_first, "gate * up * sigmoid(gate), left to right"),
    _spelling("exponential", exponential, "gate / (1 + exp(-gate)) * up"),
    _spelling("exponential_inverse", exponential_inverse, "kernel references: gate * 1 / (1 + exp(-gate)) in float32"),
    _spelling("silu_in_float", silu_in_float, "silu in float32, cast back, product in the dtype of x"),
    _spelling("all_in_float", all_in_float, "DeepSeek: both halves in float32, cast back"),
    _spelling("in_place", in_place, "mul_ on the activation"),
    _spelling("flattened_tokens", flattened_tokens, "serving code: tokens flattened to two dimensions"),
)
