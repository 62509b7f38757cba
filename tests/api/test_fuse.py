"""@fusion.fuse: bare or with options, on functions, methods, classes and modules; FusionPass as a guest."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import fusion
from fusion.errors import OptionError
from fusion.testing import capture

from ..engine.graphs import names, norm, numbers
from ..support.child import child

pytestmark = pytest.mark.usefixtures("fresh")

X, W = numbers(2, 3, 64), numbers(64, seed=1)
HOST = {"target": "host", "lower": "eager"}


def close(have, want):
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_bare_on_a_function():
    @fusion.fuse
    def decorated(x, w):
        return norm(x, w)

    with torch.no_grad():
        close(decorated(X, W), norm(X, W))
    assert decorated.__name__ == "decorated"


@pytest.mark.parametrize(
    "how", [{"options": HOST}, HOST, {"options": HOST, "disable": "rope"}, {"fullgraph": True, **HOST}]
)
def test_with_options_on_a_function(how):
    @fusion.fuse(**how)
    def decorated(x, w):
        return norm(x, w)

    with torch.no_grad():
        close(decorated(X, W), norm(X, W))


def test_an_option_that_does_not_exist_is_refused_where_it_is_written():
    with pytest.raises(OptionError, match="did you mean 'target'"):
        fusion.fuse(targt="host")


class Norm(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        self.weight = nn.Parameter(numbers(64, seed=seed), requires_grad=False)

    @fusion.fuse(**HOST)
    def forward(self, x):
        return norm(x, self.weight)


def test_on_forward_in_a_class_body_every_instance_keeps_its_own_weight():
    one, two = Norm(1), Norm(2)
    with torch.no_grad():
        for _ in range(2):
            close(one(X), norm(X, one.weight))
            close(two(X), norm(X, two.weight))
    two.weight.data.mul_(3)
    with torch.no_grad():
        close(two(X), norm(X, two.weight))
        close(one(X), norm(X, one.weight))


def test_on_a_module_instance_the_rest_of_the_module_stays():
    plain = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64, eps=1e-6)).eval()
    fused = fusion.fuse(options=HOST)(plain)
    with torch.no_grad():
        close(fused(X), plain(X))
    assert [id(each) for each in fused.parameters()] == [id(each) for each in plain.parameters()]
    assert not fused.training


def test_a_graph_module_is_fused_in_place():
    captured = capture(norm, (X, W))
    gm, inputs = captured.graph, captured.inputs
    fused = fusion.FusionPass({"target": "host"})
    before = gm(*inputs)
    assert fused(gm) is None
    assert "npu.npu_rms_norm.default" in names(gm)
    close(gm(*inputs), before)
    assert "npu_rms_norm" in gm.code, "the code was made again"


def test_a_graph_alone_is_fused_and_further_arguments_are_ignored():
    gm = capture(norm, (X, W)).graph
    fusion.FusionPass({"target": "host"})(gm.graph, object(), None)
    assert "npu.npu_rms_norm.default" in names(gm)


def test_a_graph_without_a_match_is_not_touched():
    gm = capture(lambda x: x.sin() + 1, (X,)).graph
    nodes, code = list(gm.graph.nodes), gm.code
    fusion.FusionPass({"target": "host"})(gm)
    assert all(a is b for a, b in zip(gm.graph.nodes, nodes, strict=True))
    assert gm.code == code


UUID = """
    import fusion
    print(fusion.FusionPass({"target": "host", "disable": ["rope", "activation", "rms_norm"]}).uuid())
"""


@pytest.mark.rotates(8)
def test_the_key_is_stable_across_processes_and_follows_what_matters():
    assert len({child(UUID, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")}) == 1
    host = fusion.FusionPass({"target": "host"})
    keys = {
        host.uuid(),
        fusion.FusionPass({"target": "ascend910b"}).uuid(),
        fusion.FusionPass({"target": "host", "fuel": 1}).uuid(),
        fusion.FusionPass({"target": "host", "disable": "rope"}).uuid(),
        fusion.FusionPass({"target": "host"}, rules=host.library.rules[:2]).uuid(),
        fusion.FusionPass({"target": "host", "lower": "eager"}).uuid(),
    }
    assert len(keys) == 6
    assert fusion.FusionPass({"target": "host"}).uuid() == host.uuid()
    assert fusion.FusionPass({"target": "host"}, rules=host.library.rules[::-1]).uuid() == host.uuid()


@pytest.mark.rotates(8)
def test_as_a_pass_of_inductor():
    from torch._inductor import config

    def form(x, w):
        return norm(x, w)

    seen: list[fx.Node] = []

    class Guest(fusion.FusionPass):
        def __call__(self, graph, *context):
            super().__call__(graph, *context)
            seen.extend(node for node in graph.nodes if "fusion" in node.meta)

    with torch.no_grad(), config.patch(post_grad_custom_pre_pass=Guest({"target": "host"}), fx_graph_cache=False):
        torch.testing.assert_close(torch.compile(form)(X, W), norm(X, W), rtol=1e-5, atol=1e-5)
    assert {node.meta["fusion"]["rule"] for node in seen} == {"rms_norm"}
    assert not any("npu" in str(node.target) for node in seen), "Inductor generates code for the decomposition"
