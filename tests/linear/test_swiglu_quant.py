"""A network in W8A8 is four launches: its input quantised, gate and up in one product, both activated, and the last."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.frontend.library import installed
from fusion.operators import operator_of
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.testing import capture

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
K, H = 64, 48
QUANT, PRODUCT, BOTH = "npu_dynamic_quant", "npu_quant_matmul", "npu_swiglu_quant"
FUSED = {QUANT: 1, PRODUCT: 2, BOTH: 1}


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def layer(rows: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return ((rows[0].int() @ weight.int().t()).float() * rows[1] * scale).to(dtype)


def apart(x: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, down: Tensor, of_down: Tensor) -> Tensor:
    """Each layer quantises what it reads."""
    hidden = F.silu(layer(quantised(x), gate, of_gate, x.dtype)) * layer(quantised(x), up, of_up, x.dtype)
    return layer(quantised(hidden), down, of_down, x.dtype)


def merged(
    x: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, down: Tensor, of_down: Tensor
) -> Tensor:
    """Gate and up in one layer."""
    both = layer(quantised(x), torch.cat([gate, up]), torch.cat([of_gate, of_up]), x.dtype)
    return layer(quantised(F.silu(both[..., :H]) * both[..., H:]), down, of_down, x.dtype)


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(3)

    def made(*shape: int) -> list[Tensor]:
        whole = torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8)
        return [
            nn.Parameter(each, requires_grad=False)
            for each in (whole, (torch.rand(shape[0], generator=draw) + 1) / 500)
        ]

    return torch.randn(2, 5, K, generator=draw).to(dtype), *made(H, K), *made(H, K), *made(K, H)


def exact(x: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, down: Tensor, of_down: Tensor) -> Tensor:
    """In float64."""

    def through(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        of_rows = rows.abs().amax(-1, keepdim=True) / 127
        return ((rows / of_rows).round() @ weight.double().t()) * of_rows * scale.double()

    hidden = F.silu(through(x.double(), gate, of_gate)) * through(x.double(), up, of_up)
    return through(hidden, down, of_down)


def run(form: Any, args: tuple[Tensor, ...], level: Any = "composite", lower: str = "eager"):
    """The plain result, the fused one, the fused operators, and what was done."""
    captured = capture(form, args, level, dynamic=False)
    gm = captured.graph
    plain = gm(*captured.inputs)
    named = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), captured.inputs, strict=True))
    outcome = fuse_graph(
        gm.graph, installed(), Options.of({"target": "ascend910_93", "plan_lower": lower}), captured.facts
    )
    assert not outcome.failures, outcome.failures
    gm.recompile()
    further = [each.module(*(named[name] for name in each.sources)) for each in outcome.prepared]
    found = (operator_of(node.target) for node in gm.graph.nodes)
    return plain[0], gm(*captured.inputs, *further)[0], dict(Counter(each.short for each in found if each)), outcome


def distance(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@pytest.mark.parametrize(("level", "dtype"), [("composite", BF16), ("core", F16), ("decomposed", BF16)])
@pytest.mark.parametrize("form", [apart, merged], ids=lambda form: form.__name__)
@pytest.mark.rotates(3)
def test_a_network_is_four_launches(form: Any, level: str, dtype: torch.dtype):
    args = inputs(dtype)
    plain, fused, operators, _ = run(form, args, level)
    assert operators == FUSED
    assert distance(fused, exact(*args)) < max(1e-2, 1.5 * distance(plain, exact(*args)))


@pytest.mark.parametrize("form", [apart, merged], ids=lambda form: form.__name__)
def test_torchair_takes_it_by_the_operator_of_ge(form: Any):
    assert run(form, inputs(BF16), lower="torchair")[2] == FUSED


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_what_is_activated_in_float32_is_quantised_without_rounding(dtype: torch.dtype):
    def wide(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, dim=-1)
        return quantised(F.silu(gate.float()) * up.float())

    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain, fused, operators, _ = run(wide, (x,))
    assert operators == {"npu_swiglu_quant": 1}
    assert (plain.int() - fused.int()).abs().max() <= 1


def test_what_is_read_before_it_is_quantised_is_kept():
    def read(*args: Tensor) -> tuple[Tensor, Tensor]:
        x, gate, of_gate, up, of_up, *_ = args
        hidden = F.silu(layer(quantised(x), gate, of_gate, x.dtype)) * layer(quantised(x), up, of_up, x.dtype)
        return quantised(hidden)[0], hidden

    assert run(read, inputs(BF16))[2] == {QUANT: 2, PRODUCT: 1, "npu_swiglu": 1}


def test_wide_rows_are_quantised_apart():
    x = torch.randn(3, 2 * 4104, generator=torch.Generator().manual_seed(0)).to(BF16)
    assert run(lambda x: quantised(F.silu(x[:, :4104]) * x[:, 4104:]), (x,))[2] == {QUANT: 1, "npu_swiglu": 1}


def other_rows(x: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, *_: Tensor) -> Tensor:
    return F.silu(layer(quantised(x), gate, of_gate, x.dtype)) * layer(quantised(x.flip(0)), up, of_up, x.dtype)


def other_scales(x: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, *_: Tensor) -> Tensor:
    x8, scale = quantised(x)
    return F.silu(layer((x8, scale), gate, of_gate, x.dtype)) * layer((x8, scale.flip(0)), up, of_up, x.dtype)


@pytest.mark.parametrize("form", [other_rows, other_scales], ids=lambda form: form.__name__)
def test_layers_of_other_rows_are_not_joined(form: Any):
    plain, fused, operators, _ = run(form, inputs(BF16))
    assert "npu_swiglu" not in operators
    assert operators[PRODUCT] == 2
    assert distance(fused, plain) < 1e-2


def test_gates_that_change_places_are_told():
    def swapped(x: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, *_: Tensor) -> Tensor:
        both = layer(quantised(x), torch.cat([gate, up]), torch.cat([of_gate, of_up]), x.dtype)
        return quantised(both[..., :H] * F.silu(both[..., H:]))[0]

    _, _, operators, outcome = run(swapped, inputs(BF16))
    assert BOTH not in operators
    assert any("the first half, or lane, is up" in str(each.cause) for each in outcome.refusals)
