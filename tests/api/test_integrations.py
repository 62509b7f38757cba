"""`fusion.integrations`: the pass in other compilers, beside the passes of the user."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusion
from fusion.errors import FusionError
from fusion.frontend import compilations
from fusion.frontend.integrations.hosts import HOOK
from tests.lowering.guests import HOOKS
from tests.support.child import REPO, child

HOST = {"target": "host"}
QUICK = {"fallback_by_default": True, "fx_graph_cache": False}  # torch's kernels: no code is generated


class Normed(nn.Module):
    """x [B, 64] → [B, 64]"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + 1


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "_LISTED", deque(maxlen=compilations.MOST))


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


def test_a_mode_of_inductor_is_given_as_options():
    config = fusion.integrations.inductor({**torch._inductor.list_mode_options("reduce-overhead"), **QUICK}, HOST)
    run(config)
    assert config["triton.cudagraphs"] is True
    assert config[HOOK][-1].report.ops == {"npu::npu_rms_norm": 1}


def test_the_same_pass_is_added_once():
    config = fusion.integrations.inductor(None, HOST)
    assert fusion.integrations.inductor(config, HOST) == config
    assert len(fusion.integrations.inductor(config, {"target": "ascend910b"})[HOOK]) == 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_backend_and_a_guest_fuse_once_and_all_passes_of_the_user_run(mode: str):
    guest, mine = fusion.FusionPass(HOST), {hook: Counting() for hook in HOOKS}
    with inductor_config.patch({**QUICK, **mine, HOOK: (guest, mine[HOOK])}):
        own = guest.uuid()
        options = {"target": "host", "lower": "inductor", "mode": mode, "plan_cache": "off"}
        run(options, backend="cann_fusion")
        assert guest.uuid() == own
    assert guest.report.parts == ()
    assert {hook: each.graphs for hook, each in mine.items()} == dict.fromkeys(HOOKS, 1)
    assert [each.door for each in fusion.reports()] == ["backend"]


def test_threads_compile_models_of_their_own():
    models, x = [Normed().eval() for _ in range(4)], torch.randn(3, 64)
    torch._dynamo.reset()

    def compiled(model: nn.Module) -> Tensor:
        options = {"target": "ascend910_93", "lower": "eager", "plan_cache": "off"}
        with torch.inference_mode():
            return torch.compile(model, backend="cann_fusion", options=options)(x)

    with ThreadPoolExecutor(len(models)) as threads:
        results = list(threads.map(compiled, models))
    for result, model in zip(results, models, strict=True):
        torch.testing.assert_close(result, model(x))
    assert [dict(each.chosen) for each in fusion.reports()] == [{"rms_norm": 1}] * len(fusion.reports())


PROCESSES = """
import multiprocessing, os, pickle, sys
import torch, fusion
from tests.api.test_integrations import Normed

X = torch.ones(3, 64)
OPTIONS = {"target": "ascend910_93", "lower": "eager"}

def check(guest, model):
    assert guest.uuid() == fusion.FusionPass(OPTIONS).uuid()
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(model, backend="cann_fusion", options=OPTIONS)(X), model(X))
    assert fusion.reports()[-1].chosen == {"rms_norm": 1}
    assert fusion.reports()[-1].reasons == []

if __name__ == "__main__":
    model, guest = Normed().eval(), fusion.FusionPass(OPTIONS)
    check(guest, model)
    for how in ("fork", "spawn"):
        other = multiprocessing.get_context(how).Process(target=check, args=(guest, model))
        other.start()
        other.join()
        assert other.exitcode == 0, how
"""


@pytest.mark.nightly
def test_processes_that_are_forked_or_spawned_compile_too(tmp_path: Path):
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    child(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", PYTHONPATH=f"{REPO}:{tmp_path}")


COMPILE = """
import torch, fusion
from torch._dynamo.utils import counters
from tests.api.test_integrations import Normed

torch.manual_seed(0)
model, x = Normed().eval(), torch.ones(3, 64)
torch._inductor.config.fallback_by_default = True
HOW = {
    "guest": lambda: {"options": fusion.integrations.inductor(None, {"target": "host"})},
    "backend": lambda: {"backend": "cann_fusion", "options": {"target": "host", "lower": "inductor"}},
}
if LOADS:
    with open(ARTIFACTS, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
with torch.inference_mode():
    torch.testing.assert_close(torch.compile(model, **HOW[DOOR]())(x), model(x))
assert counters["inductor"]["fxgraph_cache_hit"] == LOADS, counters["inductor"]
assert len(fusion.reports()) == (DOOR == "backend" or not LOADS)
if not LOADS:
    with open(ARTIFACTS, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("door", ["guest", "backend"])
def test_artifacts_of_torch_serve_another_process(door: str, tmp_path: Path):
    """The pass of a guest does not even run there."""
    for loads in (False, True):
        given = f"DOOR, LOADS, ARTIFACTS = {door!r}, {loads}, {str(tmp_path / 'artifacts')!r}\n"
        child(given + COMPILE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / str(loads)), XDG_CACHE_HOME=str(tmp_path))


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
