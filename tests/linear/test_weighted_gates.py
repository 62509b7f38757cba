"""A gated product that stays in float32, such as one times the weight of a token for its expert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

OPTIONS = {"target": "ascend910_93", "lower": "eager"}
K, H = 64, 48
Product = Callable[["Expert", Tensor, Tensor], Tensor]


class Expert(nn.Module):
    """Gate, up and down, of which `product` makes one function of tokens [T, K] and their weights [T, 1]."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.gate, self.up, self.down = nn.Linear(K, H), nn.Linear(K, H), nn.Linear(H, K, bias=False)
        self.both = nn.Linear(K, 2 * H, bias=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.down(self.product(self, x, weight).to(x.dtype))


def clipped(expert: Expert, x: Tensor, weight: Tensor) -> Tensor:
    gate, up = expert.gate(x).to(weight.dtype).clamp(max=1.5), expert.up(x).to(weight.dtype).clamp(min=-1.5, max=1.5)
    return F.silu(gate) * up * weight


def halves(expert: Expert, x: Tensor, weight: Tensor) -> Tensor:
    gate, up = expert.both(x).chunk(2, dim=-1)
    return F.silu(gate.to(weight.dtype)) * up.to(weight.dtype) * weight


def wide_halves(expert: Expert, x: Tensor, weight: Tensor) -> Tensor:
    gate, up = expert.both(x).to(weight.dtype).chunk(2, dim=-1)
    return weight * (gate / (1 + torch.exp(-gate)) * up)


FUSED: dict[str, Product] = {
    "weight first": lambda e, x, w: w * (F.silu(e.gate(x).to(w.dtype)) * e.up(x).to(w.dtype)),
    "weight last": lambda e, x, w: F.silu(e.gate(x).to(w.dtype)) * e.up(x).to(w.dtype) * w,
    "up promoted": lambda e, x, w: w * (F.silu(e.gate(x).to(w.dtype)) * e.up(x)),
    "clipped": clipped,
    "halves": halves,
    "halves that are cast before": wide_halves,
}
LEFT: dict[str, Product] = {
    "no up": lambda e, x, w: w * F.silu(e.gate(x).to(w.dtype)),
    "a sigmoid": lambda e, x, w: w * (e.gate(x).to(w.dtype).sigmoid() * e.up(x).to(w.dtype)),
}


def report_and_errors(product: Product, dtype: torch.dtype) -> tuple[fusion.Report, float, float]:
    """Report, and how far the fused and the plain module are from float64, as shares of its norm."""
    torch.manual_seed(0)
    expert, x, weight = Expert(product).to(dtype).eval(), torch.randn(7, K).to(dtype), torch.rand(7, 1)
    torch._dynamo.reset()
    with torch.no_grad():
        report = fusion.explain(expert, x, weight, options=OPTIONS)
        results = expert(x, weight), torch.compile(expert, backend="cann_fusion", options=OPTIONS)(x, weight)
        exact = expert.double()(x.double(), weight.double())
    plain, fused = ((each.double() - exact).norm().item() / exact.norm().item() for each in results)
    return report, fused, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.rotates)], ids=str)
@pytest.mark.parametrize("product", FUSED.values(), ids=FUSED)
def test_a_product_in_float32_is_one_operator(product: Product, dtype: torch.dtype):
    report, fused, plain = report_and_errors(product, dtype)
    assert sum(count for name, count in report.ops.items() if "swiglu" in name) == 1
    assert fused <= 1.01 * plain


@pytest.mark.parametrize("product", LEFT.values(), ids=LEFT)
def test_other_products_are_left(product: Product):
    report, fused, plain = report_and_errors(product, torch.bfloat16)
    assert not any("swiglu" in name for name in report.ops)
    assert fused <= 1.01 * plain


@pytest.mark.rotates(6)
def test_what_is_rounded_before_it_is_weighted_keeps_its_rounding():
    """The operator runs in 16 bits where the model rounds its product to them."""

    def product(expert: Expert, x: Tensor, weight: Tensor) -> Tensor:
        return (F.silu(expert.gate(x)) * expert.up(x)).to(weight.dtype) * weight

    report, *_ = report_and_errors(product, torch.bfloat16)
    (call,) = [node for node in report.graphs[0].graph.nodes if "npu_swiglu" in str(node.target)]
    assert call.meta["val"].dtype == torch.bfloat16
