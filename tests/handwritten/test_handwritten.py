"""Code that is written for an NPU runs on the CPU next to the plain model: with equal weights, to equal numbers.

In float64 both agree to its last bits, or to those of float32 where the plain model computes a softmax in it. In
bfloat16 neither the hand-written code nor the rewritten model is farther from float64 than the plain one by half of its
distance and a unit in the last place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssExperts, GptOssTopKRouter

from . import experts, latent, torch_npu

pytestmark = pytest.mark.rotates(6)

EXAMPLES = Path(__file__).parents[2] / "examples"
BF16, F64 = torch.bfloat16, torch.float64
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair", "plan_cache": "off"}
Run = Callable[[torch.dtype], Tensor]


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    __import__(name)
    return sys.modules[name]


def error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


def rewritten(call: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, backend="cann_fusion", options=OPTIONS, dynamic=False)


def require_agreement(plain: Run, written: Run, fused: Run | None, exact: float = 1e-12) -> None:
    """Hold `written` and `fused` against `plain`, each a function of the dtype of weights and inputs."""
    truth = plain(F64)
    assert error(written(F64), truth) < exact
    bound = 1.5 * error(plain(BF16), truth) + 2**-8
    assert error(written(BF16), truth) < bound
    if fused is not None:
        assert error(fused(BF16), truth) < bound
        assert error(fused(BF16), written(BF16).double()) < bound


# attention over latents ----------------------------------------------------------------------------------------------


@pytest.mark.rotates(4)
def test_a_step_of_r1_by_the_prolog(monkeypatch: pytest.MonkeyPatch):
    r1 = example("deepseek_r1", monkeypatch)

    def run(step: Any, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        model = r1.Attention().bfloat16().to(dtype).eval()
        caches = tuple(torch.zeros(r1.BLOCKS, r1.SIZE, width, dtype=dtype) for width in (r1.LATENT, r1.ROPE))
        x, cos, sin, slots, lengths = r1.step(0, r1.PROMPT, BF16)
        model(x.to(dtype), cos.to(dtype), sin.to(dtype), caches, slots, r1.TABLE, lengths)
        x, cos, sin, slots, lengths = r1.step(r1.PROMPT, 1, BF16)
        y = step(model, x.to(dtype), cos.to(dtype), sin.to(dtype), caches, slots, r1.TABLE, lengths)
        return torch.cat([y.flatten(), *(each.flatten() for each in caches)])

    written = partial(latent.r1_decode, sizes=r1)
    require_agreement(
        partial(run, lambda model, *given: model(*given)),
        partial(run, written),
        partial(run, lambda model, *given: rewritten(model)(*given)),
        exact=1e-7,
    )


@pytest.mark.rotates(24)
@pytest.mark.parametrize("name", ["deepseek_v32", "glm5"])
def test_steps_of_sparse_attention(name: str, monkeypatch: pytest.MonkeyPatch):
    v32, chosen = example("deepseek_v32", monkeypatch), example(name, monkeypatch)
    # Every key is listed: which of nearly equal scores are the largest is for the indexer's own tests.
    sizes = chosen.Sizes(**{**vars(chosen.SIZES), "listed": v32.SIZE * v32.TABLE.shape[1]})

    def layers(model: Any, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, caches: list, *of_tokens: Tensor):
        slots, *_ = of_tokens
        counts = torch.tensor([count for _, count in v32.STEPS[step]])
        lengths = torch.tensor([first + count for first, count in v32.STEPS[step]])
        there = counts > 0
        ends, lengths = counts[there].cumsum(0).int(), lengths[there].int()
        listed = None
        for layer, own in zip(model.layers, caches, strict=True):
            x, residual, listed = latent.v32_layer(
                layer, x, residual, cos, sin, own, slots, v32.TABLE[there], ends, lengths, listed
            )
        return x, residual

    def run(call: Any, dtype: torch.dtype) -> Tensor:
        nonlocal step
        torch.manual_seed(0)
        model, results = chosen.build(sizes).to(dtype), []
        caches = model.empty_caches(dtype)
        for step in ("prompts", "a token each"):
            results.append(call(model, *v32.step(sizes, step, dtype, caches))[0])
        return torch.cat(results)

    step = ""
    require_agreement(
        partial(run, lambda model, *given: model(*given)),
        partial(run, layers),
        partial(run, lambda model, *given: rewritten(model)(*given)),
    )


# experts -------------------------------------------------------------------------------------------------------------


def test_a_layer_of_qwen3_moe(monkeypatch: pytest.MonkeyPatch):
    qwen = example("qwen3_moe", monkeypatch)

    def run(call: Any, dtype: torch.dtype) -> Tensor:
        return call(qwen.model("sorted", dtype), qwen.inputs(dtype))

    require_agreement(
        partial(run, lambda layer, x: layer(x)),
        partial(run, partial(experts.qwen3_layer, choices=qwen.CHOICES)),
        partial(run, lambda layer, x: rewritten(layer)(x)),
    )


GPT_OSS = GptOssConfig(
    hidden_size=64, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, num_hidden_layers=2, sliding_window=16, vocab_size=32,
    attn_implementation="eager",
)  # fmt: skip


def numbers(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Fill the Parameters with random numbers of bfloat16, in `dtype`."""
    torch.manual_seed(0)
    for each in module.parameters():
        each.data = (torch.randn(each.shape) * each.shape[-1] ** -0.5).bfloat16().to(dtype)
    return module.eval()


