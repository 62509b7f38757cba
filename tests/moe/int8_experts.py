"""Experts in W8A8 as people write them: matrices in int8 with a scale of each output channel, rows quantised by token.

Every form takes tokens [T, H], logits [T, E], gate_up [E, 2 · I, H] and down [E, H, I] in int8, each behind its scales
[E, 2 · I] and [E, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.moe.experts import (
    CHOICES,
    EXPERTS,
    FINISH,
    GROUPED,
    INNER,
    ROUTE,
    WIDTH,
    ends_of,
    halves,
    inverse,
    routed,
)

GATED, QUANT, PRODUCT = "npu::npu_grouped_matmul_swiglu_quant_v2", "npu::npu_dynamic_quant", "npu::npu_quant_matmul"
EMITTED = {ROUTE: 1, GATED: 1, GROUPED: 1, FINISH: 1}
BOUNDED = {ROUTE: 1, GROUPED: 2, "npu::npu_clipped_swiglu": 1, QUANT: 1, FINISH: 1}
Form = Callable[..., Tensor]


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def smooth(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-8).div(127.0)
    return torch.round(x.float() / scale).to(torch.int8), scale


def clipped(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=2.0)) * up.clamp(min=-2.0, max=2.0)


# gathered matrices --------------------------------------------------------------------------------------------------


def _bmm(x8: Tensor, w8: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Each row [R, K] by the matrix [R, N, K] that was gathered for it."""
    return torch.bmm(w8.to(dtype), x8.to(dtype).unsqueeze(-1)).squeeze(-1)


def gathered(tokens, logits, gate_up, of_gates, down, of_down, sums=torch.int32, activation=halves):
    weights, experts = routed(logits)
    listed = experts.reshape(-1)
    x8, scale = (each.repeat_interleave(CHOICES, dim=0) for each in quantised(tokens))
    both = (_bmm(x8, gate_up[listed], sums).float() * scale * of_gates[listed]).to(tokens.dtype)
    h8, scale = quantised(activation(both))
    given = (_bmm(h8, down[listed], sums).float() * scale * of_down[listed]).to(tokens.dtype)
    return (given * weights.reshape(-1, 1)).view(*experts.shape, -1).sum(1)


def by_one(x: Tensor, scale: Tensor) -> Tensor:
    """By one scale that the model holds."""
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


def gathered_static(tokens, logits, gate_up, of_gates, down, of_down, of_tokens, of_hidden):
    weights, experts = routed(logits)
    listed = experts.reshape(-1)
    x8 = by_one(tokens, of_tokens).repeat_interleave(CHOICES, dim=0)
    both = (_bmm(x8, gate_up[listed], torch.int32).float() * of_tokens * of_gates[listed]).to(tokens.dtype)
    given = _bmm(by_one(halves(both), of_hidden), down[listed], torch.int32).float() * of_hidden
    given = (given * of_down[listed]).to(tokens.dtype)
    return (given * weights.reshape(-1, 1)).view(*experts.shape, -1).sum(1)


def listed_static(tokens, logits, gate_up, of_gates, down, of_down, of_tokens, of_hidden):
    """By einsum, of tokens that are not repeated."""
    weights, experts = routed(logits)
    x8 = by_one(tokens, of_tokens).float()
    both = torch.einsum("td,tkjd->tkj", x8, gate_up[experts].float()) * of_tokens * of_gates[experts]
    h8 = by_one(halves(both.to(tokens.dtype)), of_hidden).float()
    given = torch.einsum("tki,tkdi->tkd", h8, down[experts].float()) * of_hidden * of_down[experts]
    return torch.einsum("tkd,tk->td", given.to(tokens.dtype), weights)


def in_float32(*args):
    return gathered(*args, sums=torch.float32)


def bounded(*args):
    return gathered(*args, activation=clipped)


def by_einsum(tokens, logits, gate_up, of_gates, down, of_down):
    """All between both products in float32."""
    weights, experts = routed(logits)
    x8, scale = smooth(tokens)
    both = torch.einsum("td,tkjd->tkj", x8.float(), gate_up[experts].float()) * scale[:, None] * of_gates[experts]
    h8, scale = smooth(halves(both))
    given = torch.einsum("tki,tkdi->tkd", h8.float(), down[experts].float()) * (scale * of_down[experts])
    return torch.einsum("tkd,tk->td", given.to(tokens.dtype), weights)


