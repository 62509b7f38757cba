"""Weights that a guest of Inductor prepares: looked up at run time by the Parameters of the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config

import fusion
from fusion.routes.inductor import copy_before_writes
from fusion.testing import capture
from tests.lowering.guests import HOOKS, Guest
from tests.support.child import child

every_hook = pytest.mark.parametrize(
    "hook", [HOOKS[0], *(pytest.param(each, marks=pytest.mark.rotates) for each in HOOKS[1:])]
)
X = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    @property
    def is_joined(self) -> bool:
        """True if gate and up are adjacent in memory."""
        return self.up.weight.data_ptr() - self.gate.weight.data_ptr() == self.gate.weight.nbytes


def compiled(model: Any, hook: str = HOOKS[0], changed: Any = (), **options: Any) -> tuple[Any, Guest]:
    """Return `model` compiled by Inductor, which calls torch's kernels, and its guest."""
    torch._dynamo.reset()
    guest = Guest({"target": "ascend910_93", **options})
    given = {"fallback_by_default": True, "fx_graph_cache": False, hook: guest, **dict(changed)}
    return torch.compile(model, options=given, fullgraph=True), guest


@every_hook
@pytest.mark.filterwarnings("error:.*held twice")
def test_parameters_become_views_and_writes_show(hook: str):
    model = Gate().eval()
    run, guest = compiled(model, hook)
    with torch.no_grad():
        torch.testing.assert_close(run(X), model(X))
        assert model.is_joined
        model.up.weight.data.mul_(2)
        torch.testing.assert_close(run(X), model(X))
    assert guest.report.prepared_bytes == 0
    assert guest.report.unprepared == []
    assert fusion.reports()[-1].is_prepared


def test_copies_follow_the_parameters():
    model = Gate().eval()
    run, guest = compiled(model, prepack="copy")
    with torch.no_grad():
        torch.testing.assert_close(run(X), model(X))
        model.gate.weight.copy_(torch.randn(128, 64))
        torch.testing.assert_close(run(X), model(X))
    assert not model.is_joined
    assert guest.report.prepared_bytes == 2 * model.gate.weight.nbytes


def test_instances_that_share_code_have_their_own_weights():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Gate() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)[:, :64] + self.layers[1](x)[:, 64:]

    models = [Stack().eval() for _ in range(2)]
    run, _ = compiled(Stack.forward)
    with torch.no_grad():
        for model in (*models, *models):
            torch.testing.assert_close(run(model, X), model(X))
    assert all(layer.is_joined for model in models for layer in model.layers)


def test_a_constant_is_made_once():
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model, x = Causal().eval(), torch.randn(2, 8, 64)
    run, guest = compiled(model, target="host")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
    assert guest.fused_rules == ["attention"]


@pytest.mark.parametrize("changed", [{"cpp_wrapper": True}, {"triton.cudagraphs": True}])
def test_code_that_cannot_look_up_weights_is_given_none(changed: dict[str, bool]):
    """Where Inductor compiles for C++, or replays launches, only the pass runs here: no kernel is built."""
    model = Gate().eval()
    seen: list[bool] = []

    class Stopping(Guest):
        def __call__(self, graph: fx.Graph, *context: Any) -> None:
            super().__call__(graph, *context)
            seen.append(any("prepared" in str(node.target) for node in graph.nodes))
            raise InterruptedError

    torch._dynamo.reset()
    with torch.no_grad(), config.patch(fallback_by_default=True, fx_graph_cache=False, **changed):
        run = torch.compile(model, options={HOOKS[0]: Stopping({"target": "ascend910_93"})})
        with pytest.raises(Exception, match="InterruptedError"):
            run(X)
    assert seen == [False]
    assert not model.is_joined


def test_a_graph_of_training_prepares_nothing():
    ours, plain = Gate(), Gate()
    plain.load_state_dict(ours.state_dict())
    run, _ = compiled(ours)
    run(X).square().sum().backward()
    plain(X).square().sum().backward()
    assert not ours.is_joined
    torch.testing.assert_close(ours.up.weight.grad, plain.up.weight.grad)


def test_tensors_that_are_no_parameters_are_computed_at_each_call():
    model = Gate().eval()
    texts: list[str] = []

    class Reading(Guest):
        def __call__(self, graph: fx.Graph, *context: Any) -> None:
            super().__call__(graph, *context)
            texts.extend(node.args[1] for node in graph.nodes if "prepared" in str(node.target))

    torch._dynamo.reset()
    options = {"fallback_by_default": True, "fx_graph_cache": False, HOOKS[0]: Reading({"target": "ascend910_93"})}
    with torch.no_grad():
        torch.compile(model, options=options)(X)
        gate, up = torch.randn(128, 64), torch.randn(128, 64)
        for _ in range(2):
            (joined,) = torch.ops.cann_fusion.prepared([gate, up], *texts)
            torch.testing.assert_close(joined, torch.cat((gate, up)))
            gate.data.add_(1)


def test_what_a_call_changes_of_a_prepared_tensor_is_copied_before():
    def changed(kept: Tensor, at: Tensor, value: Tensor) -> Tensor:
        return kept[:2].index_put((at,), value)

    gm = capture(changed, (torch.zeros(3, 4), torch.tensor([1]), torch.ones(4))).graph
    kept = gm.graph.find_nodes(op="placeholder")[0]
    copy_before_writes(gm.graph, {kept})
    (put,) = (node for node in gm.graph.nodes if "index_put" in str(node.target))
    assert put.args[0].target is torch.ops.aten.where.self


@pytest.mark.rotates(48)
def test_code_from_the_cache_of_inductor_prepares_in_another_process(tmp_path: Any):
    code = f"""
import os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(tmp_path)!r}
import torch, fusion
from torch._dynamo.utils import counters
from tests.lowering.test_guest_weights import X, Gate
model = Gate().eval()
options = fusion.integrations.inductor({{"fallback_by_default": True}}, {{"target": "ascend910_93"}})
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, options=options)(X), model(X))
print(model.is_joined, counters["inductor"]["fxgraph_cache_hit"], counters["cann_fusion"]["graphs"])
"""
    first, second = (child(code).stdout.splitlines()[-1] for _ in range(2))
    assert (first, second) == ("True 0 1", "True 1 0")
