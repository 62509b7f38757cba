"""Graphs fused with equal layers left out, and with all of them searched."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusion import pipeline
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import Outcome, fuse_graph
from fusion.testing import Captured

from .graphs import memory

CHIP = Options(target="ascend910_93", lower="eager")


def fused(
    of: Captured, full: bool, monkeypatch: pytest.MonkeyPatch, options: Options = CHIP
) -> tuple[fx.Graph, Outcome]:
    """Fuse a copy of the graph; `full` searches every layer."""
    gm = fx.GraphModule(of.graph, copy.deepcopy(of.graph.graph))
    with monkeypatch.context() as patched:
        if full:
            patched.setattr(pipeline, "divide", lambda *_: None)
        outcome = fuse_graph(gm.graph, installed(), options, of.facts)
    return gm.graph, outcome


def calls(graph: fx.Graph) -> Counter[str]:
    """Count the calls by their operator, without dead code."""
    live = set[fx.Node]()
    for node in reversed(graph.nodes):
        if node.op == "output" or node.is_impure() or not live.isdisjoint(node.users):
            live.add(node)
    return Counter(str(node.target) for node in live if node.op == "call_function")


def told(outcome: Outcome) -> list[tuple[str, ...]]:
    return [(each.match.rule.name, each.lowering, each.match.node.name) for each in outcome.chosen]


def ran(of: Captured, graph: fx.Graph, outcome: Outcome) -> list[Any]:
    """Results, and inputs as they are left."""
    inputs = [each.clone() if isinstance(each, Tensor) else each for each in of.inputs]
    names = {node.name: value for node, value in zip(of.graph.graph.find_nodes(op="placeholder"), inputs, strict=True)}
    prepared = [each.module(*(names[name] for name in each.sources)) for each in outcome.prepared]
    results = fx.Interpreter(fx.GraphModule(of.graph, graph)).run(*inputs, *prepared)
    return [*results, *inputs]


def check_as_searched_in_full(
    of: Captured, monkeypatch: pytest.MonkeyPatch, rtol: float = 0, atol: float = 0, options: Options = CHIP
) -> Outcome:
    """Require that a graph becomes the same with layers left out as with all, and return the outcome."""
    (graph, outcome), (plain, full) = (fused(of, each, monkeypatch, options) for each in (False, True))
    graph.lint()
    assert told(outcome) == told(full)
    assert calls(graph) == calls(plain)
    assert outcome.before == full.before
    assert Counter(map(str, outcome.refusals)) == Counter(map(str, full.refusals))
    assert (outcome.in_place, outcome.result_copies) == (full.in_place, full.result_copies)
    have, want = ran(of, graph, outcome), ran(of, plain, full)
    torch.testing.assert_close(have, want, rtol=rtol, atol=atol, check_stride=True)
    assert memory(*have) == memory(*want)
    return outcome
