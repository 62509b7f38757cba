"""What was compiled in this process: the list of compilations, torch's counters and trace, the log."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fusion
from fusion.frontend import compilations
from fusion.frontend.compilations import MOST, Compilation
from tests.support.child import child

EAGER = {"target": "ascend910_93", "lower": "eager"}
X = torch.ones(2, 64)


class Normed(nn.Module):
    """x [B, 64] → [B, 64]; the second norm adds its epsilon outside of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) + 1
        return y / (y.square().mean(-1, keepdim=True).sqrt() + 1e-6)


class Broken(nn.Module):
    """A module with a graph break, behind which it reads nothing of itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1


def broken(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compilations, "_LISTED", deque(maxlen=MOST))


def run(model: Any, **options: Any) -> Any:
    compiled = torch.compile(model, backend="cann_fusion", options={**EAGER, "plan_cache": "off", **options})
    with torch.inference_mode():
        compiled(X)
    return compiled


def test_a_compiled_graph_is_listed_with_its_report():
    model = Normed().eval()
    kept = run(model)
    (listed,) = fusion.reports()
    told = fusion.explain(model, X, options=EAGER)
    assert (listed.function, listed.door, listed.target) == ("Normed.forward", "backend", "ascend910_93")
    assert listed.launches == told.launches
    assert listed.chosen == {"rms_norm": 1}
    assert (listed.is_replayed, listed.note) == (False, "")
    assert [each.reason for each in listed.report.refusals] == [each.reason for each in told.refusals]
    assert any("outside the root" in each and "test_reports.py:" in each for each in listed.reasons)
    assert listed.report.parts[0] is listed.report.parts[0]
    assert listed.report.why(listed.report.refusals[0], tries=0)
    del kept


def test_counters_of_torch_count_rewrites_and_what_the_target_refuses():
    run(Normed().eval())
    assert counters["cann_fusion"] == {"graphs": 1, "matches": 1, "rewrites": 1, "rewrites.rms_norm": 1}


def test_an_equal_graph_is_listed_as_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = [run(Normed().eval(), plan_cache="memory")]
    torch._dynamo.reset()
    kept.append(run(Normed().eval(), plan_cache="memory"))
    first, second = fusion.reports()
    assert (first.is_replayed, second.is_replayed) == (False, True)
    assert (first.launches, first.chosen) == (second.launches, second.chosen)
    assert counters["cann_fusion"]["replayed"] == 1
    assert second.reasons


@pytest.mark.rotates(4)
def test_neither_the_model_nor_its_graph_is_held():
    model = Normed().eval()
    alive = weakref.ref(model.norm.weight)
    compiled = run(model)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
    (listed,) = fusion.reports()
    assert listed.chosen == {"rms_norm": 1}
    with pytest.raises(fusion.FusionError, match=r"reporting on a graph of Normed.forward, .* is freed"):
        _ = listed.reasons


def test_no_more_than_the_latest_are_listed(monkeypatch: pytest.MonkeyPatch):
    for number in range(MOST + 2):
        compilations.add(Compilation(str(number), "backend", "host", (0, 0)))
    assert [each.function for each in fusion.reports()] == list(map(str, range(2, MOST + 2)))


def test_parts_of_a_function_are_named_by_their_line():
    run(broken)
    first, second = (each.function for each in fusion.reports())
    assert first.endswith("broken")
    assert second.startswith(f"{first}, from line ")


@pytest.mark.parametrize("model", [Broken(), nn.Sequential(Broken()), broken])
def test_parts_behind_a_graph_break_are_those_of_the_model(model: Any):
    compiled = run(model)
    run(Normed().eval())
    own = fusion.reports(compiled)
    assert len(own) == 2
    assert own == fusion.reports()[:2]


def decorated(forward: Any) -> Any:
    """Return `forward` in a wrapper, as decorators of transformers do."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any) -> Any:
        return forward(self, *args)

    return wrapper


class Wrapped(Normed):
    forward = decorated(Normed.forward)


@pytest.mark.parametrize(("model", "name"), [(nn.Sequential(nn.RMSNorm(64)), "Sequential"), (Wrapped(), "Wrapped")])
def test_a_wrapped_forward_is_named_by_the_class(model: nn.Module, name: str):
    run(model.eval())
    assert [each.function for each in fusion.reports()] == [name]


def test_a_graph_of_training_is_listed_with_the_reason():
    compiled = torch.compile(Normed(), backend="cann_fusion", options=EAGER)
    with pytest.warns(UserWarning, match="traced for training"):
        compiled(X)
    (listed,) = fusion.reports()
    assert "traced for training" in listed.note
    assert counters["cann_fusion"] == {"graphs": 1, "unfused": 1}
    with pytest.raises(fusion.FusionError, match="traced for training"):
        _ = listed.report