class Sparse(nn.Module):
    """The router and the experts of gpt-oss, as its layers call them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = GptOssTopKRouter(GPT_OSS), GptOssExperts(GPT_OSS)

    def forward(self, hidden: Tensor) -> Tensor:
        _, scores, chosen = self.router(hidden.flatten(0, 1))
        return self.experts(hidden.flatten(0, 1), chosen, scores).view_as(hidden)


def test_the_experts_of_gpt_oss():
    def run(call: Any, dtype: torch.dtype) -> Tensor:
        module = numbers(Sparse(), dtype)
        return call(module, torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype))

    def written(module: Any, hidden: Tensor) -> Tensor:
        return experts.gpt_oss_experts(module.router, module.experts, hidden, GPT_OSS.num_experts_per_tok)

    require_agreement(partial(run, lambda module, x: module(x)), partial(run, written), None)


@pytest.mark.parametrize("layer", [0, 1], ids=["a window", "all keys"])
def test_attention_of_gpt_oss(layer: int):
    def run(call: Any, dtype: torch.dtype) -> Tensor:
        module = numbers(GptOssAttention(GPT_OSS, layer), dtype)
        x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
        angles = torch.arange(24)[:, None] / 100.0 ** (torch.arange(32) / 32)
        return call(module, x, *(each[None].bfloat16().to(dtype) for each in (angles.cos(), angles.sin())))

    def plain(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        distance = torch.arange(24)[:, None] - torch.arange(24)
        seen = (distance >= 0) & (distance < (module.sliding_window or 24))
        mask = torch.zeros(1, 1, 24, 24, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        return module(x, (cos, sin), mask)[0]

    def written(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return experts.gpt_oss_attention(module, x, cos, sin, module.sliding_window)

    fused = partial(run, lambda module, *given: rewritten(partial(plain, module))(*given))
    require_agreement(partial(run, plain), partial(run, written), fused, exact=1e-7)


def test_experts_of_other_ranks():
    def run(call: Any, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        counts = torch.tensor([[2, 0, 3], [1, 4, 0]])
        gate_up, down = torch.randn(3, 16, 24) / 4, torch.randn(3, 12, 16) / 4
        return call(*(each.bfloat16().to(dtype) for each in (torch.randn(10, 16), gate_up, down)), counts)

    def plain(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
        expert = torch.arange(3).repeat(2).repeat_interleave(counts.flatten())
        gate, up = torch.einsum("th,thi->ti", rows, gate_up[expert]).chunk(2, -1)
        return torch.einsum("ti,tih->th", nn.functional.silu(gate) * up, down[expert])

    written = partial(run, lambda rows, gate_up, down, counts: experts.regrouped_experts(rows, counts, gate_up, down))
    require_agreement(partial(run, plain), written, None)


def test_experts_by_a_permutation():
    def run(call: Any, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        chosen = torch.rand(7, 3).argsort(-1)[:, :2].int()
        tensors = torch.randn(7, 16), torch.rand(7, 2), torch.randn(3, 16, 24) / 4, torch.randn(3, 12, 16) / 4
        x, weights, gate_up, down = (each.bfloat16().to(dtype) for each in tensors)
        return call(x, chosen, weights, gate_up, down)

    def plain(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tkhi->tki", x, gate_up[chosen]).chunk(2, -1)
        given = torch.einsum("tki,tkih->tkh", nn.functional.silu(gate) * up, down[chosen])
        return torch.einsum("tkh,tk->th", given, weights)

    require_agreement(partial(run, plain), partial(run, experts.permuted_experts), None)


def test_a_layer_in_int8():
    torch.manual_seed(0)
    x, weights = torch.randn(5, 64).bfloat16(), [torch.randn(64, 96) / 8, torch.randn(48, 64) / 7]
    scales = [each.abs().amax(0) / 127 for each in weights]
    whole = [(each / scale).round().char() for each, scale in zip(weights, scales, strict=True)]
    gate, up = (x.double() @ (whole[0] * scales[0]).double()).chunk(2, -1)
    truth = (nn.functional.silu(gate) * up) @ (whole[1] * scales[1]).double()
    assert error(experts.int8_mlp(x, *whole, *scales), truth) < 2e-2


def test_what_is_missing_is_named():
    with pytest.raises(AttributeError, match=r"reading torch_npu.npu_rmsnorm: .* did you mean npu_rms_norm\?"):
        _ = torch_npu.npu_rmsnorm
    assert not hasattr(torch_npu, "npu_moe_distribute_dispatch_v2")
    assert not torch_npu.npu.is_available()
    with pytest.raises(AttributeError, match="stand-in lacks it"):
        torch_npu.npu.set_device(0)
