"""Graphs for tests of the engine: small, traced as the backend traces them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion.facts import Facts
from fusion.frontend.library import installed, library_for
from fusion.graph import Graph
from fusion.options import Options
from fusion.pipeline import Outcome, fuse_graph
from fusion.stages.canonicalise import canonicalise
from fusion.stages.read import read
from fusion.testing import Level, capture

HOST = Options(target="host", lower="eager")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def traced(function: Callable[..., Any], *args: Any, level: Level = "composite") -> fx.GraphModule:
    return capture(function, args, level).graph


def fuse(gm: fx.GraphModule, options: Options = HOST, rules: Any = None, facts: Facts = Facts()) -> Outcome:
    outcome = fuse_graph(gm.graph, library_for(Options(), rules), options, facts)
    gm.recompile()
    return outcome


def read_graph(source: fx.Graph, facts: Facts = Facts()) -> Graph:
    """The canonical graph with all that the library reads in it."""
    graph, failures = read(canonicalise(source, facts), installed().readers)
    assert not failures
    return graph


def fused(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[fx.GraphModule, Outcome]:
    gm = traced(function, *args)
    return gm, fuse(gm, Options.of({"target": "host", "lower": "eager", **options}))


def names(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def value(function: Callable[..., Any], *args: Any, level: Level = "composite") -> Any:
    """The canonical value of the last result of a function."""
    graph = canonicalise(traced(function, *args, level=level).graph)
    return graph.value_of[graph.source.output_node().args[0][-1]]


def said(value_: Any) -> str:
    """A canonical value as an expression over its inputs."""
    if value_.op == "input":
        return str(value_.attrs[0])
    inside = ", ".join([*map(said, value_.args), *(str(each) for each in value_.attrs)])
    return f"{value_.op}({inside})"


def replay(gm: fx.GraphModule, *inputs: Any) -> Any:
    return copy.deepcopy(gm)(*[each.clone() if isinstance(each, Tensor) else each for each in inputs])


class Build:
    """A graph made call by call on fake tensors, as no tracer would make it so fast."""

    def __init__(self) -> None:
        self.graph, self._mode = fx.Graph(), FakeTensorMode()
        self.results: list[fx.Node] = []

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}_1")
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def __call__(self, target, *args, **kwargs) -> fx.Node:
        with self._mode, torch.no_grad():
            val = target(*fx.map_arg(args, lambda each: each.meta["val"]), **kwargs)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        self.results.append(node)
        return node

    def fused(self, options: Options = HOST) -> Outcome:
        inputs = self.graph.find_nodes(op="placeholder")
        for node in reversed(inputs):
            next(iter(self.graph.nodes)).prepend(node)
        self.graph.output((tuple(node for node in self.results if isinstance(node.meta["val"], torch.Tensor)),))
        outcome = fuse_graph(self.graph, installed(), options)
        self.graph.lint()
        assert not outcome.failures, outcome.failures
        return outcome


def memory(*tensors: Tensor) -> list[int]:
    """For each tensor the first that has its memory."""
    pointers = [each.untyped_storage().data_ptr() for each in tensors]
    return [pointers.index(each) for each in pointers]


class Function(nn.Module):
    """A function as a module, for torch.export."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def exported(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        return torch.export.export(Function(function), args).graph_module
