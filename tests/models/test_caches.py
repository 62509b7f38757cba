"""Caches of real models: written in place, bit for bit as eager writes them, over a prompt and eight steps."""

from __future__ import annotations

import pytest
import torch
import transformers

import fusion

from .families import _GROUPED, CONFIGS, build, caches

STEPS = 8
SLIDING = dict(_GROUPED, sliding_window=16, num_local_experts=4, num_experts_per_tok=2)
WRITES = {"target": "host", "lower": "eager", "rules": {"cache_write", "sliding_write"}}
COPIES = ("index_copy", "index_put", "copy_", "roll", "slice_scatter")


@pytest.fixture(autouse=True)
def configurations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CONFIGS, "GptOss", lambda: transformers.GptOssConfig(**SLIDING))
    torch.compiler.reset()


def calls(built, mode: str, tokens: int):
    """A prompt, and then the tokens that follow, with one cache."""
    call = built.step(mode, tokens=tokens)
    yield call
    for number in range(STEPS):
        token = torch.full((2, 1), 5 + number)
        yield dict(call, input_ids=token)


def whole_copies(report, sizes: set[torch.Size]) -> list[str]:
    """Calls that copy a tensor as large as a cache into one."""
    return [
        node.name
        for gm in report.graphs
        for node in gm.graph.nodes
        if any(f"aten.{name}" in str(node.target) for name in COPIES) and node.meta["val"].shape in sizes
    ]


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("target", ["host", "ascend910_93"])
def test_no_cache_is_copied(family: str, target: str):
    built = build(family, torch.bfloat16)
    call = built.step("decode_static")
    report = fusion.explain(built.model, **call, options={"target": target})
    assert report.ops["npu::scatter_update_"] == len(caches(call))
    assert not whole_copies(report, {each.shape for each in caches(call)})


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "GptOss"])
def test_static_caches_are_eagers(family: str):
    built = build(family, torch.bfloat16, "eager" if family == "GptOss" else "sdpa")
    fused = torch.compile(built.model, backend="cann_fusion", options=WRITES, dynamic=False)
    places = None
    with torch.no_grad():
        for plain, ours in zip(calls(built, "prefill_static", 20), calls(built, "prefill_static", 20), strict=True):
            expected, got = built.model(**plain).logits, fused(**ours).logits
            assert torch.equal(got, expected)
            assert all(map(torch.equal, caches(ours), caches(plain)))
            now = [each.data_ptr() for each in caches(ours)]
            assert places in (None, now), "a cache has moved"
            places = now