def rows_that_are_quantised(tokens, logits, gate_up, of_gates, down, of_down):
    """Each row once it is listed; scales of channels lie in columns, [E, 2 · I, 1]."""
    weights, experts = routed(logits)
    listed = experts.flatten()
    x8, scale = quantised(tokens[torch.arange(tokens.shape[0]).repeat_interleave(CHOICES)])
    both = _bmm(x8, gate_up[listed]).float() * of_gates.unsqueeze(-1)[listed].squeeze(-1) * scale
    h8, scale = quantised(halves(both.to(tokens.dtype)))
    given = (_bmm(h8, down[listed]).float() * of_down.unsqueeze(-1)[listed].squeeze(-1) * scale).to(tokens.dtype)
    return (given.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(1)


def dequantised(tokens, logits, gate_up, of_gates, down, of_down):
    """Operands that are multiplied by their scales before the products, in float32."""
    weights, experts = routed(logits)
    matrices = [(each.float() * scale.unsqueeze(-1)) for each, scale in ((gate_up, of_gates), (down, of_down))]
    x8, scale = quantised(tokens)
    rows = x8.float() * scale
    both = torch.matmul(matrices[0][experts], rows[:, None, :, None]).squeeze(-1)
    h8, scale = quantised(halves(both.to(tokens.dtype)))
    given = torch.matmul(matrices[1][experts], (h8.float() * scale).unsqueeze(-1)).squeeze(-1).to(tokens.dtype)
    return (given * weights.unsqueeze(-1)).sum(1)


def dequantised_where_chosen(tokens, logits, gate_up, of_gates, down, of_down):
    """The same of the matrices that were gathered."""
    weights, experts = routed(logits)
    x8, scale = quantised(tokens)
    both = torch.matmul(
        gate_up[experts].float() * of_gates[experts].unsqueeze(-1), (x8.float() * scale)[:, None, :, None]
    ).squeeze(-1)
    h8, scale = quantised(halves(both.to(tokens.dtype)))
    matrices = down[experts].float() * of_down[experts].unsqueeze(-1)
    given = torch.matmul(matrices, (h8.float() * scale).unsqueeze(-1)).squeeze(-1).to(tokens.dtype)
    return (given * weights.unsqueeze(-1)).sum(1)


# sorted rows --------------------------------------------------------------------------------------------------------


def _by_group(x8: Tensor, ends: Tensor, w8: Tensor) -> Tensor:
    return torch._grouped_mm(x8.bfloat16(), w8.bfloat16().transpose(-2, -1), offs=ends)


def sorted_rows(tokens, logits, gate_up, of_gates, down, of_down):
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    ends, (x8, scale) = ends_of(listed), quantised(tokens[order // CHOICES])
    both = (_by_group(x8, ends, gate_up).float() * scale * of_gates[listed]).to(tokens.dtype)
    h8, scale = quantised(halves(both))
    given = (_by_group(h8, ends, down).float() * scale * of_down[listed]).to(tokens.dtype)
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(*experts.shape, -1).sum(dim=1)


def sorted_tokens(tokens, logits, gate_up, of_gates, down, of_down):
    """Tokens in int8 are listed, and added up at their tokens."""
    weights, experts = routed(logits)
    order = experts.flatten().argsort()
    owner, x8, scale = order // CHOICES, *quantised(tokens)
    ends = torch.bincount(experts.flatten(), minlength=EXPERTS).cumsum(0).int()
    of_rows = experts.flatten()[order]
    both = _by_group(x8[owner], ends, gate_up) * scale[owner] * of_gates[of_rows]
    h8, scale = quantised(halves(both.to(tokens.dtype)))
    given = (_by_group(h8, ends, down) * scale * of_down[of_rows]).to(tokens.dtype)
    return torch.zeros_like(tokens).index_add_(0, owner, given * weights.flatten()[order, None])


# loops --------------------------------------------------------------------------------------------------------------


def _linear(x8: Tensor, scale: Tensor, weight: Tensor, channels: Tensor) -> Tensor:
    return (x8.int() @ weight.int().t()).float() * scale * channels


def loop(tokens, logits, gate_up, of_gates, down, of_down):
    weights, experts = routed(logits)
    every, y = torch.zeros_like(logits).scatter(-1, experts, weights), torch.zeros_like(tokens)
    x8, scale = quantised(tokens)
    for e in range(EXPERTS):
        h8, of_rows = quantised(halves(_linear(x8, scale, gate_up[e], of_gates[e]).to(tokens.dtype)))
        y = y + _linear(h8, of_rows, down[e], of_down[e]).to(tokens.dtype) * every[:, e : e + 1]
    return y


def loop_of_layers(tokens, logits, gate_up, of_gates, down, of_down):
    """Each expert quantises for itself, and has gate and up apart."""
    weights, experts = routed(logits)
    every, y = torch.zeros_like(logits).scatter(-1, experts, weights), torch.zeros_like(tokens)
    for e in range(EXPERTS):
        gate, up = (
            _linear(*smooth(tokens), gate_up[e, part], of_gates[e, part]).to(tokens.dtype)
            for part in (slice(0, INNER), slice(INNER, 2 * INNER))
        )
        y = y + _linear(*smooth(F.silu(gate) * up), down[e], of_down[e]).to(tokens.dtype) * every[:, e, None]
    return y


FORMS: dict[str, Form] = {
    each.__name__: each
    for each in (
        gathered, in_float32, by_einsum, rows_that_are_quantised, dequantised, dequantised_where_chosen, sorted_rows,
        sorted_tokens, loop, loop_of_layers,
    )
}  # fmt: skip


def biases(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of both products, a line for each expert."""
    draw = torch.Generator().manual_seed(6)
    return tuple(nn.Parameter(torch.randn(EXPERTS, n, generator=draw).to(dtype) / 8) for n in (2 * INNER, WIDTH))


def biased(tokens, logits, gate_up, of_gates, down, of_down, of_first, of_second):
    """Matrices that are gathered, and biases too."""
    weights, experts = routed(logits)
    listed = experts.reshape(-1)
    x8, scale = (each.repeat_interleave(CHOICES, dim=0) for each in quantised(tokens))
    both = (_bmm(x8, gate_up[listed]).float() * scale * of_gates[listed]).to(tokens.dtype) + of_first[listed]
    h8, scale = quantised(halves(both))
    given = (_bmm(h8, down[listed]).float() * scale * of_down[listed]).to(tokens.dtype) + of_second[listed]
    return (given * weights.reshape(-1, 1)).view(*experts.shape, -1).sum(1)


def biased_sorted(tokens, logits, gate_up, of_gates, down, of_down, of_first, of_second):
    """Rows in the order of their experts."""
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    ends, (x8, scale) = ends_of(listed), quantised(tokens[order // CHOICES])
    both = (_by_group(x8, ends, gate_up).float() * scale * of_gates[listed]).to(tokens.dtype) + of_first[listed]
    h8, scale = quantised(halves(both))
    given = (_by_group(h8, ends, down).float() * scale * of_down[listed]).to(tokens.dtype) + of_second[listed]
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(*experts.shape, -1).sum(dim=1)


def biased_loop(tokens, logits, gate_up, of_gates, down, of_down, of_first, of_second):
    """All experts, one after the other."""
    weights, experts = routed(logits)
    every, y = torch.zeros_like(logits).scatter(-1, experts, weights), torch.zeros_like(tokens)
    x8, scale = quantised(tokens)
    for e in range(EXPERTS):
        both = (_linear(x8, scale, gate_up[e], of_gates[e]) + of_first[e].float()).to(tokens.dtype)
        h8, of_rows = quantised(halves(both))
        given = (_linear(h8, of_rows, down[e], of_down[e]) + of_second[e].float()).to(tokens.dtype)
        y = y + given * every[:, e : e + 1]
    return y


def biases_of_others(tokens, logits, gate_up, of_gates, down, of_down, of_first, of_second):
    """Behind the second product lines of other experts."""
    weights, experts = routed(logits)
    listed = experts.reshape(-1)
    x8, scale = (each.repeat_interleave(CHOICES, dim=0) for each in quantised(tokens))
    both = (_bmm(x8, gate_up[listed]).float() * scale * of_gates[listed]).to(tokens.dtype) + of_first[listed]
    h8, scale = quantised(halves(both))
    given = (_bmm(h8, down[listed]).float() * scale * of_down[listed]).to(tokens.dtype)
    given = given + of_second[(listed + 1) % EXPERTS]
    return (given * weights.reshape(-1, 1)).view(*experts.shape, -1).sum(1)


def beside_a_shared_expert(tokens, logits, gate_up, of_gates, down, of_down):
    """What the experts read is also read by a layer of all tokens: they are quantised once."""
    weights, experts = routed(logits)
    x8, scale = quantised(tokens)
    shared = _linear(x8, scale, gate_up[0], of_gates[0]).to(tokens.dtype)
    rows, of_rows = x8[:, None].expand(-1, CHOICES, -1), scale[:, None]
    both = (rows.float()[..., None, :] @ gate_up[experts].float().mT).squeeze(-2) * of_rows * of_gates[experts]
    h8, of_rows = quantised(halves(both.to(tokens.dtype)))
    given = (h8.float().unsqueeze(-2) @ down[experts].float().mT).squeeze(-2) * of_rows * of_down[experts]
    return (given.to(tokens.dtype) * weights.unsqueeze(-1)).sum(1) + shared[:, :WIDTH]


# what they mean -----------------------------------------------------------------------------------------------------


def expected(
    tokens, logits, gate_up, of_gates, down, of_down, of_first=None, of_second=None, activation=halves
) -> Tensor:
    """Float64, token by token; each row is quantised as it is exactly."""

    def whole(row: Tensor) -> tuple[Tensor, Tensor]:
        scale = row.abs().max() / 127
        return (row / scale).round(), scale

    rows = []
    for token, (weights, experts) in zip(tokens.double(), zip(*routed(logits), strict=True), strict=True):
        y = torch.zeros(WIDTH, dtype=torch.float64)
        for weight, e in zip(weights.double(), experts, strict=True):
            x8, scale = whole(token)
            first, second = (0.0 if each is None else each[e].double() for each in (of_first, of_second))
            h8, of_row = whole(activation(gate_up[e].double() @ x8 * scale * of_gates[e].double() + first))
            y += weight * (down[e].double() @ h8 * of_row * of_down[e].double() + second)
        rows.append(y)
    return torch.stack(rows)


def inputs(dtype: torch.dtype, tokens: int = 5, scales: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Tokens, logits of which every dtype chooses the same experts, and Parameters in int8 with scales."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(tokens)]) / 2.0

    def fixed(each: Tensor) -> Tensor:
        return nn.Parameter(each, requires_grad=False)

    def layers(*shape: int) -> tuple[Tensor, Tensor]:
        whole = torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8)
        return fixed(whole), fixed(((torch.rand(shape[:-1], generator=draw) + 1) / 500).to(scales))

    x = torch.randn(tokens, WIDTH, generator=draw).to(dtype)
    return x, logits.to(dtype), *layers(EXPERTS, 2 * INNER, WIDTH), *layers(EXPERTS, WIDTH, INNER)


# look-alikes --------------------------------------------------------------------------------------------------------


def _other(**changed: Callable[..., Any]) -> Form:
    """Gathered matrices, one part of which is another one."""

    def part(name: str, *given: Any) -> Any:
        return changed[name](*given) if name in changed else given[0]

    def form(tokens, logits, gate_up, of_gates, down, of_down):
        weights, experts = routed(logits)
        listed = experts.reshape(-1)
        x8, scale = part("tokens", quantised(tokens), tokens)
        x8, scale = x8.repeat_interleave(CHOICES, dim=0), part("rows", scale).repeat_interleave(CHOICES, dim=0)
        both = _bmm(x8, gate_up[listed]).float() * scale * part("channels", of_gates[listed], of_gates, listed)
        h8, scale = part("hidden", quantised(halves(both.to(tokens.dtype))), halves(both.to(tokens.dtype)))
        given = _bmm(h8, down[listed]).float() * part("scale", scale) * part("of_down", of_down[listed], of_down)
        given = part("given", given).to(tokens.dtype)
        return (given * weights.reshape(-1, 1)).view(*experts.shape, -1).sum(1)

    return form


other_scales = _other(rows=lambda scale: scale.flip(0))


def _static(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.full((*x.shape[:-1], 1), 0.01)
    return (x.float() / 0.01).round().clamp(-128, 127).to(torch.int8), scale


def _of_16(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 7
    return (x.float() / scale).round().clamp(-8, 7).to(torch.int8), scale


def kept_in_float(tokens, logits, gate_up, of_gates, down, of_down):
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(CHOICES, dim=-1)
    x8, scale = quantised(tokens)
    both = torch.einsum("td,tkjd->tkj", x8.float(), gate_up[experts].float()) * scale[:, None] * of_gates[experts]
    h8, scale = quantised(halves(both))
    given = torch.einsum("tki,tkdi->tkd", h8.float(), down[experts].float()) * scale * of_down[experts]
    return torch.einsum("tkd,tk->td", given, weights)


_BETWEEN, _LINES = (
    "stands something else|between its two int8 products|between their two int8 products",
    "one of the product is neither of each token",
)
OTHERS: dict[str, tuple[Form, str]] = {
    "scales of other experts": (_other(channels=lambda _, all, listed: all[(listed + 1) % EXPERTS]), _LINES),
    "scales of the other pairs": (_other(channels=lambda _, all, listed: all[listed.flip(0)]), _LINES),
    "scales of one expert for all": (_other(of_down=lambda _, all: all[0]), _LINES),
    "scales of other rows": (_other(scale=lambda scale: scale.roll(1, 0)), _BETWEEN),
    "a scale twice as large": (_other(scale=lambda scale: scale * 2), _BETWEEN),
    "static between the products": (_other(hidden=lambda _, x: _static(x)), _BETWEEN),
    "of four bits between the products": (_other(hidden=lambda _, x: _of_16(x)), _BETWEEN),
    "cut off between the products": (
        _other(hidden=lambda _, x: ((x.float() / quantised(x)[1]).to(torch.int8), quantised(x)[1])), _BETWEEN
    ),
    "a bias of the model": (_other(given=lambda y: y + 1.0), "not proven to be summed"),
    "a sum in float32": (kept_in_float, "requires float16 or bfloat16 behind int8"),
}  # fmt: skip
