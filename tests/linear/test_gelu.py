"""Gelu that is written out is one launch, which is nearer to float64 than what it stands for; others are told."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.testing import DTYPES
from tests.engine.graphs import fuse, numbers, traced
from tests.linear.test_swiglu_quant import distance

ROOT = math.sqrt(2 / math.pi)
Form = Callable[[Tensor], Tensor]
TANH: dict[str, Form] = {
    "GPT-2": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "GPT-J": lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "BERT": lambda x: x * (0.5 * (1.0 + torch.tanh(ROOT * (x + 0.044715 * x**3)))),
    "products": lambda x: 0.5 * x * (1 + (ROOT * (x + 0.044715 * x * x * x)).tanh()),
    "the sum multiplied out": lambda x: 0.5 * x * (torch.tanh(ROOT * x + ROOT * 0.044715 * x**3) + 1),
    "in float32": lambda x: (0.5 * x.float() * (1 + torch.tanh(ROOT * (x.float() + 0.044715 * x.float() ** 3)))).to(x),
    "halved at the end": lambda x: x * (1 + torch.tanh(ROOT * (x + 0.044715 * x.pow(3)))) / 2,
}
ERF: dict[str, Form] = {
    "BERT": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "halved at the end": lambda x: x * (1 + (x * 2**-0.5).erf()) / 2,
}
OTHERS: dict[str, tuple[Form, str]] = {
    "another cube": (lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.0447 * x**3))), "0.0356654 · x^3"),
    "no cube": (lambda x: 0.5 * x * (1 + torch.tanh(ROOT * x)), "of its tanh or erf is 0.797885 · x^1; torch"),
    "a fifth power": (lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**5))), ""),
    "a square": (lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**2))), "x^2"),
    "something added": (lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3) + 0.1)), "0.1 · x^0"),
    "not halved": (lambda x: x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3))), ""),
    "of another tensor": (lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x.flip(0) + 0.044715 * x.flip(0) ** 3))), ""),
    "one less": (lambda x: 0.5 * x * (torch.tanh(ROOT * (x + 0.044715 * x**3)) - 1), ""),
    "erf of x": (lambda x: 0.5 * x * (1 + torch.erf(x)), "the argument of its tanh or erf is 1 · x^1"),
    "kept in float32": (
        lambda x: 0.5 * x.float() * (1 + torch.tanh(ROOT * (x.float() + 0.044715 * x.float() ** 3))),
        "",
    ),
}


def launched(form: Form, dtype: torch.dtype, level: str = "composite"):
    """The calls of the fused graph, what it gives, what the plain one does, and what was done."""
    x = numbers(16, 64, dtype=dtype) * 2
    gm = traced(form, x, level=level)
    plain, outcome = gm(x)[0], fuse(gm)
    calls = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    return calls, gm(x)[0], plain, outcome


@pytest.mark.rotates(12)
@pytest.mark.parametrize("level", ["composite", "core", "decomposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("approximate", "name"), [*(("tanh", n) for n in TANH), *(("none", n) for n in ERF)])
def test_gelu_is_one_launch(approximate: str, name: str, dtype: torch.dtype, level: str):
    form = (TANH if approximate == "tanh" else ERF)[name]
    calls, fused, plain, _ = launched(form, dtype, level)
    assert calls == ["aten.gelu.default" if approximate == "tanh" else "npu.npu_gelu.default"]
    exact = F.gelu(numbers(16, 64, dtype=dtype).double() * 2, approximate=approximate)
    assert fused.dtype == plain.dtype == dtype
    assert distance(fused, exact) <= max(1.05 * distance(plain, exact), 1e-7)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_it_is_left_alone(name: str):
    form, reason = OTHERS[name]
    calls, fused, plain, outcome = launched(form, torch.bfloat16)
    assert not any("gelu" in each for each in calls)
    assert torch.equal(fused, plain)
    said = [str(each.cause) for each in outcome.refusals if each.rule == "gelu"]
    assert any(reason in each for each in said) if reason else not said, said
