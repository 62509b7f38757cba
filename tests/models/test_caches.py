"""Caches of real models: written in place, bit for bit as eager writes them, over a prompt and eight steps."""

from __future__ import annotations

import pytest
import torch
import transformers

import fusion

from .families import _GROUPED, CONFIGS, build, caches

pytestmark = pytest.mark.rotates(8)

STEPS = 8
SLIDING = dict(_GROUPED, sliding_window=16, num_local_experts=4, num_experts_per_tok=2)
WRITES = {"target": "host", "lower": "eager", "rules": {"cache_write"}}
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


@pytest.mark.rotates(8)
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


@pytest.mark.rotates(8)
@pytest.mark.parametrize("rules", [WRITES["rules"], frozenset()], ids=["writes", "every rule"])
def test_growing_caches_are_eagers(rules):
    """A DynamicCache is joined, not written to: the first call joins to an empty tensor."""
    built = build("Qwen3", torch.float32)
    fused = torch.compile(built.model, backend="cann_fusion", options={**WRITES, "rules": rules})
    exact = {"rtol": 0, "atol": 0} if rules else {"rtol": 1e-4, "atol": 1e-5}
    with torch.no_grad():
        for plain, ours in zip(calls(built, "prefill_dynamic", 9), calls(built, "prefill_dynamic", 9), strict=True):
            expected, got = built.model(**plain).logits, fused(**ours).logits
            torch.testing.assert_close(got, expected, **exact)
            for have, want in zip(caches(ours), caches(plain), strict=True):
                torch.testing.assert_close(have, want, **exact)
    assert caches(ours)[0].shape[2] == 9 + STEPS


def beyond(cache: torch.Tensor, rows: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)
    return cache.sum(-1)


@pytest.mark.rotates(18)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("start", [6, 8, -1])
def test_a_full_cache_is_an_error_and_no_other_row_is_written(lower: str, start: int):
    """As in eager, whose index_copy_ raises; the rows of the next sequence and of the next head stay."""
    compiled = torch.compile(beyond, backend="cann_fusion", options={**WRITES, "lower": lower}, dynamic=False)
    cache, rows = torch.zeros(2, 3, 8, 4), torch.ones(2, 3, 3, 4)
    with pytest.raises((IndexError, RuntimeError)):
        beyond(cache.clone(), rows, torch.tensor(start))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(cache, rows, torch.tensor(start))
    asked = [place for place in range(start, start + 3) if 0 <= place < 8]
    others = [place for place in range(8) if place not in asked]
    assert not cache[:, :, others].any()


@pytest.mark.rotates(6)
def test_a_static_cache_that_is_full_raises():
    built = build("Qwen3", torch.float32)
    fused = torch.compile(built.model, backend="cann_fusion", options=WRITES, dynamic=False)
    call = built.step("prefill_static", tokens=48)
    with torch.no_grad():
        fused(**call)
        before = [each.clone() for each in caches(call)]
        with pytest.raises((IndexError, RuntimeError)):
            fused(**dict(call, input_ids=torch.full((2, 1), 5)))
    assert all(map(torch.equal, caches(call), before))