def test_graphs_of_one_model_are_listed_alone():
    class Holder(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.inner(x) + 1

    def double(x: Tensor) -> Tensor:
        return x * 2

    first, second, holder = Normed().eval(), Wrapped().eval(), Holder(Wrapped().eval()).eval()
    compiled = [run(each) for each in (first, second, holder, double)]
    everything = fusion.reports()
    assert fusion.reports(first) == fusion.reports(compiled[0]) == everything[:1]
    assert fusion.reports(second) == fusion.reports(compiled[1]) == everything[1:2]
    assert fusion.reports(compiled[2]) == everything[2:-1]
    assert fusion.reports(double) == fusion.reports(compiled[3]) == everything[-1:]
    with pytest.warns(UserWarning, match="no graph of this Linear"):
        fusion.reports(nn.Linear(2, 2))


def test_closures_of_one_code_have_their_own_graphs():
    def adding(number: int) -> Any:
        def added(x: Tensor) -> Tensor:
            y = x.relu() + number
            torch._dynamo.graph_break()
            return y.tanh()

        return added

    plain = [adding(1), adding(2)]
    compiled = [run(each) for each in plain]
    everything = fusion.reports()
    assert fusion.reports(compiled[0]) == fusion.reports(plain[0])
    assert everything[0] in fusion.reports(compiled[0])
    assert everything[0] not in fusion.reports(compiled[1])
    assert any(each.function.endswith("added") for each in fusion.reports(compiled[1]))


def test_a_process_that_compiled_nothing_is_told_so():
    torch.compile(Normed().eval(), backend="cann_fusion")
    with pytest.warns(UserWarning, match=r"has compiled no graph in this process. .* generate"):
        assert fusion.reports() == []


def test_a_guest_lists_and_reports():
    guest = fusion.FusionPass({"target": "host"})
    options = {"post_grad_custom_pre_pass": guest, "fallback_by_default": True, "fx_graph_cache": False}
    model = Normed().eval()
    with torch.inference_mode():
        torch.compile(model, options=options)(X)
    (listed,) = fusion.reports()
    assert (listed.function, listed.door, listed.is_prepared) == ("Normed.forward", "FusionPass", True)
    assert [each.rule for each in guest.report.matches] == ["rms_norm"]
    assert guest.report.unprepared == []
    assert any("outside the root" in each for each in listed.reasons)


def test_an_exported_program_is_listed():
    fused = fusion.fuse_exported(torch.export.export(Normed().eval(), (X,)), options={"target": "ascend910_93"})
    (listed,) = fusion.reports()
    assert (listed.function, listed.door, listed.chosen) == ("Normed", "fuse_exported", {"rms_norm": 1})
    assert any("outside the root" in each for each in listed.reasons)
    del fused


def test_one_line_is_logged_for_a_graph(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "fusion"):
        run(Normed().eval())
    (line,) = (each.getMessage() for each in caplog.records if each.levelno == logging.INFO)
    assert line.startswith("fused 1 x rms_norm in Normed.forward: ")
    assert line.endswith("reasons: fusion.reports()[-1].reasons")


TRACED = """
import torch
from torch import nn
from tests.api.test_reports import Normed, run
run(Normed().eval())
"""


@pytest.mark.rotates(16)
def test_the_trace_of_torch_has_before_after_and_reasons(tmp_path: Path):
    done = child(TRACED, TORCH_TRACE=str(tmp_path), CANN_FUSION_LOG="info")
    assert "cann-fusion: fused 1 x rms_norm in Normed.forward" in done.stderr
    (log,) = tmp_path.iterdir()
    artifacts = _artifacts(log.read_text())
    assert "rms_norm" in artifacts["cann_fusion_before"]
    assert "npu.npu_rms_norm" in artifacts["cann_fusion_after"]
    assert "outside the root" in artifacts["cann_fusion_reasons"]


def _artifacts(text: str) -> dict[str, str]:
    """Return the artifacts of a trace: a line of JSON each, and below it the content, indented."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("V"):
            artifact = json.loads(line[line.index("{") :]).get("artifact", {})
            name = artifact.get("name", "")
        elif name:
            found[name] = found.get(name, "") + line + os.linesep
    return found


def test_a_level_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CANN_FUSION_LOG", "loud")
    with pytest.raises(fusion.FusionError, match="'loud' is no level of logging"):
        compilations.log_as_asked()
