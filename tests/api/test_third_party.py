"""A package that is installed beside this one adds a concept, with a reading of its own, and is fused with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).with_name("third_party")
LINES = 80
CHILD = """
import torch
import fusion
from fusion import testing
from fusion.frontend.library import installed

(rule,) = (each for each in installed().rules if each.name == "interleaved_swiglu")
for _, example in testing.cases([rule]):
    for level in testing.LEVELS:
        testing.check(rule, example, torch.bfloat16, level)
report = fusion.explain(lambda x: x[..., ::2] * x[..., ::2].sigmoid() * x[..., 1::2], torch.randn(2, 64))
assert [each.rule for each in report.matches] == ["interleaved_swiglu"], report
assert report.ops == {"npu::npu_swiglu": 1}, report
print("fused", len(installed().rules))
"""


def test_a_package_beside_this_one_adds_a_reading_and_a_rule(tmp_path):
    shutil.copytree(PACKAGE, tmp_path, dirs_exist_ok=True)
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    run = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("fused")


def test_it_takes_few_lines():
    assert len((PACKAGE / "interleaved_gate" / "__init__.py").read_text().splitlines()) <= LINES
