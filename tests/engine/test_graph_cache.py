"""Graphs that are kept: made again they are what the search gives, and only where all is equal that it looks at."""

from __future__ import annotations

import copy
import logging
import operator
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import silu

from fusion._torch.fakes import FakeTensorMode
from fusion.caching import graph_cache, text_cache
from fusion.errors import Failure
from fusion.facts import Facts
from fusion.frontend.backend import FusionBackend
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.planning.plan_json import UnwrittenError
from fusion.records import Prepared
from fusion.report.outcome import Outcome
from fusion.testing import Captured, capture, captured
from tests.support.tried import tried

from .graphs import norm
from .kept_files import HIDDEN, block, inputs, later

OPTIONS = Options(target="ascend910_93", lower="eager", plan_cache="memory")
pytestmark = pytest.mark.usefixtures("empty")
EVERY = 20
"""Of the examples of the library one in so many is tried."""


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that are searched from now on."""
    found: list[fx.Graph] = []
    fuse = FusionBackend.fuse

    def counted(self: FusionBackend, gm: fx.GraphModule, *given: Any, **how: Any) -> Any:
        found.append(gm.graph)
        return fuse(self, gm, *given, **how)

    monkeypatch.setattr(FusionBackend, "fuse", counted)
    return found


def fused(from_: Captured, options: Options = OPTIONS, facts: Facts | None = None) -> tuple[fx.Graph, Outcome]:
    """A copy of a graph, fused as `torch.compile` has it fused."""
    own, original = (fx.GraphModule(from_.graph, copy.deepcopy(from_.graph.graph)) for _ in range(2))
    known = from_.facts if facts is None else facts
    return own.graph, FusionBackend(options).outcome(own, known, original.graph)


def told(graph: fx.Graph, outcome: Outcome) -> list[Any]:
    """All that matters of a fused graph."""
    nodes = [(str(node.format_node()), node.meta.get("fusion"), looks(node.meta.get("val"))) for node in graph.nodes]
    places = [node.meta.get("stack_trace") for node in graph.nodes]
    prepared = [(fields_of(each), each.module.code) for each in outcome.prepared]
    return [nodes, places, prepared, outcome.assumed]


def fields_of(prepared: Prepared) -> tuple[Any, ...]:
    """All of it but the module."""
    return tuple(value for name, value in vars(prepared).items() if name != "module")


def looks(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(map(looks, val))
    if not isinstance(val, Tensor):
        return val
    return val.shape, val.stride(), val.dtype, val.device, type(val)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.rotates(3)
def test_an_equal_graph_is_fused_without_a_search(where: str, searched: list[fx.Graph]):
    source, options = capture(block, inputs()), replace(OPTIONS, plan_cache=where)
    expected = told(*fused(source, replace(options, plan_cache="off")))
    assert told(*fused(source, options)) == expected
    searched.clear()
    if where == "disk":
        later()
    assert told(*fused(source, options)) == expected
    assert not searched


def every() -> list[Any]:
    named = [(f"{rule}-{each.name}", each) for rule, found in sorted(tried().items()) for each in found]
    return [pytest.param(each, id=name) for name, each in named[::EVERY]]


@pytest.mark.rotates(12)
@pytest.mark.parametrize("target", ["host", "ascend910_93"])
@pytest.mark.parametrize("example", every())
def test_what_is_made_again_is_what_the_search_gives(example: Any, target: str):
    source, options = captured(example, torch.bfloat16), replace(OPTIONS, target=target)
    facts = replace(source.facts, parameters=frozenset(parameters(source.graph.graph)))
    first, again = (told(*fused(source, options, facts)) for _ in range(2))
    assert again == first


def parameters(graph: fx.Graph) -> list[str]:
    """The matrices that go in: what is computed from them is prepared."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node.name for node in placeholders if isinstance(node.meta["val"], Tensor) and node.meta["val"].dim() == 2]


CHANGES: dict[str, Callable[[Captured], tuple[Captured, Options, Facts | None]]] = {
    "sizes": lambda _: (capture(block, inputs(5)), OPTIONS, None),
    "a number": lambda _: (capture(lambda *given: block(*given)[0] * 2.0, inputs()), OPTIONS, None),
    "strides": lambda _: (capture(block, (inputs()[0].t().contiguous().t(), *inputs()[1:])), OPTIONS, None),
    "dtype": lambda _: (capture(block, tuple(each.half() for each in inputs())), OPTIONS, None),
    "options": lambda source: (source, replace(OPTIONS, disable=frozenset({"npu_swiglu"})), None),
    "target": lambda source: (source, replace(OPTIONS, target="host"), None),
    "Parameters": lambda source: (source, OPTIONS, replace(source.facts, parameters=frozenset({"arg1_1"}))),
    "strides of results": lambda source: (source, OPTIONS, replace(source.facts, strides=((1, 3), None))),
}


@pytest.mark.rotates(6)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_equal_is_searched(change: str, searched: list[fx.Graph]):
    source = capture(block, inputs())
    fused(source)
    other, options, facts = CHANGES[change](source)
    searched.clear()
    have = told(*fused(other, options, facts))
    assert searched
    assert have == told(*fused(other, replace(options, plan_cache="off"), facts))


