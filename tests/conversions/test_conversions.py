"""The compilers of torch_npu take every fused example and model, and add no copy of a cache."""

from __future__ import annotations

import re

import pytest

from tests.goldens.outcome import kept
from tests.support.torch_npu_host import requires_torch_npu

from .cases import is_kept, numbered
from .grid import FOLDER, converted

SHARES = 48


@pytest.mark.rotates
@requires_torch_npu
@pytest.mark.parametrize("share", range(SHARES))
def test_examples_and_models_are_converted(share: int):
    """If a text is meant to differ: python -m tests.conversions model_Name --accept."""
    numbers = range(share, len(numbered()), SHARES)
    results = {numbered()[number]: (text, broken) for number, text, broken in converted(numbers)}
    assert len(results) == len(numbers)
    assert not {f"{case.file} {case.name}": broken for case, (_, broken) in results.items() if broken}
    texts = {(case.file, case.name): text for case, (text, _) in results.items() if is_kept(case)}
    assert texts == {place: kept(place[0], FOLDER).get(place[1]) for place in texts}


def test_what_is_kept_is_of_a_case():
    names = {(case.file, case.name) for case in numbered() if is_kept(case)}
    assert {(path.stem, name) for path in FOLDER.glob("*.txt") for name in kept(path.stem, FOLDER)} == names


def test_no_model_copies_a_cache():
    """By the texts that are kept: what is copied is a single number, such as the length of a cache."""
    copied = [
        line for path in FOLDER.glob("*.txt") for line in re.findall(r"^  .* of \w+ \[.*\]$", path.read_text(), re.M)
    ]
    assert [line for line in copied if not line.endswith("[]")] == []


def test_decoding_writes_caches_in_place():
    steps = {path.stem: kept(path.stem, FOLDER).get("decode_static sdpa", "") for path in FOLDER.glob("*.txt")}
    counts = {name: int(re.findall(r"writes (\d+) inputs", text)[0]) for name, text in steps.items() if text}
    assert len(counts) > 8
    assert all(count >= 2 for count in counts.values()), counts
