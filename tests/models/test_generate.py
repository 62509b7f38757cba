"""`generate` of transformers in compiled steps, and models of which only the layers or attentions are compiled."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

import fusion
from fusion.frontend.backend import FusionBackend
from fusion.report.outcome import GraphReport
from fusion.runtime.verification import relative_error

from .families import Built, build, caches

pytestmark = pytest.mark.rotates(6)

FAMILIES = ("Qwen3", "Llama")
OPTIONS = {"target": "host", "lower": "eager"}
LONG = [pytest.param(family, 64, marks=pytest.mark.rotates) for family in FAMILIES]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.fixture
def reports(monkeypatch):
    """What is fused while a test runs; not in the backend itself, because transformers copies it."""
    made: list[GraphReport] = []
    fuse = FusionBackend.fuse

    def watched(self: FusionBackend, *given: Any, **more: Any) -> GraphReport:
        made.append(fuse(self, *given, **more))
        return made[-1]

    monkeypatch.setattr(FusionBackend, "fuse", watched)
    return made


def prompts(built: Built, length: int) -> dict[str, Any]:
    """Two prompts, one padded on the left; greedy, and never at an end before `length` tokens."""
    call = built.step("masked_prefill")
    wanted = dict(max_new_tokens=length, min_new_tokens=length, do_sample=False)
    return dict(wanted, input_ids=call["input_ids"], attention_mask=call["attention_mask"])


def config(backend: Any, options: dict[str, Any] | None) -> transformers.CompileConfig:
    made = transformers.CompileConfig(backend=backend, mode=None, options=options)
    made._compile_all_devices = True
    return made


def matches(reports: list[GraphReport]) -> list[int]:
    return [len(each.matches) for each in reports]


@pytest.mark.parametrize(("family", "length"), [("Qwen3", 16), ("Llama", 16), *LONG])
def test_a_static_cache(family, length, reports):
    built = build(family, torch.float32)
    call = dict(prompts(built, length), cache_implementation="static")
    want = built.model.generate(**call, disable_compile=True)
    have = built.model.generate(**call, compile_config=config("cann_fusion", OPTIONS))
    assert have.shape == (2, 12 + length)
    assert torch.equal(have, want)
    assert matches(reports) == [
        len(fusion.explain(built.model, **built.step("decode_static"), options=OPTIONS).matches)
    ]


@pytest.mark.parametrize(("family", "length"), [("Qwen3", 16), *LONG])
def test_a_cache_that_grows(family, length, reports):
    """With such a cache `generate` compiles nothing, so the model is compiled by hand."""
    built = build(family, torch.float32)
    call = prompts(built, length)
    want = built.model.generate(**call)
    built.model.forward = torch.compile(built.model.forward, backend="cann_fusion", options=OPTIONS, dynamic=True)
    assert torch.equal(built.model.generate(**call), want)
    assert 2 <= len(reports) <= 3, "the prompt, the first token, and all others"
    assert all(matches(reports))


@pytest.mark.rotates(12)
def test_a_backend_with_its_options_can_be_handed_over(reports):
    built = build("Llama", torch.float32)
    call = dict(prompts(built, 3), cache_implementation="static")
    backend = FusionBackend(fusion.Options.of(OPTIONS, assume={"attention_mask": "causal"}))
    have = built.model.generate(**call, compile_config=config(backend, None))
    assert torch.equal(have, built.model.generate(**call, disable_compile=True))
    assert reports[0].assumptions == {"attention_mask": "causal"}


@pytest.mark.parametrize(
    ("family", "name"), [("Qwen3", "attention_mask.full_attention"), ("Llama", "attention_mask")], ids=FAMILIES
)
@pytest.mark.parametrize(("kind", "attention"), [("padding", "sdpa"), ("padding", "eager"), ("causal", "sdpa")])
def test_masks_made_by_generate_are_checked(family, name, kind, attention, reports):
    built = build(family, torch.float32, attention)
    call = dict(prompts(built, 6), cache_implementation="static")
    want = built.model.generate(**call, disable_compile=True)
    how = config("cann_fusion", dict(OPTIONS, assume={"attention_mask": kind}))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        have = built.model.generate(**call, compile_config=how)
    assert torch.equal(have, want)
    shown = kind == "padding" and attention == "sdpa"  # booleans are shown as they are: nothing is relied on
    assert [each.assumptions for each in reports] == [{} if shown else {name: kind}]
    assert all(any(match.rule == "attention" for match in each.matches) for each in reports)
    told = [str(each.message) for each in said if "cann-fusion" in str(each.message)]
    assert len(told) == (0 if kind == "padding" else 1), told
    assert all(f"{name!r} is a causal mask, but this call passes another one" in each for each in told)


REGIONS = {"layer": "", "attention": "self_attn"}


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    "mode", ["prefill", "decode_static", pytest.param("decode_dynamic", marks=pytest.mark.rotates)]
)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_region_fuses_what_the_whole_model_fuses_there(family, region, mode, reports):
    """One sequence: for several, whether it pays to repeat the rotary tables depends on how many layers share them."""
    built = build(family, torch.float32)
    whole = fusion.explain(built.model, **built.step(mode, batch=1), options=OPTIONS).matches
    own, step = built.step(mode, batch=1), built.step(mode, batch=1)
    with torch.no_grad():
        want = built.model(**own).logits
    reports.clear()
    for layer in built.model.model.layers:
        part = layer.get_submodule(REGIONS[region])
        part.forward = fusion.fuse(options=OPTIONS)(part.forward)
    with torch.no_grad():
        have = built.model(**step).logits
    assert relative_error(have, want) < 1e-5
    for mine, plain in zip(caches(step), caches(own), strict=True):
        assert relative_error(mine, plain) < 1e-5
    first = f"model.layers.0.{REGIONS[region]}"
    inside = Counter(each.rule for each in whole if each.module.startswith(first))
    assert inside
    assert 1 <= len(reports) <= len(built.model.model.layers)
    for each in reports:
        assert Counter(match.rule for match in each.matches) == inside
