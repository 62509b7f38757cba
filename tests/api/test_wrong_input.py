"""What is wrong in what a user hands to a door is named, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion import integrations
from fusion.errors import FusionError
from fusion.frontend import compilations

MODEL, X = nn.RMSNorm(64), torch.randn(2, 64)
PROGRAM = torch.export.export(MODEL, (X,))

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "torchair: a mapping": (
        lambda: integrations.torchair({"target": "host"}),
        r"handing graphs to torchair: .* of type dict is no configuration .* give a torchair.CompilerConfig\(\)",
    ),
    "torchair: options": (lambda: integrations.torchair(fusion.Options()), "of type Options is no configuration"),
    "torchair: a mode as text": (lambda: integrations.torchair(SimpleNamespace(mode="x")), "is no configuration"),
    "npugraph_ex: text": (lambda: integrations.npugraph_ex("x"), "'x' of type str is no mapping of its options"),
    "npugraph_ex: an option of ours": (
        lambda: integrations.npugraph_ex({"target": "host"}),
        r"'target' is an option of the pass; .* fusion.integrations.npugraph_ex\(\{\}, \{'target': ...\}\)",
    ),
    "inductor: text": (lambda: integrations.inductor("x"), "configuring inductor: 'x' of type str is no mapping"),
    "inductor: options": (lambda: integrations.inductor(fusion.Options()), "of type Options is no mapping"),
    "inductor: an option of ours": (lambda: integrations.inductor({"fuel": 3}), "'fuel' is an option of the pass"),
    "inductor: a name that is none": (lambda: integrations.inductor({1: True}), "1 of type int is no name"),
    "inductor: a pass that is none": (
        lambda: integrations.inductor({"post_grad_custom_pre_pass": 3}),
        "post_grad_custom_pre_pass has 3 of type int, which is no pass",
    ),
    "inductor: options misspelt": (lambda: integrations.inductor({}, {"targt": "host"}), "did you mean 'target'"),
    "vllm: options misspelt": (lambda: integrations.vllm({"targt": "host"}), "did you mean 'target'"),
    "vllm: an earlier pass that is none": (lambda: integrations.vllm(earlier="x"), "earlier is 'x' of type str"),
    "export: a module": (lambda: integrations.export(MODEL), r"a RMSNorm is none; give what torch.export.export"),
    "export: a path": (lambda: integrations.export("x.pt2"), r"a str is none; .* torch.export.load\(path\)"),
    "FusionPass on a module": (
        lambda: fusion.FusionPass({"target": "host"})(MODEL),
        "running FusionPass: a RMSNorm is no graph of torch.fx; hand the pass to a compiler",
    ),
    "explain: a name": (lambda: fusion.explain("hf:qwen3"), "a str is no model, and names of models are for `cann-fus"),
    "explain: nothing": (lambda: fusion.explain(None), "a NoneType is no model; give a function or a module"),
    "explain: a program and inputs": (lambda: fusion.explain(PROGRAM, X), "has its inputs; give it alone"),
    "refresh: a name": (lambda: fusion.refresh("x"), "refreshing prepared weights: a str is no Parameter"),
    "refresh: a number": (lambda: fusion.refresh(3), "a int is no Parameter; give the model, or Parameters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str):
    call, text = WRONG[name]
    with pytest.raises(FusionError, match=text):
        call()


def test_options_among_the_arguments_of_the_model_are_recognised():
    report = fusion.explain(MODEL, X, target="host")
    assert report.interruption is not None
    assert report.interruption.advice == "options of the pass are given as options={'target': ...}"


def test_options_of_an_exported_program_may_be_given_by_position():
    fused = integrations.export(PROGRAM, {"target": "ascend910_93"})
    assert "npu_rms_norm" in str(fused.graph)


def _planted(*_: Any) -> Any:
    raise OSError("planted")


@pytest.mark.parametrize("part", ["add_artifact", "_described"])
@pytest.mark.parametrize("door", ["backend", "guest", "export"])
def test_what_cannot_be_written_of_a_compilation_costs_that_alone(
    door: str, part: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compilations, "is_traced", lambda: True)
    monkeypatch.setattr(compilations, "add_artifact", lambda name, text: text())
    monkeypatch.setattr(compilations, part, _planted)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.warns(UserWarning, match=r"failed while .*OSError: planted.*compiled all the same"):
        run, graphs = _compiled(door)
        torch.testing.assert_close(run(X), MODEL(X))
    assert any("rms_norm" in text for text in graphs)


def _compiled(door: str) -> tuple[Callable[[Tensor], Tensor], list[str]]:
    """Return the compiled model, and texts that have the fused calls."""
    if door == "export":
        fused = fusion.fuse_exported(PROGRAM, {"target": "ascend910_93"})
        return fused.module(), [str(fused.graph)]
    seen: list[str] = []

    class Pass(fusion.FusionPass):
        def __call__(self, graph: Any, *context: Any) -> None:
            super().__call__(graph, *context)
            seen.extend(each["rule"] for node in graph.nodes if (each := node.meta.get("fusion")))

    class Backend(fusion.FusionBackend):
        def outcome(self, *given: Any) -> Any:
            made = super().outcome(*given)
            seen.extend(each.match.rule.name for each in made.chosen)
            return made

    options = {"target": "host", "plan_cache": "off"}
    if door == "guest":
        quick = {"fallback_by_default": True, "fx_graph_cache": False, "post_grad_custom_pre_pass": Pass(options)}
        return torch.compile(MODEL, options=quick), seen
    return torch.compile(MODEL, backend=Backend({**options, "lower": "eager"})), seen
