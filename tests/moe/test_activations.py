"""Experts with another activation than a gated silu: gelu of a gate, or relu, silu and gelu without one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.moe.experts import CHOICES, EXPERTS, FINISH, GROUPED, INNER, ROUTE, WIDTH, ends_of, inverse, routed
from tests.moe.int8_experts import quantised
from tests.moe.test_experts import distance, left_alone, operators, run

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, F16: 2e-3, F32: 2e-6}
Activation = Callable[[Tensor], Tensor]
EMITTED = {ROUTE: 1, GROUPED: 2, FINISH: 1}


def tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def written_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def written_erf(x: Tensor) -> Tensor:
    """In float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * 0.5 * (1.0 + torch.erf(wide / math.sqrt(2.0)))).to(x.dtype)


def sigmoid_gelu(x: Tensor) -> Tensor:
    """Nearly that."""
    return x * torch.sigmoid(1.702 * x)


def other_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.05 * x**3)))


def gated(gelu: Activation) -> Activation:
    def activation(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return gelu(gate) * up

    return activation


WRITTEN: dict[str, Activation] = {"tanh written out": written_tanh, "erf written out": written_erf}
ALONE: dict[str, Activation] = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu, "gelu by tanh": tanh, **WRITTEN}
GATED: dict[str, Activation] = {
    "a gate by gelu": gated(F.gelu), "a gate by tanh": gated(tanh), "a gate by erf written out": gated(written_erf),
    "a gate by tanh written out": gated(written_tanh),
}  # fmt: skip
ALL = ALONE | GATED
OTHERS: dict[str, Activation] = {
    "sigmoid": torch.sigmoid,
    "leaky relu": F.leaky_relu,
    "softmax": lambda x: x.softmax(-1),
    "a sigmoid of 1.702 x": sigmoid_gelu,
    "another tanh": other_tanh,
}


def gathered(tokens: Tensor, logits: Tensor, first: Tensor, down: Tensor, activation: Activation) -> Tensor:
    weights, experts = routed(logits)
    hidden = activation(torch.matmul(first[experts], tokens[:, None, :, None]).squeeze(-1))
    given = torch.matmul(down[experts], hidden.unsqueeze(-1)).squeeze(-1)
    return (given * weights.unsqueeze(-1)).sum(1)


def sorted_rows(tokens: Tensor, logits: Tensor, first: Tensor, down: Tensor, activation: Activation) -> Tensor:
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    hidden = activation(torch._grouped_mm(tokens[order // CHOICES], first.mT, offs=ends_of(listed)))
    given = torch._grouped_mm(hidden, down.mT, offs=ends_of(listed))
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(*experts.shape, -1).sum(dim=1)


def loop(tokens: Tensor, logits: Tensor, first: Tensor, down: Tensor, activation: Activation) -> Tensor:
    weights, experts = routed(logits)
    every, y = torch.zeros_like(logits).scatter(-1, experts, weights), torch.zeros_like(tokens)
    for e in range(EXPERTS):
        y = y + F.linear(activation(F.linear(tokens, first[e])), down[e]) * every[:, e : e + 1]
    return y


def inputs(dtype: torch.dtype, gate: bool) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(5)
    logits = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(5)]) / 2.0

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    matrices = (numbers(EXPERTS, INNER * (1 + gate), WIDTH) / 8, numbers(EXPERTS, WIDTH, INNER) / 4)
    return numbers(5, WIDTH), logits.to(dtype), *(nn.Parameter(each, requires_grad=False) for each in matrices)


def expected(tokens: Tensor, logits: Tensor, first: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """Float64, token by token."""
    rows = []
    for token, (weights, experts) in zip(tokens.double(), zip(*routed(logits), strict=True), strict=True):
        given = [down[e].double() @ activation((first[e].double() @ token)[None])[0] for e in experts]
        rows.append(sum(w * each for w, each in zip(weights.double(), given, strict=True)))
    return torch.stack(rows)


FORMS = (
    (gathered, "composite", F16), (gathered, "decomposed", F32), (sorted_rows, "core", BF16), (loop, "composite", BF16),
)  # fmt: skip


def emitted(name: str) -> dict[str, int]:
    """What the experts become: their gelu of a gate is an operator of its own."""
    return EMITTED | {"npu::npu_geglu": 1} if name in GATED else EMITTED


def is_read(name: str, form: Callable[..., Tensor]) -> bool:
    """What is written out is read where rows are listed."""
    return "written out" not in name or form is not loop


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    ("name", "form", "level", "dtype"),
    [(name, *how) for name in ALL for how in FORMS if is_read(name, how[0])],
)
def test_every_activation_stands_between_two_products(name: str, form: Callable[..., Tensor], level: str, dtype):
    activation, args = ALL[name], inputs(dtype, gate=name in GATED)
    plain, fused, gm, _ = run(lambda *given: form(*given, activation), args, level)
    assert operators(gm) == emitted(name)
    wanted = expected(*args, activation)
    assert distance(fused, wanted) < max(TOLERANCE[dtype], 1.5 * distance(plain, wanted))


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_are_told(name: str):
    said = left_alone(lambda *given: gathered(*given, OTHERS[name]), inputs(BF16, gate=False))
    assert any("between their two products stands something" in each for each in said), said


@pytest.mark.rotates(6)
@pytest.mark.parametrize("name", ALL)
def test_every_activation_stands_between_products_of_int8(name: str):
    """Quantised behind it, as no operator does both."""
    activation, (tokens, logits, *matrices) = ALL[name], inputs(BF16, gate=name in GATED)
    layers = [nn.Parameter(each, requires_grad=False) for matrix in matrices for each in quantised(matrix.detach())]

    def form(tokens: Tensor, logits: Tensor, first: Tensor, of_first: Tensor, down: Tensor, of_down: Tensor) -> Tensor:
        weights, experts = routed(logits)
        x8, scale = quantised(tokens)
        y = torch.einsum("td,tkjd->tkj", x8.float(), first[experts].float()) * scale[:, None]
        h8, scale = quantised(activation((y * of_first[experts].squeeze(-1)).to(tokens.dtype)))
        given = torch.einsum("tki,tkdi->tkd", h8.float(), down[experts].float()) * scale
        given = (given * of_down[experts].squeeze(-1)).to(tokens.dtype)
        return torch.einsum("tkd,tk->td", given, weights)

    plain, fused, gm, _ = run(form, (tokens, logits, *layers))
    assert operators(gm) == emitted(name) | {"npu::npu_dynamic_quant": 1}
    assert distance(fused, plain) < 2e-2
    assert distance(fused, expected(tokens, logits, *matrices, activation)) < 5e-2