@pytest.mark.parametrize(("numbers", "is_kept"), [([1.0, 2.0], True), ([1.0, 3.0], True), ([1.0] * 100, False)])
def test_numbers_that_a_graph_holds_tell_it_apart(numbers: list[float], is_kept: bool):
    digests = [digest_with(each) for each in ([1.0, 2.0], numbers)]
    assert (digests[1] is not None) == is_kept
    assert (digests[0] == digests[1]) == (numbers == [1.0, 2.0])


def digest_with(numbers: list[float]) -> str | None:
    """What tells a graph that holds these numbers from others."""
    graph, module = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    x.meta["val"] = capture(block, inputs()).graph.graph.find_nodes(op="placeholder")[0].meta["val"]
    module.held = torch.tensor(numbers)
    graph.output((x, graph.create_node("get_attr", "held")))
    found = graph_cache.entry(fx.GraphModule(module, graph).graph, Facts(), installed(), OPTIONS)
    return found and found.digest


def test_symbolic_sizes_are_searched_in_their_graph(searched: list[fx.Graph]):
    source = capture(block, inputs(), dynamic=True)
    for _ in range(2):
        searched.clear()
        fused(source)
        assert searched


def test_a_graph_that_is_dumped_is_searched(tmp_path: Path, searched: list[fx.Graph]):
    for _ in range(2):
        searched.clear()
        fused(capture(block, inputs()), replace(OPTIONS, dump_dir=str(tmp_path / "dumped")))
        assert searched


@pytest.mark.parametrize("broken", ["no JSON", '{"nodes": [7], "prepared": [], "assumed": []}', '{"nodes": [0]}'])
def test_a_text_of_no_use_is_done_without(broken: str, empty: Path, caplog: pytest.LogCaptureFixture):
    source, options = capture(block, inputs()), replace(OPTIONS, plan_cache="disk")
    expected = told(*fused(source, options))
    (file,) = empty.glob("graphs-*.sqlite")
    with sqlite3.connect(file) as rows:
        rows.execute("UPDATE kept SET text = ?", (broken,))
    later()
    with caplog.at_level(logging.DEBUG, "fusion"):
        assert told(*fused(source, options)) == expected
    assert "of no use" in caplog.text


def test_a_file_keeps_the_latest(tmp_path: Path):
    file = tmp_path / "graphs-own.sqlite"
    own = text_cache.TextCache(file, most=3)
    for number in (1, 2, 3, 1, 4):
        own.put(str(number), f"text {number}")
        own.save()
    other = text_cache.TextCache(file, most=3)
    assert [other.get(str(number)) for number in range(1, 5)] == ["text 1", None, "text 3", "text 4"]


def test_a_compiled_model_is_right_the_second_time():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(HIDDEN))
            self.gate, self.up = nn.Linear(HIDDEN, 8, bias=False), nn.Linear(HIDDEN, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = norm(x, self.weight)
            return silu(self.gate(h)) * self.up(h)

    for _ in range(2):
        torch.compiler.reset()
        model, x = Model(), torch.rand(3, HIDDEN)
        with torch.no_grad():
            run = torch.compile(model, backend=FusionBackend(OPTIONS))
            torch.testing.assert_close(run(x), model(x))


def test_what_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    from_ = capture(block, inputs())
    _, outcome = fused(from_)
    entry = graph_cache.entry(from_.graph.graph, from_.facts, installed(), OPTIONS)
    assert entry is not None
    put: list[str] = []
    monkeypatch.setattr(type(entry.graphs), "put", lambda self, name, text: put.append(name))
    failed = Failure("plan", "RuntimeError: no", "rope", False)
    for failures, kept in (([failed], False), ([], True)):
        entry.keep(replace(outcome, failures=failures))
        assert bool(put) == kept


@pytest.mark.parametrize("held", [nn.Linear(2, 2), FakeTensorMode().from_tensor(torch.ones(2))], ids=["module", "fake"])
def test_what_a_graph_holds_is_told_where_it_is_numbers(held: Any):
    graph = fx.Graph()
    node = graph.create_node("get_attr", "held")
    graph.output(node)
    root = nn.Module()
    root.held = held
    fx.GraphModule(root, graph)
    with pytest.raises(UnwrittenError):
        graph_cache.node_key(node)


def test_calls_of_functions_and_what_is_no_call_are_not_told():
    graph = fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(UnwrittenError):
        graph_cache.call_name(graph.call_function(operator.mul, (x, x)))
    assert graph_cache.call_name(graph.call_function(operator.getitem, (x, 0))) == "getitem"
    with pytest.raises(UnwrittenError):
        graph_cache.call_row(graph.create_node("get_attr", "held"), {})


def test_tensors_of_symbolic_sizes_are_not_told():
    graph = capture(lambda x: x.cos(), (torch.ones(3, 4),), dynamic=True).graph.graph
    (val,) = (node.meta["val"] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default))
    with pytest.raises(UnwrittenError):
        graph_cache.result_look(val)


def test_graphs_of_rules_that_have_no_key_are_searched():
    class Own(type(installed().rules[0])):
        pass

    class Waiting(type(installed().rules[0])):
        lock = threading.Lock()

    from_ = capture(block, inputs())
    libraries = [replace(installed(), rules=(*installed().rules[1:], rule)) for rule in (Own(), Waiting())]
    known, own, waiting = (
        graph_cache.entry(from_.graph.graph, from_.facts, each, OPTIONS) for each in (installed(), *libraries)
    )
    assert known is not None
    assert own is not None
    assert own.digest != known.digest
    assert waiting is None
