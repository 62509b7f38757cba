"""Which tests can tell whether a guard is there, and whether they do.

First every test runs once, and the steps of guards that decide something in it are noted. Then each mutant meets the
tests that it can change, until one of them fails.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import sha256

import pytest
from _pytest.runner import runtestprotocol
from rich.progress import track

from tests.mutation import limits, probe, sites
from tests.mutation.children import in_children

CACHE = sites.ROOT / ".cache" / "mutation"
"""A folder. `tests.json`: what decides in each test. `mutants.jsonl`: a verdict a line, so that hours of work that is
cut off goes on where it was."""
SOURCES = ("fusion", "patterns", "tests")
BESIDE = re.compile(
    r"test_laws.py::test_rule_keeps_the_laws.*-composite-bfloat16\]"
    r"|test_attention.py::test_look_alike|test_recognition.py::test_look_alike"
    r"|test_sparse_attention.py::test_look_alike.*-(step|chunk)-composite|test_latent_attention.py::"
)
"""Tests of the night that run beside those of each push: every example, reject and look-alike once."""
BLIND = re.compile(r"hash_seed|test_ge\.py|_ge\.py|test_every_form_is_used|test_every_reason|test_corpus\.py")
"""Tests that run in processes of their own, which have no probes, or that look at the library as a whole."""
CHUNK = 16
STUCK = 120.0
"""Seconds beyond what is expected after which a test counts as one that does not end."""

OUTCOMES = ("killed", "timeout", "survived", "unseen")

Decisions = dict[str, tuple[float, list[str]]]
"""Test -> seconds, and the steps of guards that decided something in it."""

Task = tuple[str, list[str]]
"""A step, and the tests in which it decides."""


@dataclass(frozen=True)
class Verdict:
    """What came of one mutant.

    Attributes:
        name: the step that was dropped.
        outcome: one of `OUTCOMES`; "timeout" where a test did not end, "unseen" where the step decides in no test.
        tests: how many tests ran with it.
        of: in how many it decides.
        by: the test that failed.
    """

    name: str
    outcome: str
    tests: int = 0
    of: int = 0
    by: str = ""


def steps(only: str) -> list[str]:
    """The names of all steps, in the order of their files, that the expression `only` is found in."""
    found = [
        site.name
        for path in sites.files()
        for site in sites.instrumented(path.read_text(), str(path.relative_to(sites.ROOT)))[1]
    ]
    return [name for name in (*found, *limits.names()) if re.search(only, name)]


@dataclass
class Runner:
    """A plugin of pytest that, in place of the tests' run, tries every mutant on them."""

    only: str
    workers: int
    budget: float
    keep: bool
    verdicts: list[Verdict] = field(default_factory=list)
    items: dict[str, pytest.Item] = field(default_factory=dict)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [each for each in items if self._is_chosen(each)]

    def _is_chosen(self, item: pytest.Item) -> bool:
        wanted = BESIDE.search(item.nodeid) or not item.get_closest_marker("nightly")
        return bool(wanted) and not BLIND.search(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {each.nodeid: each for each in session.items}
        with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            self._warm()
            self._try(_deciding(self._decisions()))
        return True

    def _warm(self) -> None:
        """Run one test of each kind here, so that what is made once is there in every process."""
        kinds = {nodeid.split("::")[0]: each for nodeid, each in reversed(self.items.items())}
        for name, each in kinds.items():
            if re.search("laws|attention.test_attention.py", name):
                _passes(each)
        probe.decided.clear()

    def _decisions(self) -> Decisions:
        known = _read(self.keep)
        todo = [nodeid for nodeid in self.items if nodeid not in known]
        chunks = [todo[start : start + CHUNK] for start in range(0, len(todo), CHUNK)]
        watched = in_children(chunks, self._watch, _patience, self.workers)
        for chunk, found in track(watched, "running the tests", len(chunks)):
            known |= found or {nodeid: (0.0, []) for nodeid in chunk}
            _write(known)
        return {nodeid: known[nodeid] for nodeid in self.items}

    def _watch(self, chunk: Sequence[str]) -> Decisions:
        """What decides in each of these tests; nothing in one that fails."""
        found: Decisions = {}
        probe.watching = True
        for nodeid in chunk:
            probe.decided.clear()
            start = time.monotonic()
            passed = _passes(self.items[nodeid])
            found[nodeid] = time.monotonic() - start, sorted(probe.decided) if passed else []
        return found

    def _try(self, deciding: Mapping[str, list[str]]) -> None:
        known = _met()
        wanted = steps(self.only)
        tasks = [(name, deciding.get(name, [])) for name in wanted if name not in known]
        self.verdicts += [known[name] for name in wanted if name in known]
        self.verdicts += [Verdict(name, "unseen") for name, tests in tasks if not tests]
        met = in_children(_groups(tasks), self._meet_each, self._longest, self.workers)
        for group, found in track(met, "dropping steps", len(_groups(tasks))):
            verdicts = found or [Verdict(name, "timeout", of=len(tests)) for name, tests in group]
            self.verdicts += verdicts
            _keep(verdicts)

    def _longest(self, group: Sequence[Task]) -> float:
        return (self.budget + STUCK) * len(group)

    def _meet_each(self, group: Sequence[Task]) -> list[Verdict]:
        return [self._meet(*each) for each in group]

    def _meet(self, name: str, tests: list[str]) -> Verdict:
        probe.dropped = name
        start = time.process_time()  # what else runs here does not count
        for count, nodeid in enumerate(tests, 1):
            if not _passes(self.items[nodeid]):
                return Verdict(name, "killed", count, len(tests), nodeid)
            if time.process_time() - start > self.budget:
                return Verdict(name, "survived", count, len(tests))
        return Verdict(name, "survived", len(tests), len(tests))


def _deciding(decisions: Decisions) -> Mapping[str, list[str]]:
    """Step -> tests in which it decides: one of each test function after the other, cheap ones first."""
    ordered = defaultdict[str, list[tuple[int, float, str]]](list)
    ranks = Counter[tuple[str, str]]()
    for nodeid, (seconds, names) in sorted(decisions.items(), key=lambda each: each[1][0]):
        for name in names:
            kind = name, nodeid.split("[")[0]
            ranks[kind] += 1
            ordered[name].append((ranks[kind], seconds, nodeid))
    return {name: [nodeid for _, _, nodeid in sorted(tests)] for name, tests in ordered.items()}


def _groups(tasks: Sequence[Task]) -> list[list[Task]]:
    """What one process does: a step of a proof, whose results are kept in caches; or all limits of one operator."""
    groups = defaultdict[str, list[Task]](list)
    for name, tests in tasks:
        if tests:
            groups[name.split(" ")[0] if "::" in name.split(" ")[0] else name].append((name, tests))
    return list(groups.values())


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _patience(chunk: Sequence[str]) -> float:
    return STUCK * len(chunk)


@cache
def _digest() -> str:
    """Of everything that decides what a test does."""
    files = sorted(path for place in SOURCES for path in (sites.ROOT / place).rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files if "mutation" not in path.parts)).hexdigest()


