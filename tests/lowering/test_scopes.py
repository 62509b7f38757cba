"""Scopes, hints and patterns of the vendor: no rewrite crosses a scope, hints reach GE, and nothing is fused twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.errors import OptionError
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import Outcome, fuse_graph
from fusion.planning.target import Target
from fusion.routes.hints import awaited_launches, insert_prefetches, matched_runs
from fusion.testing import Captured, capture
from tests.support import torch_npu_host
from tests.support.torch_npu_host import requires_torch_npu

A3 = Target.named("ascend910_93")
LIBRARY = torch.library.Library("scopes_test", "FRAGMENT")
LIBRARY.define("scope_enter(str[] keys, str[] values) -> None")
LIBRARY.define("scope_exit() -> None")
for name in ("scope_enter", "scope_exit"):
    for key in ("CPU", "Meta", "BackendSelect"):
        LIBRARY.impl(name, lambda *_: None, key)
    torch.fx.node.has_side_effect(getattr(torch.ops.scopes_test, name).default)

scopes = torch.ops.scopes_test


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (64,), gain, 1e-6)


def crossing(x: Tensor, y: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    scopes.scope_enter(["_op_aicore_num"], ["8"])
    normed = norm(total, gain)
    scopes.scope_exit()
    return normed, total


def inside(x: Tensor, y: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    scopes.scope_enter(["_op_aicore_num"], ["8"])
    total = x + y
    normed = norm(total, gain)
    scopes.scope_exit()
    return normed, total


def fused(form: Any, mark: Any = None) -> tuple[Captured, Outcome]:
    captured = capture(form, (torch.randn(4, 64).half(), torch.randn(4, 64).half(), torch.ones(64).half()))
    if mark is not None:
        mark(captured.graph.graph)
    options = Options(target=A3.name, lower="eager", plan_cache="off")
    outcome = fuse_graph(captured.graph.graph, installed(), options, captured.facts)
    captured.graph.recompile()
    return captured, outcome


def called(captured: Captured) -> list[str]:
    nodes = captured.graph.graph.nodes
    return [str(node.target).split(".")[1] for node in nodes if node.op == "call_function" and "." in str(node.target)]


def test_no_rewrite_crosses_a_scope():
    captured, outcome = fused(crossing)
    assert called(captured) == ["add", "scope_enter", "npu_rms_norm", "scope_exit"]
    (reason,) = [str(each.cause) for each in outcome.refusals if each.rule == "add_norm"]
    assert reason.startswith("the calls: they are in several scopes or on several streams")


def test_a_rewrite_in_a_scope_stays_in_it():
    captured, _ = fused(inside)
    assert called(captured) == ["scope_enter", "npu_add_rms_norm", "scope_exit"]


def test_no_rewrite_crosses_a_stream():
    def mark(graph: torch.fx.Graph) -> None:
        graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].meta["stream_label"] = "side"

    captured, _ = fused(lambda x, y, gain: norm(x + y, gain), mark)
    assert called(captured)[:2] == ["add", "npu_rms_norm"]


def test_hints_are_off_by_default_and_checked():
    assert Options().hints == frozenset()
    assert Options(hints="prefetch").hints == {"prefetch"}
    with pytest.raises(OptionError, match="'prefech' is not a known value of option hints; did you mean 'prefetch'"):
        Options(hints={"prefech"})


class Layer(nn.Module):
    """x [B, 2048] → the same: an activation that a product with a weight waits for, and no scope of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(2048, 2048, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def launches(batch: int) -> Any:
    model = Layer().half().eval()
    captured = capture(model, (torch.randn(batch, 2048).half(),))
    weights = {
        node.name
        for node in captured.graph.graph.find_nodes(op="placeholder")
        if tuple(node.meta["val"].shape) == (2048, 2048)
    }
    return captured.graph.graph, list(awaited_launches(captured.graph.graph, weights, A3))


def test_weights_are_prefetched_beside_calls_that_wait_for_none(monkeypatch: pytest.MonkeyPatch):
    class Prefetch:
        default = staticmethod(lambda *_: None)

    monkeypatch.setattr(torch.ops.npu, "npu_prefetch", Prefetch, raising=False)
    graph, calls = launches(batch=2)
    insert_prefetches(calls, A3)
    (hint,) = [node for node in graph.nodes if node.target is Prefetch.default]
    weight, behind, size = hint.args
    assert weight.op == "placeholder"
    assert behind is calls[0].node, "it begins when the first product is done, and goes on beside the activation"
    window = next(each.us for each in calls if "tanh" in str(each.node.target))
    assert size == min(2048 * 2048 * 2, int(window * A3.bandwidth / 2))
    many, others = launches(batch=4096)
    insert_prefetches(others, A3)
    assert not [node for node in many.nodes if node.target is Prefetch.default], "these products wait for the cube"


def test_a_layer_with_a_call_that_is_no_operator_of_a_rule_is_not_enclosed():
    _, calls = launches(batch=2)
    assert list(matched_runs(copy.copy(calls))) == []


@pytest.mark.rotates(8)
@requires_torch_npu
def test_hints_and_scopes_reach_ge():
    told = torch_npu_host.answer("from tests.lowering import hints_child\nhints_child.main()")
    assert told["none"]["error"] == told["both"]["error"] < 5e-3
    assert "Cmo" not in told["none"]["operators"]
    assert told["both"]["operators"]["Cmo"] >= 2
    assert not told["none"]["scoped"]
    enclosed = told["both"]["scoped"]["_super_kernel_scope"]
    assert enclosed["FusedInferAttentionScore"] == told["both"]["operators"]["FusedInferAttentionScore"] == 2
    others = {name: count for name, count in told["both"]["operators"].items() if name != "Cmo"}
    assert others == told["none"]["operators"]
    assert told["limited"]["scoped"]["_op_aicore_num"]["RmsNorm"] == 1
    assert told["limited"]["operators"]["RmsNorm"] == 1
    assert told["limited"]["operators"]["AddRmsNorm"] == 1


@pytest.mark.rotates(8)
@requires_torch_npu
def test_patterns_of_the_vendor_fire_behind_the_pass_and_nothing_is_fused_twice():
    told = torch_npu_host.answer("from tests.lowering import compositions_child\ncompositions_child.main()")
    assert told["normed"] == ["npu.npu_add_rms_norm.default"]
    assert told["cast"] == ["npu.npu_add_rms_norm_cast.default"]
    assert told["quantised"] == ["npu.npu_add_rms_norm_dynamic_quant.default"]
