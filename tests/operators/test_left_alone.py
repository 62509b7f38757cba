"""The page of operators that are left alone names operators of the wheel: rules emit those under "In" alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.operators.test_wheels import schemas
from tests.support.torch_npu_host import wheel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "vendor-operators.md"


def named(heading: str) -> set[str]:
    """The operators in the first column of the table below a heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M)
    return {
        name
        for row in section.splitlines()
        if row.startswith("|")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def test_what_is_in_is_emitted_and_what_is_left_alone_is_not():
    sources = "".join(each.read_text() for each in (ROOT / "patterns").rglob("*.py"))
    emitted = set(re.findall(r"\bnpu\.(\w+)", sources))
    assert named("In") <= emitted
    assert named("Left alone").isdisjoint(emitted)


@pytest.mark.skipif(not (wheel() / "torch_npu").is_dir(), reason="there is no wheel of torch_npu")
@pytest.mark.rotates(3)
def test_the_wheel_has_them_all():
    assert named("In") | named("Left alone") <= schemas(wheel()).keys()