def _met() -> dict[str, Verdict]:
    """What fell on these sources before, but for survivors: they may have met too few tests."""
    file = CACHE / "mutants.jsonl"
    lines = [json.loads(each) for each in file.read_text().splitlines()] if file.exists() else []
    verdicts = [Verdict(**each["verdict"]) for each in lines if each["digest"] == _digest()]
    return {each.name: each for each in verdicts if each.outcome == "killed"}


def _keep(verdicts: Sequence[Verdict]) -> None:
    digest = _digest()
    with (CACHE / "mutants.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"digest": digest, "verdict": asdict(each)}) + "\n" for each in verdicts)


def _read(keep: bool) -> Decisions:
    file = CACHE / "tests.json"
    if not file.exists():
        return {}
    stored = json.loads(file.read_text())
    if stored["digest"] != _digest() and not keep:
        return {}
    return {
        nodeid: (seconds, [stored["steps"][number] for number in found])
        for nodeid, (seconds, found) in stored["tests"].items()
    }


def _write(decisions: Decisions) -> None:
    numbers: dict[str, int] = {}
    tests = {
        nodeid: (seconds, [numbers.setdefault(name, len(numbers)) for name in names])
        for nodeid, (seconds, names) in decisions.items()
    }
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "tests.json").write_text(json.dumps({"digest": _digest(), "steps": list(numbers), "tests": tests}))
