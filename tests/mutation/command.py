"""What `python -m tests.mutation` does: tries the mutants, shows what became of them, and compares with the list."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from typing import Annotated

import pytest
import typer
from hypothesis import settings
from rich.console import Console
from rich.table import Table

from tests.changed import DOMAINS
from tests.mutation import limits, runs, survivors
from tests.support import rotation

API = ("test_assume.py", "test_backend.py", "test_results.py")
LIMITS = ("test_limits.py", "test_attention_limits.py", "test_dtype_limits.py")
TESTS = " ".join(
    (*(f"tests/{each}" for each in ("analysis", "engine", *DOMAINS, "corpus", "laws")),
     *(f"tests/api/{each}" for each in API), *(f"tests/operators/{each}" for each in LIMITS),
     "tests/attack/test_attack.py::test_what_went_wrong_once_is_right")
)  # fmt: skip
"""What looks at guards; other tests are of the API, the lowerings and what operators compute."""


def main(
    only: Annotated[str, typer.Argument(help="steps in whose names this expression is found; all, without")] = "",
    tests: Annotated[str, typer.Option(help="what to run, as for pytest")] = TESTS,
    workers: Annotated[int, typer.Option(help="processes at a time")] = 2,
    budget: Annotated[float, typer.Option(help="seconds of tests for each step")] = 60.0,
    keep: Annotated[bool, typer.Option(help="trust what is known of tests although sources have changed")] = False,
    accept: Annotated[bool, typer.Option(help="list new survivors as not judged yet")] = False,
) -> None:
    """Fail where a step can be dropped without a test that fails, and `survivors.txt` does not say why."""
    limits.install()
    os.environ[rotation.VARIABLE] = "0"  # the verdict on a step must not depend on the commit
    settings.register_profile("mutation", derandomize=True, database=None)
    settings.load_profile("mutation")
    runner = runs.Runner(only, workers, budget, keep)
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", "-o", "addopts=", "--strict-markers"]
    pytest.main([*options, *shlex.split(tests)], plugins=[runner])
    known = survivors.listed(survivors.LIST.read_text())
    alive = [each for each in runner.verdicts if each.outcome in ("survived", "unseen")]
    fresh = [each for each in alive if each.name not in known]
    gone = [each.name for each in runner.verdicts if each.name in known and each not in alive]
    _show(runner.verdicts, fresh, gone)
    if accept:
        survivors.LIST.write_text(survivors.with_unjudged(survivors.LIST.read_text(), [each.name for each in fresh]))
    raise typer.Exit(0 if runner.verdicts and (accept or not fresh) else 1)


def _show(verdicts: list[runs.Verdict], fresh: list[runs.Verdict], gone: list[str]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table("part", "steps", *runs.OUTCOMES)
    counts = Counter((_part(each.name), each.outcome) for each in verdicts)
    for part in sorted({_part(each.name) for each in verdicts}):
        numbers = [counts[part, outcome] for outcome in runs.OUTCOMES]
        table.add_row(part, *map(str, (sum(numbers), *numbers)))
    console.print(table)
    for each in fresh:
        console.print(f"{each.outcome} ({each.tests} of {each.of} tests)  {each.name}", markup=False)
    for name in gone:
        console.print(f"listed, but a test fails without it  {name}", markup=False)


def _part(name: str) -> str:
    """The file or operator that a step belongs to."""
    return name.split(" ")[0].rstrip(":")


def run() -> None:
    typer.run(main)
