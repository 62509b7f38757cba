"""The tool finds a guard that no test needs, and leaves alone the one that is tested."""

from __future__ import annotations

import ast
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.mutation import probe, runs, sites, survivors
from tests.mutation.children import in_children

TOY = """
def require(condition, text):
    if not condition:
        raise ValueError(text)

def half(x):
    require(x >= 0 and x < 100, "too large or too small")
    if x % 2 or x == 50:
        return None
    return x // 2

def is_small(x) -> bool:
    if (y := x * x) < 0:
        return False
    return y < 10 and [each for each in (x, y) if each != 3] != []

def why_not(x) -> str | None:
    if x > 0:
        return None
    return "not positive"
"""
TESTS = """
import toy

def test_half():
    assert toy.half(4) == 2
    assert toy.half(5) is None

def test_half_refuses_what_is_negative():
    try:
        toy.half(-2)
    except ValueError:
        return
    assert False

def test_half_takes_anything_else():
    toy.half(50)

def test_numbers():
    assert toy.is_small(2) and not toy.is_small(4)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sites, "ROOT", tmp_path)
    monkeypatch.setattr(sites, "PLACES", ("toy.py",))
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TESTS)
    module = ModuleType("toy")
    setattr(module, sites.PROBE, probe)
    exec(probe.compiled(tmp_path / "toy.py"), vars(module))
    monkeypatch.setitem(sys.modules, "toy", module)
    return module


def test_steps_are_what_must_hold_and_what_must_not():
    tree, found = sites.instrumented(TOY, "toy.py")
    assert [each.name.removeprefix("toy.py ") for each in found] == [
        "require: not condition",
        "half: x >= 0",
        "half: x < 100",
        "half: x % 2",
        "half: x == 50",
        "is_small: (y := (x * x)) < 0",
        "is_small: y < 10",
        "is_small: [each for each in (x, y) if each != 3] != []",
        "is_small: each != 3",
    ]
    assert TOY.splitlines()[found[1].line - 1].strip().startswith("require(x >= 0")
    assert ast.unparse(tree).count(sites.PROBE) == 6


def test_code_with_probes_does_the_same(toy: ModuleType):
    assert [toy.half(x) for x in (4, 5, 50)] == [2, None, None]
    assert [toy.is_small(x) for x in (2, 3, 4)] == [True, True, False]
    assert [toy.why_not(x) for x in (0, 1)] == ["not positive", None]
    with pytest.raises(ValueError, match="too"):
        toy.half(100)


def test_a_step_is_dropped(toy: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "dropped", "toy.py half: x < 100")
    assert toy.half(100) == 50
    monkeypatch.setattr(probe, "dropped", "toy.py half: x % 2")
    assert toy.half(5) == 2
    assert toy.half(50) is None


def test_a_step_decides_where_no_other_one_says_the_same(toy: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "watching", True)
    monkeypatch.setattr(probe, "decided", set())
    toy.half(4)
    assert not probe.decided
    toy.half(5)
    assert probe.decided == {"toy.py half: x % 2"}


@pytest.mark.rotates(12)
def test_what_no_test_needs_survives(toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "CACHE", tmp_path / "cache")
    runner = runs.Runner("toy.py", workers=2, budget=20.0, keep=False)

    def run(_: Any) -> list[runs.Verdict]:
        pytest.main(["-q", "-o", "addopts=", "-p", "no:cacheprovider", str(tmp_path)], plugins=[runner])
        return runner.verdicts

    [(_, verdicts)] = in_children(["once"], run, lambda _: 60.0, workers=1)
    assert {each.name.removeprefix("toy.py "): each.outcome for each in verdicts} == {
        "require: not condition": "killed",
        "half: x >= 0": "killed",
        "half: x < 100": "unseen",
        "half: x % 2": "killed",
        "half: x == 50": "survived",
        "is_small: (y := (x * x)) < 0": "unseen",
        "is_small: y < 10": "killed",
        "is_small: [each for each in (x, y) if each != 3] != []": "unseen",
        "is_small: each != 3": "unseen",
    }
    assert next(each.by for each in verdicts if each.name.endswith("x >= 0")).endswith("refuses_what_is_negative")


@pytest.mark.rotates(6)
def test_a_process_that_dies_or_does_not_end_gives_nothing():
    work = {"ends": lambda: 1, "dies": lambda: os._exit(1), "stays": lambda: time.sleep(60)}
    found = dict(in_children(list(work), lambda name: work[name](), lambda _: 2.0, workers=3))
    assert found == {"ends": 1, "dies": None, "stays": None}


def test_the_list_of_survivors_keeps_its_reasons():
    text = "# about\n\n## For speed alone\na.py f: x\n"
    assert survivors.listed(text) == {"a.py f: x": "For speed alone"}
    longer = survivors.with_unjudged(survivors.with_unjudged(text, ["b.py g: y", "a.py f: x"]), ["c.py h: z"])
    assert survivors.listed(longer) == {
        "a.py f: x": "For speed alone",
        "b.py g: y": survivors.UNJUDGED,
        "c.py h: z": survivors.UNJUDGED,
    }
