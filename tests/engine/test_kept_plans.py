"""Plans that are kept: equal to what is recorded, for later graphs and later processes, and never for what differs."""

from __future__ import annotations

import copy
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusion.caching import text_cache
from fusion.caching.text_cache import TextCache
from fusion.frontend.library import installed
from fusion.language import Library, Rule, lowering, pattern, tensor
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.planning.fake_execution import Fakes
from fusion.stages.plan import plan_records as recorded_plans
from fusion.testing import capture

from .kept_files import block, inputs, later

pytestmark = pytest.mark.usefixtures("empty")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is recorded from now on."""
    found: list[Any] = []
    record = Fakes.record

    def counted(self: Fakes, function: Callable[..., Any], given: Any) -> Any:
        found.append(function)
        return record(self, function, given)

    monkeypatch.setattr(Fakes, "record", counted)
    return found


def fused(source: fx.Graph, where: str, target: str = "ascend910_93", **more: Any) -> str:
    graph = copy.deepcopy(source)
    outcome = fuse_graph(graph, installed(), Options(target=target, lower="eager", plan_cache=where, **more))
    told = [f"{each.match.rule.name} {each.lowering} {each.benefit} {each.launches}" for each in outcome.chosen]
    return "\n".join([str(graph), *told, *map(str, outcome.refusals)])


@pytest.mark.parametrize("target", ["host", "ascend910b", "ascend910_93"])
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.rotates(3)
def test_a_later_graph_is_planned_from_what_is_kept(where: str, target: str, recorded: list[Any]):
    source = capture(block, inputs()).graph.graph
    expected = fused(source, "off", target)
    assert fused(source, where, target) == expected
    recorded.clear()
    if where == "disk":
        later()
    assert fused(source, where, target) == expected
    assert not recorded


def test_what_depends_on_something_else_is_recorded(recorded: list[Any]):
    source = capture(block, inputs()).graph.graph
    fused(source, "memory")
    for other in (dict(target="host"), dict(disable={"npu_swiglu"}), dict(plan_lower="eager"), dict(lengths="host")):
        recorded.clear()
        assert fused(source, "memory", **other) == fused(source, "off", **other)
        assert recorded
    recorded.clear()
    wider = capture(block, inputs(5)).graph.graph
    assert fused(wider, "memory") == fused(wider, "off")
    assert recorded


def test_symbolic_sizes_are_planned_for_their_graph():
    source = capture(block, inputs(), dynamic=True).graph.graph
    expected = fused(source, "off")
    assert [fused(source, "memory") for _ in range(2)] == [expected] * 2


def test_what_no_text_tells_is_never_kept():
    assert recorded_plans.digest("a rule", "x") is not None
    assert recorded_plans.digest("a rule", "x") != recorded_plans.digest("another", "x")
    assert recorded_plans.digest(None, "x") is None
    assert recorded_plans.digest("a rule", object()) is None


@dataclass(frozen=True)
class Scaled(Rule):
    """A rule with a value of its own, which its form and its lowering read."""

    name = "scaled"
    factor: float = 2.0

    @pattern
    def form(self, p: Any, x: Any = tensor("N")) -> Any:
        return p.scale(p.op("exp", x), self.factor)

    @lowering
    def at_once(self, x: Tensor) -> Tensor:
        return torch.ops.aten.pow.Scalar(self.factor, x)


@dataclass(frozen=True)
class Locked(Scaled):
    """The same with a value that is of this process alone."""

    lock: Any = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Raising(Rule):
    """A rule whose lowering is wrong, as every graph is to be told."""

    name = "raising"

    @pattern
    def form(self, p: Any, x: Any = tensor("N")) -> Any:
        return p.scale(p.op("exp", x), 2.0)

    @lowering
    def never(self, x: Tensor) -> Tensor:
        raise ValueError(f"a defect: {x}")


def planned(factor: float, rule: Rule) -> list[str]:
    """Fuse e^x · factor by one rule, and list the calls."""
    graph = capture(lambda x: x.exp() * factor, (torch.rand(3),)).graph.graph
    fuse_graph(graph, Library((rule,)), Options(target="host", lower="eager", plan_cache="memory"))
    return [f"{node.target} {node.args}" for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("rule", [Locked(), Raising()])
def test_what_has_no_key_and_what_failed_is_planned_again(rule: Rule, recorded: list[Any]):
    for _ in range(2):
        recorded.clear()
        planned(2, rule)
        assert recorded


def test_a_rule_with_values_of_its_own_is_matched_and_planned_by_them(recorded: list[Any]):
    for _ in range(2):
        assert planned(2, Scaled(2.0)) == ["aten.pow.Scalar (2.0, arg0_1)"]
        assert planned(3, Scaled(3.0)) == ["aten.pow.Scalar (3.0, arg0_1)"]
        assert "aten.exp.default (arg0_1,)" in planned(3, Scaled(2.0))
    assert len(recorded) == 2


def test_symbolic_sizes_have_no_text():
    source = capture(block, inputs(), dynamic=True).graph.graph
    vals = [node.meta["val"] for node in source.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert recorded_plans.text_of({"sizes": vals[:1]}) is None  # type: ignore[arg-type]


def test_what_has_no_text_is_recorded_again(recorded: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_plans, "text_of", lambda plans: None)
    source = capture(block, inputs()).graph.graph
    for _ in range(2):
        recorded.clear()
        assert fused(source, "memory") == fused(source, "off")
        assert recorded
    texts: list[str | None] = []
    monkeypatch.setattr(TextCache, "put", lambda self, digest, text: texts.append(text))
    fused(source, "memory", target="host")
    assert None not in texts


def test_what_is_written_tells_kinds_apart():
    same = [1, 1.0, True, "1", None, (1,), [1], {"1": 1}, torch.float32, "torch.float32", float("inf"), -0.0, 0.0, int]
    assert len({recorded_plans.digest("a rule", each) for each in same}) == len(same)


@pytest.mark.parametrize("broken", [b"no database", b""])
def test_a_file_that_cannot_be_used_is_done_without(empty: Path, broken: bytes):
    source = capture(block, inputs()).graph.graph
    expected = fused(source, "disk")
    (file,) = empty.glob("plans-*.sqlite")
    file.write_bytes(broken)
    later()
    assert fused(source, "disk") == expected


def test_a_folder_that_cannot_be_made_is_done_without(empty: Path):
    empty.write_text("a file where the folder should be")
    source = capture(block, inputs()).graph.graph
    assert fused(source, "disk") == fused(source, "off")


def test_many_may_write_at_once(tmp_path: Path):
    caches = [TextCache(tmp_path / "plans.sqlite") for _ in range(8)]

    def write(number: int) -> None:
        for row in range(20):
            caches[number].put(f"{row % 2 * number}-{row}", "{}")
            caches[number].save()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    for each in caches:  # what waited for longer than a write may
        each.save()
    expected = {f"{row % 2 * number}-{row}" for number in range(8) for row in range(20)}
    assert TextCache(tmp_path / "plans.sqlite").texts.keys() == expected
    with sqlite3.connect(tmp_path / "plans.sqlite") as rows:
        assert rows.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_another_state_of_the_code_has_a_file_of_its_own(empty: Path, monkeypatch: pytest.MonkeyPatch):
    source = capture(block, inputs()).graph.graph
    fused(source, "disk")
    monkeypatch.setattr(text_cache, "loaded", lambda library: "changed")
    fused(source, "disk")
    assert len(list(empty.glob("plans-*.sqlite"))) == 2


def test_files_that_none_has_read_for_a_month_are_removed(tmp_path: Path):
    files = [tmp_path / name for name in ("plans-old.sqlite", "plans-new.sqlite", "notes.txt")]
    for each, days in zip(files, (31, 29, 31), strict=True):
        each.touch()
        os.utime(each, (time.time() - days * 24 * 3600,) * 2)
    own = tmp_path / "plans-own.sqlite"
    TextCache(own)
    assert sorted(tmp_path.iterdir()) == sorted([*files[1:], own])
    assert time.time() - own.stat().st_mtime < 3600


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.rotates(3)
def test_what_gives_another_dtype_is_planned_for_itself(where: str, dtypes: tuple[torch.dtype, ...]):
    def merged(x: Tensor, y: Tensor, a: Tensor, b: Tensor, to: torch.dtype) -> Tensor:
        both = torch.logaddexp(a, b)
        old, new = ((each - both).exp().unsqueeze(-1) for each in (a, b))
        return (old * x.float() + new * y.float()).to(to)

    rows, sums = torch.randn(5, 4, 16).bfloat16(), torch.randn(5, 4)
    for dtype in dtypes:
        source = capture(lambda *given, to=dtype: merged(*given, to=to), (rows, rows + 1, sums, sums + 1)).graph.graph
        outcome = fuse_graph(
            copy.deepcopy(source), installed(), Options(target="host", lower="eager", plan_cache=where)
        )
        assert [each.match.rule.name for each in outcome.chosen] == ["attention_update"]
