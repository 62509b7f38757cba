"""`fusion.integrations`: the pass in other compilers, beside the passes of the user."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusion
from fusion.errors import FusionError, OptionError
from fusion.frontend.integrations.hosts import HOOK
from tests.support.child import REPO

HOST = {"target": "host"}
QUICK = {"fallback_by_default": True, "fx_graph_cache": False}  # torch's kernels: no code is generated


class Normed(nn.Module):
    """x [B, 64] → [B, 64]"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + 1


class Counting(CustomGraphPass):
    """A pass of the user that counts the graphs, and those nodes of them that this package has made."""

    def __init__(self) -> None:
        self.graphs = self.made = 0

    def __call__(self, graph: fx.Graph, *context: Any) -> None:
        self.graphs += 1
        self.made += any("fusion" in node.meta for node in graph.nodes)

    def uuid(self) -> str:
        return "counting"


def run(options: Any = None, **how: Any) -> None:
    """Compile a model by Inductor and compare it with its eager run."""
    torch._dynamo.reset()
    model, x = Normed().eval(), torch.randn(3, 64)
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(model, options=options, **how)(x), model(x))


def test_inductor_runs_the_pass_behind_those_that_it_has():
    mine, other = Counting(), Counting()
    config = fusion.integrations.inductor({**QUICK, HOOK: mine, "joint-custom-post-pass": other}, HOST)
    first, guest = config[HOOK]
    assert first is mine
    run(config)
    assert (mine.graphs, mine.made, other.graphs) == (1, 0, 1)
    assert guest.report.ops == {"npu::npu_rms_norm": 1}


def test_passes_in_the_configuration_of_inductor_still_run():
    mine = Counting()
    with inductor_config.patch({HOOK: mine}):
        run(fusion.integrations.inductor(QUICK, HOST))
    assert mine.graphs == 1


def test_the_same_pass_is_added_once():
    config = fusion.integrations.inductor(None, HOST)
    assert fusion.integrations.inductor(config, HOST) == config
    assert len(fusion.integrations.inductor(config, {"target": "ascend910b"})[HOOK]) == 2


def test_the_backend_and_a_guest_fuse_once():
    guest, mine = fusion.FusionPass(HOST), Counting()
    before = len(fusion.reports())
    with inductor_config.patch({**QUICK, HOOK: (guest, mine)}):
        own = guest.uuid()
        run({"target": "host", "lower": "inductor", "plan_cache": "off"}, backend="cann_fusion")
        assert guest.uuid() == own
    assert guest.report.parts == ()
    assert mine.graphs == 1
    assert [each.door for each in fusion.reports()[before:]] == ["backend"]


def test_options_of_the_host_are_not_those_of_the_pass():
    with pytest.raises(OptionError, match="'max_autotune' is not a known option"):
        fusion.integrations.inductor({}, {"max_autotune": True})


def test_a_guest_says_which_options_have_no_effect():
    config = fusion.integrations.inductor(QUICK, {**HOST, "assume": {"mask": "causal"}, "verify": True})
    notes = config[HOOK][-1].report.notes
    assert [each.partition(" has no effect")[0] for each in notes] == ["option assume", "option verify"]


def test_export_is_the_function_for_programs():
    assert fusion.integrations.export is fusion.fuse_exported


@pytest.mark.parametrize("helper", ["torchair", "npugraph_ex"])
def test_another_compiler_is_no_option(helper: str):
    with pytest.raises(OptionError, match=f"handing graphs to {helper}: option lower is 'eager'"):
        getattr(fusion.integrations, helper)(None, {"lower": "eager"})


@pytest.mark.parametrize(("helper", "planned"), [("torchair", "torchair"), ("npugraph_ex", "npugraph_ex")])
def test_fusions_are_planned_for_the_compiler(helper: str, planned: str):
    backend = getattr(fusion.integrations, helper)(None, {"target": "ascend910_93", "assume": {"mask": "causal"}})
    assert (backend.options.lower, backend.options.plan_lower) == (helper, planned)
    assert backend.changed({"fuel": 1}, None).settings is backend.settings


