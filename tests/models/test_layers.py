"""Models of several layers, of which three are searched: they become what they would if each layer had been."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from fusion import Options, pipeline
from fusion.frontend import backend
from fusion.pipeline import Outcome

from .families import build, caches

CASES = [("Qwen3", "decode_static", 5), ("DeepseekV32", "decode_static", 6)]
AT_NIGHT = [
    (family, mode, 7)
    for family in ("Qwen3", "Llama", "Gemma", "Glm4", "Phi3", "DeepseekV2", "DeepseekV3", "DeepseekV32", "GlmMoeDsa")
    for mode in ("prefill_static", "decode_dynamic", "masked_prefill")
]


def sizes(family: str, layers: int) -> dict[str, Any]:
    """Layers that are all dense."""
    indexed = {"mlp_layer_types": ["dense"] * layers} if family in ("DeepseekV32", "GlmMoeDsa") else {}
    return {"num_hidden_layers": layers, "first_k_dense_replace": layers} | indexed


def outcome(family: str, mode: str, layers: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """What was done, and what a step gives, with its caches."""
    found: list[Outcome] = []
    fuse_graph = pipeline.fuse_graph

    def kept(*args: Any) -> Outcome:
        found.append(fuse_graph(*args))
        return found[-1]

    built = build(family, torch.bfloat16, **sizes(family, layers))
    call = built.step(mode)
    torch.compiler.reset()
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(backend, "fuse_graph", kept)
        if whole:
            patched.setattr(pipeline, "divide", lambda *_: None)
        fused = backend.FusionBackend(Options(target="ascend910_93", lower="eager"))
        logits = torch.compile(built.model, backend=fused)(**call).logits
    (done,) = found
    chosen = [(each.match.rule.name, each.lowering, each.match.node.name) for each in done.chosen]
    told = (chosen, Counter(map(str, done.refusals)), done.before, done.in_place, done.result_copies)
    return told, [logits, *(caches(call) if "past_key_values" in call else ())]


@pytest.mark.parametrize(
    ("family", "mode", "layers"), CASES + [pytest.param(*each, marks=pytest.mark.rotates) for each in AT_NIGHT]
)
def test_layers_become_what_each_would(family: str, mode: str, layers: int, monkeypatch: pytest.MonkeyPatch):
    (folded, results), (whole, expected) = (outcome(family, mode, layers, each, monkeypatch) for each in (False, True))
    assert folded == whole
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
