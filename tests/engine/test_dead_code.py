"""Dead code and proven assertions read nothing; an assertion that may fail stays, with the tensor that it is about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.stages.dead_code import drop_dead_code

from .graphs import Build, exported, names, norm, numbers

aten = torch.ops.aten
A3 = Options(target="ascend910_93")
X, R, W = numbers(2, 256).bfloat16(), numbers(2, 256, seed=1).bfloat16(), numbers(256).bfloat16()


def test_an_assertion_about_a_cast_keeps_no_norm_from_its_sum():
    gm = exported(lambda x, r, w: (norm(x + r, w), x + r), X, R, W)
    assert aten._assert_tensor_metadata.default in {node.target for node in gm.graph.nodes}
    fuse_graph(gm.graph, installed(), A3)
    assert "npu.npu_add_rms_norm.default" in names(gm)
    assert "npu.npu_rms_norm.default" not in names(gm)


def test_an_item_that_the_model_drops_is_no_reader():
    def route(x: Tensor) -> Tensor:
        scores = x.sigmoid()
        _, best = scores.topk(4, -1)
        weights = scores.gather(1, best)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20)

    gm = exported(route, numbers(32, 64))
    assert any(node.op == "call_function" and not node.users for node in gm.graph.nodes)
    assert fuse_graph(gm.graph, installed(), A3).chosen


@pytest.mark.parametrize(
    ("claim", "proven"),
    [
        ({"dtype": torch.float32}, True),
        ({"dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided}, True),
        ({"size": [2, 3], "stride": [3, 1]}, True),
        ({"dtype": torch.float16}, False),
        ({"size": [3, 2]}, False),
        ({"stride": [1, 2]}, False),
        ({"device": torch.device("meta")}, False),
    ],
)
def test_only_a_proven_assertion_goes(claim: dict[str, Any], proven: bool):
    build = Build()
    x = build.input(2, 3)
    claimed = build.graph.call_function(aten._assert_tensor_metadata.default, (x,), claim)
    build.graph.output(x)
    assert drop_dead_code(build.graph) is proven
    assert (claimed in build.graph.nodes) is not proven


def test_an_assertion_about_data_stays_with_its_tensor():
    def form(x: Tensor, w: Tensor) -> Tensor:
        h = x.float()
        torch._assert_async((h < 1e4).all(), "too large")
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    gm = exported(form, X, W)
    assert fuse_graph(gm.graph, installed(), A3).chosen
    gm.recompile()
    assert any("_assert_async" in name for name in names(gm))
    with torch.no_grad(), pytest.raises(RuntimeError, match="too large"):
        gm(torch.full_like(X, 1e5), W)


def test_a_graph_without_a_match_keeps_its_dead_code():
    gm = exported(lambda x: x.float().topk(2)[0], X)
    before = [f"{node.name} {node.format_node()}" for node in gm.graph.nodes]
    assert not fuse_graph(gm.graph, installed(), A3).chosen
    assert [f"{node.name} {node.format_node()}" for node in gm.graph.nodes] == before
