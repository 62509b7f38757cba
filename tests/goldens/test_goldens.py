"""What the pass does is what the text says that is kept."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from .cases import Case, every
from .outcome import FOLDER, kept, text

pytestmark = pytest.mark.rotates(32)

CASES = list(every())


def settings() -> list[object]:
    """A share of the examples and pieces at each push; corpora and models, which have their own tests, every night."""
    nightly = [() if case.file.startswith(("example_", "repository_")) else (pytest.mark.rotates,) for case in CASES]
    return [
        pytest.param(case, id=f"{case.file}-{case.name}", marks=marks)
        for case, marks in zip(CASES, nightly, strict=True)
    ]


@pytest.mark.parametrize("case", settings())
def test_outcome_is_as_kept(case: Case):
    assert text(case) == kept(case.file).get(case.name), (
        f"if this is meant: python -m tests.goldens {case.file} --accept"
    )


RISES: frozenset[tuple[str, str]] = frozenset()
"""Cases in which more calls are made than the model makes, on either target, because they save so much."""


def test_no_more_calls_are_made_than_the_model_makes():
    """By the texts that are kept."""
    told = {(path.stem, name): body for path in FOLDER.glob("*.txt") for name, body in kept(path.stem).items()}
    counts = {case: re.findall(r"(\d+) -> (\d+) launches", body) for case, body in told.items()}
    assert all(counts.values())
    assert {case for case, found in counts.items() if any(int(a) > int(b) for b, a in found)} == RISES


def test_what_is_kept_is_of_a_case_and_names_are_unique():
    names = Counter((case.file, case.name) for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []
    assert {(path.stem, name) for path in FOLDER.glob("*.txt") for name in kept(path.stem)} <= set(names)


def test_no_rule_and_no_reader_raised():
    """By the texts that are kept."""
    failed = {path.stem: re.findall(r"^  failed: .*$", path.read_text(), re.MULTILINE) for path in FOLDER.glob("*.txt")}
    assert not {file: lines for file, lines in failed.items() if lines}
