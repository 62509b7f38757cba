"""The examples run as they are, and say what was fused; the long ones, of which most have other tests, every night."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotates(6)

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = ("demo", "qwen3", "deepseek_r1_w8a8", "deepseek_r1_w8a8c8", "deepseek_v32", "deepseek_v32_w8a8c8", "glm5")
NIGHTLY = [pytest.param(each, marks=pytest.mark.rotates) for each in LONG]
SHORT = sorted({each.stem for each in EXAMPLES.glob("*.py")} - set(LONG))


@pytest.mark.parametrize("name", [*SHORT, *NIGHTLY])
@pytest.mark.rotates(12)
def test_example_fuses_what_it_shows(name):
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fused" in done.stdout or "launches" in done.stdout, done.stdout
