"""What the pass does is what the text says that is kept."""

from __future__ import annotations

from collections import Counter

import pytest

from .cases import Case, every
from .outcome import FOLDER, kept, text

CASES = list(every())


@pytest.mark.parametrize("case", CASES, ids=lambda each: f"{each.file}-{each.name}")
def test_outcome_is_as_kept(case: Case):
    assert text(case) == kept(case.file).get(case.name), (
        f"if this is meant: python -m tests.goldens {case.file} --accept"
    )


def test_what_is_kept_is_of_a_case_and_names_are_unique():
    names = Counter((case.file, case.name) for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []
    assert {(path.stem, name) for path in FOLDER.glob("*.txt") for name in kept(path.stem)} <= set(names)
