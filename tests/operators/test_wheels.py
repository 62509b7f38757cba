"""The schemas in the libraries of a wheel of torch_npu, which need not import here: those of every operator are ours.

    CANN_FUSION_TORCH_NPU=<folder of an unpacked wheel> python -m pytest tests/operators/test_wheels.py

2.13.0 and 2.14.0 are alike in all of their 441 schemas.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from fusion.operators import OPERATORS, Operator
from fusion.operators.calling import parsed
from tests.support.torch_npu_host import wheel

SCHEMA = re.compile(rb"(?<=\0)[A-Za-z_][\w.]*\([^\0\n]*\) -> [^\0\n]*(?=\0)")
OURS = re.compile(r"[.](in_place|functional|tensor_lengths)$")
UNSPELT = {"atb::_npu_paged_attention", "atb::_npu_reshape_and_cache"}
"""No library holds the schema as one text."""

pytestmark = pytest.mark.skipif(not (wheel() / "torch_npu").is_dir(), reason="there is no wheel of torch_npu")


def schemas(folder: Path) -> dict[str, set[str]]:
    """Name, with its overload -> schemas of that name, of whichever namespace, as PyTorch prints them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for library in sorted((folder / "torch_npu" / "lib").glob("*.so")):
        for each in SCHEMA.findall(library.read_bytes()):
            text = each.decode(errors="replace")
            found[text.partition("(")[0]].add(text)
    return found


@pytest.fixture(scope="module")
def spelt() -> dict[str, set[str]]:
    return schemas(wheel())


def theirs() -> list[Operator]:
    return [each for name, each in OPERATORS.items() if not OURS.search(name) and each.namespace in ("npu", "atb")]


@pytest.mark.rotates(3)
def test_the_libraries_spell_every_operator_that_is_emitted(spelt: dict[str, set[str]]):
    assert len(spelt) > 400
    assert {each.name for each in theirs() if each.short not in spelt} == UNSPELT


@pytest.mark.parametrize("op", theirs(), ids=lambda each: each.name)
def test_a_schema_is_that_of_the_wheel(op: Operator, spelt: dict[str, set[str]]):
    if op.name in UNSPELT:
        pytest.skip("its schema is not spelt as one text")
    told = {str(parsed(f"{op.namespace}::{text}")) for text in spelt[op.short]}
    assert str(parsed(op.schema)) in told
