"""Consecutive commits run every case of the long grids, and the number of one runs its cases again."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import changed, conftest
from tests.support import rotation

CASES = [f"tests/a/test_a.py::test_a[{number}]" for number in range(500)]


class Item(SimpleNamespace):
    """A collected test with marks of its own, in a module with others."""

    def __init__(self, nodeid: str, own: Sequence[int | None] = (), above: Sequence[int | None] = ()) -> None:
        marks = [pytest.mark.rotates(*([] if of is None else [of])).mark for of in (*own, *above)]
        nodes = [*([self] * len(own)), *([None] * len(above))]
        super().__init__(
            nodeid=nodeid, name=nodeid.rpartition("::")[2], added=[], pairs=list(zip(nodes, marks, strict=True))
        )

    def iter_markers_with_node(self, name: str) -> Any:
        assert name == "rotates"
        return iter(self.pairs)

    def add_marker(self, name: str) -> None:
        self.added.append(name)


def run(items: Sequence[Item], number: int, areas: frozenset[str] | None, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the ids that the run of a commit collects."""
    monkeypatch.setenv(rotation.VARIABLE, str(number))
    for item in items:
        item.added.clear()
    config: Any = SimpleNamespace(stash={conftest.DECISION: changed.Decision("", areas)})
    conftest.pytest_collection_modifyitems(config, items)
    return {item.nodeid for item in items if not item.added}


@pytest.mark.parametrize("areas", [None, frozenset(), frozenset({"a"}), frozenset({"b"})], ids=str)
@pytest.mark.parametrize("first", [0, 1, 4711])
@pytest.mark.rotates(4)
def test_48_consecutive_commits_run_every_case(
    first: int, areas: frozenset[str] | None, monkeypatch: pytest.MonkeyPatch
):
    marks = [*({"own": [of]} for of in (1, 2, 7, 48, None)), {"above": [3]}, {"above": [48]}]
    items = [Item(case, **marks[place % len(marks)]) for place, case in enumerate(CASES)]
    runs = [run(items, first + number, areas, monkeypatch) for number in range(rotation.PUSHES)]
    assert set[str]().union(*runs) == set(CASES)
    assert runs[5] == run(items, first + 5, areas, monkeypatch)
    assert runs[5] != runs[6]
    assert all(len(each) < len(CASES) for each in runs)


def test_a_mark_of_a_module_is_for_tests_with_parameters():
    assert rotation.share_of(Item("tests/a.py::test_a", above=[12])) == 1
    assert rotation.share_of(Item("tests/a.py::test_a[1]", above=[12])) == 12
    assert rotation.share_of(Item("tests/a.py::test_a[1]", own=[5], above=[12])) == 5
    assert rotation.share_of(Item("tests/a.py::test_a[1]", own=[5, 20, 2])) == 20
    assert rotation.share_of(Item("tests/a.py::test_a", own=[None], above=[12])) == rotation.PUSHES
    assert rotation.share_of(Item("tests/a.py::test_a[1]")) == 1


def test_no_share_is_smaller_than_the_pushes_run():
    with pytest.raises(pytest.UsageError, match=r"rotates\(49\) leaves cases out of 48 pushes"):
        rotation.share_of(Item("tests/a.py::test_a", own=[49]))


def test_a_number_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(rotation.VARIABLE, "7")
    assert rotation.commit_number() == 7


def test_the_number_of_a_commit_is_one_more_than_that_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(rotation.VARIABLE)
    monkeypatch.setattr(rotation, "ROOT", tmp_path)
    assert rotation.commit_number() == 0
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run((*git, "init", "-q"), cwd=tmp_path, check=True)
    for number in (1, 2):
        subprocess.run((*git, "commit", "-q", "--allow-empty", "-m", "a"), cwd=tmp_path, check=True)
        assert rotation.commit_number() == number
