"""The examples run as they are, and say what was fused; the long ones every night."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = ("demo", "qwen3", "deepseek_r1_w8a8", "deepseek_r1_w8a8c8")  # the last two have tests of their own
NIGHTLY = [pytest.param(each, marks=pytest.mark.nightly) for each in LONG]
SHORT = sorted({each.stem for each in EXAMPLES.glob("*.py")} - set(LONG))


@pytest.mark.parametrize("name", [*SHORT, *NIGHTLY])
def test_example_fuses_what_it_shows(name, capsys, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as when it is run by its path
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "fused" in said or "launches" in said, said
