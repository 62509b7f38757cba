"""What a push runs: much of the domains that changed since the last green commit, and a smoke of the rest.

    python -m pytest --since green
    python -m tests.changed             after a run that passed: this commit is the green one

Where something changed that all domains share, or no commit is known to be green, everything runs.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

ROOT = Path(__file__).parents[1]
GREEN = ROOT / ".cache" / "green"
DOMAINS = tuple(sorted(each.parent.name for each in ROOT.glob("patterns/*/__init__.py")))
FAMILIES = {
    **dict.fromkeys(("rope_half", "rope_interleaved", "rope_interleaved_to_half"), "rotary"),
    **dict.fromkeys(("swiglu_projections", "geglu", "clipped_swiglu", "clipped_swiglu_projections"), "linear"),
}
"""Families of the corpus that are not called as a rule is, with their domains."""

ACROSS = ("corpus", "goldens", "laws")
"""Folders of tests that take all rules: each case belongs to the domain of its rule."""
APART = ("attack", "mutation")
"""Folders of tests that no other one uses."""
WORDS = ("docs", "mkdocs.yml", "benchmarks", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", ".gitignore")
"""Folders and files that only tests without parameters look at, which always run."""
SMOKE = 8
"""Of what did not change, one case in so many runs, and at least one of each test."""


@dataclass(frozen=True)
class Decision:
    """What runs.

    Attributes:
        why: what is said of it.
        areas: domains and folders of `tests`, of which more runs than of everything; None for everything.
    """

    why: str
    areas: frozenset[str] | None = None


def decided(since: str) -> Decision:
    """What to run after the commit `since`, or after the one that is known to be green."""
    if not since:
        return Decision("everything")
    commit = since if since != "green" else GREEN.read_text().strip() if GREEN.exists() else ""
    if not commit:
        return Decision("everything: no commit is known to be green")
    listed = [_git("diff", "--name-only", "--no-renames", commit), _git("ls-files", "--others", "--exclude-standard")]
    if None in listed:
        return Decision(f"everything: commit {commit} is not known here")
    return of_files([path for paths in listed for path in (paths or "").splitlines()], f"since {commit[:10]}")


def of_files(paths: Sequence[str], since: str) -> Decision:
    """What to run where these files changed; paths from the root."""
    places = {path: areas_of(path) for path in paths}
    shared = [path for path, areas in places.items() if areas is None]
    if shared:
        return Decision(f"everything: {shared[0]} changed {since}, which is everyone's")
    areas = frozenset(area for found in places.values() for area in found or ())
    named = f"{', '.join(sorted(areas))}, and a smoke of the rest" if areas else "a smoke"
    return Decision(f"{named}: {len(paths)} files changed {since}", areas)


def areas_of(path: str) -> frozenset[str] | None:
    """The domains, or folders of tests, that a file alone can change; None for all."""
    top, *rest = Path(path).parts
    if top in WORDS:
        return frozenset()
    if top == "tests" and rest[0] == "examples":
        return _areas_of_examples(Path(path))
    of_a_domain = top in ("patterns", "tests") and rest[0] in DOMAINS
    if of_a_domain or (top == "tests" and (rest[0] in APART or rest[-1].startswith("test_"))):
        return frozenset(rest[:1])
    if Path(path).match("tests/goldens/expected/*.txt"):
        return frozenset((_named([Path(path).stem]) or "goldens",))
    return None


def _areas_of_examples(path: Path) -> frozenset[str] | None:
    """The domains of the rules that a file tries; None where it tries none, and others are made from it."""
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    tried = text.partition("\nTRIED")[2]
    return frozenset(domain for name, domain in names().items() if f'"{name}"' in tried) or None


@cache
def names() -> dict[str, str]:
    """The domain of each rule, and of each family of the corpus."""
    from fusion.frontend.library import installed

    return FAMILIES | {rule.name: type(rule).__module__.split(".")[1] for rule in installed().rules}


def _named(pieces: Iterable[str]) -> str | None:
    kept = (each.removeprefix("example_").removeprefix("corpus_") for each in pieces)
    return next((names()[each] for each in kept if each in names()), None)


def area(nodeid: str) -> str:
    """The domain that a test belongs to, else its folder in `tests`."""
    folder = Path(nodeid).parts[1]
    case = nodeid.partition("[")[2].rstrip("]")
    return (_named(case.replace("/", "-").split("-")) if folder in ACROSS else None) or folder


def beyond_smoke(items: Iterable[pytest.Item], number: int) -> list[pytest.Item]:
    """Return all but a share of `items`, which holds at least one case of each test; each number has another share."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    beyond = list[pytest.Item]()
    for cases in tests.values():
        ordered = sorted(cases, key=lambda each: crc32(each.nodeid.encode()))
        beyond += [each for place, each in enumerate(ordered) if (place + number) % min(SMOKE, len(cases))]
    return beyond


def _git(*words: str) -> str | None:
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def note() -> None:
    """Keep the commit that is checked out as green, if no file differs from it."""
    if _git("status", "--porcelain") == "":
        GREEN.parent.mkdir(exist_ok=True)
        GREEN.write_text(_git("rev-parse", "HEAD") or "")


if __name__ == "__main__":
    note()
