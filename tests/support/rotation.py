"""Shares of long grids: a push runs one case in so many of each, and consecutive commits run different cases.

A case marked `rotates(of)` runs in one commit of `of` consecutive ones, so that `PUSHES` pushes of one commit each run
every case. The environment variable `CANN_FUSION_ROTATION` replaces the number of the commit: with the one that a run
printed in its header, the same cases run again.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from zlib import crc32

import pytest

PUSHES = 48
"""Consecutive commits that run every case of every grid at least once; no share is smaller than one in so many."""
VARIABLE = "CANN_FUSION_ROTATION"
ROOT = Path(__file__).parents[2]


def commit_number() -> int:
    """Return the number given by `CANN_FUSION_ROTATION`, else how many first parents `HEAD` descends from: a merge
    counts as one commit, whatever it merges.

    In a shallow clone, or outside a repository, these are unknown: the number is made of the commit's hash, or is 0.
    """
    given = os.environ.get(VARIABLE)
    if given is not None:
        return int(given)
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "--first-parent", "HEAD") or 0)
    return int(_git("rev-parse", "HEAD") or "0", 16) % PUSHES


def due(case: str, of: int, number: int) -> bool:
    """True if commit `number` runs `case`, the id of a test, as part of its share of one in `of`."""
    return (crc32(case.encode()) + number) % of == 0


def share_of(item: pytest.Item) -> int:
    """Return n where `item` runs in one of n consecutive commits, 1 where it always runs.

    The largest n of the marks of a test and of its case counts; the mark of a whole module is for the tests that have
    parameters and no mark of their own. `rotates` alone stands for `PUSHES`.
    """
    marks = list(item.iter_markers_with_node("rotates"))
    own = [mark for node, mark in marks if node is item]
    above = [mark for _, mark in marks] if "[" in item.name else []
    return max((_checked(item, *mark.args or (PUSHES,)) for mark in own or above), default=1)


def _checked(item: pytest.Item, of: int) -> int:
    if not 1 <= of <= PUSHES:
        raise pytest.UsageError(
            f"collecting {item.nodeid}: rotates({of}) leaves cases out of {PUSHES} pushes; write 1 to {PUSHES}"
        )
    return of


def _git(*words: str) -> str:
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
