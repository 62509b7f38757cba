"""Layers with an adapter beside them, base(x) + B(A(x)) · s (LoRA, Hu et al., 2021), in a block of a decoder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

H, HEADS, KV_HEADS, D, INNER, RANK = 256, 4, 2, 64, 512, 8
OPTIONS = {"target": "ascend910_93", "lower": "eager"}


class Adapted(nn.Module):
    """As PEFT writes it: input and result are cast to the dtype of the adapter, and back."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs, bias=False)
        self.lora_a, self.lora_b = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        self.scaling = 2.0

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        dtype = result.dtype
        result = result + self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype))) * self.scaling
        return result.to(dtype)


class Merged(Adapted):
    """The adapter added to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base_layer.weight + (self.lora_b.weight @ self.lora_a.weight) * self.scaling)


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):
    def __init__(self, adapted: str, layer: type[Adapted] = Adapted):
        super().__init__()

        def made(name: str, inputs: int, outputs: int) -> nn.Module:
            return layer(inputs, outputs) if name in adapted else nn.Linear(inputs, outputs, bias=False)

        torch.manual_seed(0)
        self.q, self.k, self.v = (made(n, H, h * D) for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
        self.o, self.g, self.u, self.d = (
            made(*each) for each in (("o", HEADS * D, H), ("g", H, INNER), ("u", H, INNER), ("d", INNER, H))
        )
        self.before, self.between = Norm(H), Norm(H)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (layer(h).unflatten(-1, (-1, D)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = turned(q, cos[:, None], sin[:, None]), turned(k, cos[:, None], sin[:, None])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.d(F.silu(self.g(h)) * self.u(h))


def told(block: Block) -> fusion.Report:
    torch.compiler.reset()
    angle = torch.rand(1, 8, D // 2).repeat(1, 1, 2)
    args = torch.randn(1, 8, H).bfloat16(), angle.cos().bfloat16(), angle.sin().bfloat16()
    wide = [each.double() for each in args]
    block = block.bfloat16().eval()
    with torch.no_grad():
        report = fusion.explain(block, *args, options=OPTIONS)
        plain, fused = block(*args), torch.compile(block, backend="cann_fusion", options=OPTIONS)(*args)
        exact = block.double()(*wide)
    errors = [(each.double() - exact).square().mean().sqrt() for each in (fused, plain)]
    assert errors[0] <= 1.5 * errors[1]
    return report


AROUND = {"npu::npu_rms_norm", "npu::npu_apply_rotary_pos_emb", "npu::npu_fused_infer_attention_score_v2"}


@pytest.mark.rotates(12)
@pytest.mark.parametrize("adapted", ["qv", "qkvo", "qkvogud"])
def test_what_stands_around_adapters_is_fused(adapted: str):
    report = told(Block(adapted))
    assert AROUND | {"npu::npu_add_rms_norm"} <= set(report.ops)
    before, after = report.launches
    assert after <= before - 28


@pytest.mark.rotates(4)
def test_adapters_that_are_merged_are_layers():
    assert told(Block("qkvogud", Merged)).ops == told(Block("")).ops


def test_a_gate_with_an_adapter_is_joined_with_none():
    report = told(Block("gu"))
    assert "npu::npu_swiglu" not in report.ops
    assert any(
        "they are neither halves, or lanes, of one" in each.reason
        for each in report.refusals
        if each.rule == "activation"
    )
