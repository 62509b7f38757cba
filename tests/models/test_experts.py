"""Experts of real models: what is launched in their place, in every form that transformers has for one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import fusion
from fusion.runtime.verification import relative_error

from .families import _DENSE_FIRST, _GROUPED, CONFIGS, LAYERS, build

pytestmark = pytest.mark.rotates(8)

FORMS = ("grouped_mm", "batched_mm")
_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
_ROUTED = dict(n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=0)
ROUTED: dict[str, Any] = {
    "Qwen3Moe": lambda: transformers.Qwen3MoeConfig(**_GROUPED, **_EXPERTS, norm_topk_prob=True),
    "Olmoe": lambda: transformers.OlmoeConfig(
        **{name: each for name, each in _GROUPED.items() if name != "head_dim"}, num_experts=8, num_experts_per_tok=2
    ),
    "Mixtral": lambda: transformers.MixtralConfig(**_GROUPED, num_local_experts=8, num_experts_per_tok=2),
    "Glm4Moe": lambda: transformers.Glm4MoeConfig(
        **_GROUPED, **_ROUTED, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "DeepseekV3": lambda: transformers.DeepseekV3Config(**dict(_DENSE_FIRST, moe_intermediate_size=64) | _ROUTED),
}
MOST = 6
"""Launches of the experts of a layer: rows, two products, the activation, the sum; weights that come in float32."""


def model(monkeypatch: pytest.MonkeyPatch, family: str, form: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    monkeypatch.setitem(CONFIGS, family, ROUTED[family])
    torch.compiler.reset()
    built = build(family, dtype)
    built.model.config._experts_implementation = form
    return built


@pytest.mark.rotates(12)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ROUTED)
def test_the_experts_of_a_layer_are_a_few_launches(monkeypatch: pytest.MonkeyPatch, family: str, form: str):
    built = model(monkeypatch, family, form)
    report = fusion.explain(built.model, **built.step("prefill"), options={"target": "ascend910_93"})
    assert sum(each.rule == "routed_experts" for each in report.matches) == LAYERS
    experts = [each.after.launches for path, each in report.layers.items() if path.endswith(".experts")]
    assert len(experts) == LAYERS
    assert max(experts) <= MOST


@pytest.mark.parametrize("form", FORMS)
def test_models_with_experts_keep_their_numbers(monkeypatch: pytest.MonkeyPatch, form: str):
    built, plain = (model(monkeypatch, "Qwen3Moe", form, torch.float32) for _ in range(2))
    compiled = torch.compile(built.model, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    with torch.no_grad():
        have, want = compiled(**built.step("prefill")).logits, plain.model(**plain.step("prefill")).logits
    assert relative_error(have, want) < 1e-5
