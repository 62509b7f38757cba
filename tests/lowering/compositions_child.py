"""Runs in a child process behind the stubs: fused graphs on which the patterns of npugraph_ex fire as well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the operators)
from torch import Tensor

from fusion._torch.fakes import fake_mode_of
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.routes import vendor
from fusion.testing import capture
from tests.support import acl


def normed(x: Tensor, y: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return torch.nn.functional.rms_norm(total, (64,), gain, 1e-6), total


def cast(x: Tensor, y: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    normal, total = normed(x, y, gain)
    return normal, total, normal.float()


def quantised(x: Tensor, y: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    normal, total = normed(x, y, gain)
    scale = normal.float().abs().amax(-1, keepdim=True) / 127
    return (normal.float() / scale).round().clamp(-128, 127).to(torch.int8), scale, total


def captured(form: Callable[..., Any]) -> list[str]:
    """Return the operators of torch_npu that npugraph_ex captures of `form`."""
    graph = capture(form, (torch.randn(4, 64).half(), torch.randn(4, 64).half(), torch.ones(64).half()))
    options = Options(target="ascend910_93", lower="npugraph_ex", plan_lower="npugraph_ex", plan_cache="off")
    fuse_graph(graph.graph.graph, installed(), options, graph.facts)
    graph.graph.recompile()
    values = [node.meta["val"] for node in graph.graph.graph.find_nodes(op="placeholder")]
    mode = fake_mode_of(graph.graph)
    assert mode is not None
    with mode:
        vendor.npugraph_ex(graph.graph, values, options={"force_eager": True})
    names = [str(node.target) for node in acl.optimized()[-1].graph.nodes if node.op == "call_function"]
    return [name for name in names if name.startswith("npu.")]


def main() -> None:
    """Print, as one line of JSON, the operators of each form."""
    acl.install()
    print(json.dumps({form.__name__: captured(form) for form in (normed, cast, quantised)}))