class Protocol:
    """The part of vLLM that its manager of passes asks of a pass, as its module `inductor_pass` documents it."""

    class InductorPass(CustomGraphPass):
        def uuid(self) -> str:
            raise AssertionError("a pass has a key of its own")

        def is_applicable_for_range(self, compile_range: Any) -> bool:
            return True

    class Earlier(InductorPass):
        def __init__(self, key: str = "earlier") -> None:
            self.key, self.graphs = key, 0

        def __call__(self, graph: fx.Graph) -> None:
            self.graphs += 1

        def uuid(self) -> str:
            return self.key


class Manager(CustomGraphPass):
    """A manager of passes, which does with them what vLLM's `PostGradPassManager` does."""

    def __init__(self, *passes: Any) -> None:
        assert all(isinstance(each, Protocol.InductorPass) for each in passes)
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            if each.is_applicable_for_range(range(1, 8)):
                each(graph)

    def uuid(self) -> list[str]:
        return [each.uuid() for each in self.passes]


@pytest.fixture(params=["vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass"])
def _vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules by the names that vLLM gives them, now and before."""
    parts = request.param.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    sys.modules[request.param].InductorPass = Protocol.InductorPass  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_vllm")
def test_vllm_runs_the_pass_behind_an_earlier_one():
    earlier = Protocol.Earlier()
    guest = fusion.integrations.vllm(HOST, earlier=earlier)
    run({**QUICK, "post_grad_custom_post_pass": Manager(copy.deepcopy(guest))})
    assert earlier.graphs == 1
    assert guest.report.ops == {"npu::npu_rms_norm": 1}


@pytest.mark.usefixtures("_vllm")
def test_the_page_of_vllm_gives_it_a_pass(monkeypatch: pytest.MonkeyPatch):
    (code,) = re.findall(r"^```py\n(.*?)^```$", (REPO / "docs" / "vllm.md").read_text(), re.DOTALL | re.MULTILINE)
    given: dict[str, Any] = {}
    monkeypatch.setattr(sys.modules["vllm"], "LLM", lambda name, **config: given.update(config), raising=False)
    exec(code, {})
    passes = given["compilation_config"]["inductor_compile_config"]
    assert isinstance(passes["post_grad_custom_post_pass"], Protocol.InductorPass)


@pytest.mark.usefixtures("_vllm")
def test_the_key_for_vllm_is_of_options_rules_and_the_earlier_pass():
    key = fusion.integrations.vllm(HOST).uuid()
    assert (
        key
        == fusion.integrations.vllm(HOST).uuid()
        == pickle.loads(pickle.dumps(fusion.integrations.vllm(HOST))).uuid()
    )
    others = [
        fusion.integrations.vllm({"target": "ascend910b"}),
        fusion.integrations.vllm({**HOST, "disable": {"rms_norm"}}),
        fusion.integrations.vllm(HOST, [rule for rule in fusion.installed().rules if rule.name == "rms_norm"]),
        fusion.integrations.vllm(HOST, earlier=Protocol.Earlier()),
        fusion.integrations.vllm(HOST, earlier=Protocol.Earlier("other")),
    ]
    assert len({key, *(each.uuid() for each in others)}) == len(others) + 1


@pytest.mark.usefixtures("_vllm")
def test_rules_without_a_key_never_hit_the_cache_of_vllm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusion.frontend.passes.keys_of", lambda library: None)
    assert fusion.FusionPass(HOST).uuid() is None
    assert fusion.integrations.vllm(HOST).uuid() != fusion.integrations.vllm(HOST).uuid()


def test_without_vllm_the_error_says_what_to_do():
    with pytest.raises(FusionError, match=r"vllm cannot be imported .*No module named 'vllm'.* install"):
        fusion.integrations.vllm(HOST)
