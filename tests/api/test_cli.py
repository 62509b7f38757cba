"""The command: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import Result
from typer.testing import CliRunner

from fusion.frontend import hf
from fusion.frontend.catalogue import operator_entries, rule_entries
from fusion.frontend.cli import app
from fusion.frontend.hf import Request, build
from fusion.frontend.library import installed
from fusion.operators import OPERATORS

FACTORIES = """
import torch


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def with_args():
    return norm, (torch.randn(2, 64),)


def with_kwargs():
    return norm, (), {"x": torch.randn(2, 64)}


def bare():
    return lambda: norm(torch.ones(2, 64))


def too_many():
    return norm, (), {}, 1


def no_tuple():
    return norm, 3


def no_model():
    return 7


def broken():
    return norm, ("text",)


def ending():
    def model(x):
        y = norm(x)
        return {0: y}[int(y.argmax())]

    return model, (torch.randn(2, 64),)
"""


def run(*arguments: str) -> Result:
    torch._dynamo.reset()
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"factories_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("factory", ["with_args", "with_kwargs", "bare"])
def test_a_factory_is_explained(factories: str, factory: str):
    done = run("explain", f"{factories}:{factory}", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["target"] == "ascend910_93"
    assert report["ops"] == {"npu::npu_rms_norm": 1}


def test_a_rule_can_be_disabled_and_graphs_dumped(factories: str, tmp_path: Path):
    done = run("explain", f"{factories}:with_args", "--disable", "rms_norm", "--dump", str(tmp_path / "dump"), "--json")
    assert json.loads(done.stdout)["ops"] == {}
    assert {path.name.split("_")[1] for path in (tmp_path / "dump").iterdir()} == {"captured.txt", "fused.txt"}


def test_the_report_is_text(factories: str):
    done = run("explain", f"{factories}:with_args", "--target", "ascend910b")
    assert done.exit_code == 0
    assert "fused for ascend910b" in done.stdout
    assert "npu::npu_rms_norm" in done.stdout


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("too_many", ["tuple of 4", "(model, args, kwargs)"]),
        ("no_tuple", ["returned int as args"]),
        ("no_model", ["returned int as model"]),
        ("absent", ["no callable 'absent'"]),
    ],
)
def test_a_wrong_factory_is_refused_in_words(factories: str, factory: str, words: list[str]):
    done = run("explain", f"{factories}:{factory}")
    assert done.exit_code == 2
    assert f"explaining {factories}:{factory}" in done.stderr
    assert all(each in done.stderr for each in words), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "no_such_module:build"), "there is no module 'no_such_module'"),
        (("explain", "nonsense"), "package.module:factory"),
        (("explain", "hf:qwen33"), "did you mean qwen3"),
        (("explain", "hf:vit"), "no causal language model"),
        (("explain", "hf:qwen3", "--target", "ascend910"), "did you mean 'ascend910b'"),
        (("explain", "hf:qwen3", "--mode", "train"), "prefill, decode"),
        (("explain", "hf:qwen3", "--layers", "0"), "give a positive number"),
        (("explain", "hf:qwen3", "--mode", "decode", "--cache", "none"), "decode reads a cache"),
        (("explain", "hf:qwen3", "--disable", "rms_nrm"), "did you mean 'rms_norm'"),
        (("ops", "npu_rms_nrom"), "did you mean 'npu_rms_norm'"),
        (("rules", "rms_nrom"), "did you mean 'rms_norm'"),
    ],
)
def test_bad_input_is_told_what_to_do(arguments: tuple[str, ...], words: str):
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr, done.stderr


def test_a_model_that_fails_is_not_bad_input(factories: str):
    done = run("explain", f"{factories}:broken")
    assert done.exit_code == 1
    assert "--traceback" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in run("explain", f"{factories}:broken", "--traceback").stderr


def test_a_model_that_fails_is_reported_up_to_there(factories: str):
    done = run("explain", f"{factories}:ending", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["ops"] == {"npu::npu_rms_norm": 1}
    assert report["interruption"]["error"] == "KeyError: 1"
    line = 1 + FACTORIES.splitlines().index("        return {0: y}[int(y.argmax())]")
    assert report["interruption"]["where"].endswith(f":{line}")
    assert "KeyError: 1 at " in done.stderr
    assert "not traced to the end" in run("explain", f"{factories}:ending").stdout


@pytest.mark.rotates(12)
def test_every_operator_is_listed():
    content = json.loads(run("ops", "--json").stdout)
    assert [each["name"] for each in content["operators"]] == sorted(OPERATORS)
    assert content["schemas"]["source"] in ("own", "torch_npu")
    assert all(each.split("::")[1] in run("ops").stdout for each in OPERATORS)


@pytest.mark.rotates(3)
def test_one_operator_is_shown_with_all_that_is_known():
    for entry in operator_entries():
        short = json.loads(run("ops", entry.name.split("::")[1], "--json").stdout)["operators"][0]
        assert short["schema"] == entry.schema
    shown = run("ops", "npu::npu_swiglu").stdout
    assert "rank(input) <= 8" in shown
    assert "aclnnSwiGlu" in shown


def test_every_rule_is_listed_with_its_package():
    entries = json.loads(run("rules", "--json").stdout)
    assert [each["name"] for each in entries] == [rule.name for rule in installed().rules]
    assert {each["package"] for each in entries} == {"cann-fusion"}
    assert all(each["meaning"] and each["formula"] and each["patterns"] and each["lowerings"] for each in entries)
    table = run("rules").stdout
    assert all(entry.name in table for entry in rule_entries())


def test_one_rule_is_shown_with_its_forms():
    shown = run("rules", "add_norm").stdout
    assert all(each in shown for each in ("rounded_sum", "float32_sum", "one of them is broadcast", "rms_norm"))


def test_variants_are_shown_by_their_whole_names():
    """In square brackets, which a terminal would take for markup."""
    lowerings = next(each for each in rule_entries() if each.name == "rope").lowerings
    assert "half[Rest]" in lowerings
    assert "lowering half[Rest]" in run("rules", "rope").stdout
    assert "half[Rest]" in run("rules").stdout


def test_help_and_version():
    assert "explain hf:qwen3" in run("--help").stdout
    assert "--context" in run("explain", "--help").stdout.replace("\x1b", "")
    assert run("--version").stdout.startswith("cann-fusion ")


@pytest.mark.rotates(4)
def test_a_hub_model_is_explained_at_its_real_sizes():
    done = run("explain", "hf:qwen3", "--mode", "decode", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert "2 of " in done.stderr
    assert report["launches"]["after"] < report["launches"]["before"]
    assert report["ops"]["npu::npu_rms_norm"] > 0


@pytest.mark.parametrize("cache", ["static", "dynamic", "none"])
def test_fake_models_have_real_sizes_and_tiny_models_real_weights(cache: str):
    fake = build(Request("gemma3_text", layers=2, cache=cache))
    config = fake.model.config
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert all(isinstance(each, torch._subclasses.FakeTensor) for each in fake.model.parameters())
    tiny = build(Request("gemma3_text", layers=2, cache=cache, tiny=True))
    assert tiny.model.config.hidden_size < config.hidden_size
    assert tiny.model.config.head_dim == config.head_dim
    assert not any(isinstance(each, torch._subclasses.FakeTensor) for each in tiny.model.parameters())
    assert ("past_key_values" in fake.kwargs) == (cache != "none")


def test_experts_give_way_to_dense_layers():
    call = build(Request("deepseek_v3"))
    assert not any("experts" in name for name, _ in call.model.named_modules())
    assert any("dense" in each for each in call.notices)


def test_a_dynamic_cache_holds_the_context():
    cache = build(Request("llama", mode="decode", cache="dynamic", context=17)).kwargs["past_key_values"]
    assert cache.get_seq_length() == 17


def test_a_static_cache_is_empty_before_a_prefill():
    cache = build(Request("llama", tiny=True)).kwargs["past_key_values"]
    assert int(cache.get_seq_length()) == 0
    assert not cache.layers[0].keys.any()


# models whose own code fails ------------------------------------------------------------------------------------------


def tried(monkeypatch: pytest.MonkeyPatch, request: Request, fails: Callable[[hf.Size, str], bool]) -> list[hf.Call]:
    """Build calls where some sizes and caches fail."""

    def build(transformers: object, request: Request, size: hf.Size, cache: str) -> hf.Call:
        if fails(size, cache):
            raise ValueError(f"no {cache}")
        return hf.Call(print, {"size": size, "cache": cache})

    monkeypatch.setattr(hf, "_call", build)
    return list(hf.calls(request, []))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_cache_that_cannot_be_static_is_another_one_with_a_note(mode: str, monkeypatch: pytest.MonkeyPatch):
    calls = tried(monkeypatch, Request("qwen3", mode), lambda _, cache: cache == "static")
    wanted = ["own", "grown", "none"] if mode == "prefill" else ["own", "grown"]
    assert [each.kwargs["cache"] for each in calls] == wanted
    assert calls[0].notices == ("qwen3 cannot be run with a static cache (no static): the cache that the model makes",)
    assert {each.kwargs["size"] for each in calls} == {hf.Size(fake=True)}


def test_a_model_that_cannot_be_small_has_its_real_sizes(monkeypatch: pytest.MonkeyPatch):
    calls = tried(monkeypatch, Request("qwen3", tiny=True), lambda size, _: not size.fake)
    assert (calls[0].kwargs["size"], calls[0].kwargs["cache"]) == (hf.Size(fake=True), "static")
    (note,) = calls[0].notices
    assert note.endswith("real tensors of small sizes (no static): fake tensors of real sizes")


def test_a_model_that_fails_in_every_way_fails_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="no static"):
        tried(monkeypatch, Request("qwen3", tiny=True), lambda *_: True)


def test_a_model_that_is_as_it_was_asked_for_has_no_note(monkeypatch: pytest.MonkeyPatch):
    assert tried(monkeypatch, Request("qwen3"), lambda *_: False)[0].notices == ()


@pytest.mark.rotates(8)
def test_a_call_that_cannot_be_traced_gives_way_to_one_with_another_cache(monkeypatch: pytest.MonkeyPatch):
    def model(cache: str) -> torch.Tensor:
        if cache == "static":
            raise ValueError("behind a static cache")
        return torch.ones(2).sin()

    def build(transformers: object, request: Request, size: hf.Size, cache: str) -> hf.Call:
        return hf.Call(model, {"cache": cache})

    monkeypatch.setattr(hf, "_call", build)
    done = run("explain", "hf:qwen3", "--json")
    assert done.exit_code == 0, done.output
    (note,) = json.loads(done.stdout)["notes"]
    assert note.endswith("a static cache (ValueError: behind a static cache): the cache that the model makes")
    assert "behind a static cache" in done.stderr


@pytest.mark.parametrize(
    ("model_type", "cache"),
    [
        ("deepseek_v4", "the cache that the model makes"),
        *(
            pytest.param(name, cache, marks=pytest.mark.rotates)
            for name, cache in (
                ("minimax", "the cache that the model makes"), ("mpt", "the cache that the model makes"),
                ("hrm_text", "a dynamic cache"), ("mamba2", "fake tensors of real sizes"), ("helium", "small heads"),
                ("jamba", "one layer of every kind"), ("bart", ""), ("falcon", ""), ("gemma3n", ""), ("jetmoe", ""),
            )
        ),
    ],
)  # fmt: skip
def test_models_that_need_another_cache_or_size_are_explained(model_type: str, cache: str):
    done = run("explain", f"hf:{model_type}", "--mode", "decode", "--tiny", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["interruption"] is None
    assert sum(cache in note for note in report["notes"] if cache) == bool(cache), report["notes"]
    assert report["launches"]["after"] <= report["launches"]["before"]


def test_a_type_without_a_causal_language_model_gives_its_decoder():
    built = {
        name: hf._auto(transformers, hf._default(transformers, name)) for name in ("glm5_next", "qwen3", "t5", "vit")
    }
    auto = transformers.AutoModel, transformers.AutoModelForCausalLM
    assert built == {"glm5_next": auto[0], "qwen3": auto[1], "t5": None, "vit": None}


def test_without_transformers_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("explain", "hf:qwen3")
    assert done.exit_code == 2
    assert "pip install cann-fusion[models]" in done.stderr
