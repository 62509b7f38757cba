"""Packages that are installed beside this one add a concept, with readings of their own, and are fused with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).with_name("third_party")
LINES = {"interleaved_gate": 80, "capped_attention": 180}
CHECKED = """
import torch
import fusion
from fusion import testing
from fusion.frontend.library import installed

(rule,) = (each for each in installed().rules if each.name == "{rule}")
for _, example in testing.cases([rule]):
    for level in testing.LEVELS:
        testing.check(rule, example, torch.bfloat16, level)
"""
GATE = """
report = fusion.explain(lambda x: x[..., ::2] * x[..., ::2].sigmoid() * x[..., 1::2], torch.randn(2, 64))
assert [each.rule for each in report.matches] == ["interleaved_swiglu"], report
assert report.ops == {"npu::npu_swiglu": 1}, report
"""
CAPPED = """
def flattened(q, k, v, mask):
    k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(2, 4, 5, 7) * 0.1
    scores = (scores / 50).tanh() * 50 + mask
    return torch.einsum("bnst,bnte->bsne", scores.softmax(-1), v)

def plain(q, k, v):
    return (q @ k.mT).softmax(-1) @ v

q, k, v = (torch.randn(2, heads, rows, 64, dtype=torch.bfloat16) for heads, rows in ((4, 5), (2, 7), (2, 7)))
mask = torch.zeros(2, 1, 5, 7, dtype=torch.bfloat16)
options = {"target": "ascend910_93", "assume": {"mask": "causal"}, "plan_cache": "off"}
report = fusion.explain(flattened, q, k, v, mask, options=options)
assert report.ops == {"own_attention::capped": 1}, report
assert not report.refusals, report
report = fusion.explain(plain, q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]], options=options)
assert [each.rule for each in report.matches] == ["attention"], report
report = fusion.explain(flattened, q, k, v, mask, options=options | {"disable": {"capped_attention"}})
assert not report.ops, report
"""


@pytest.mark.parametrize(
    ("package", "rule", "more"),
    [("interleaved_gate", "interleaved_swiglu", GATE), ("capped_attention", "capped_attention", CAPPED)],
    ids=list(LINES),
)
@pytest.mark.rotates(12)
def test_a_package_beside_this_one_adds_a_reading_and_a_rule(tmp_path: Path, package: str, rule: str, more: str):
    for folder in PACKAGES.glob(f"{package}*"):
        shutil.copytree(folder, tmp_path / folder.name)
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    run = subprocess.run(
        [sys.executable, "-c", CHECKED.format(rule=rule) + more],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("package", LINES)
def test_it_takes_few_lines(package: str):
    assert len((PACKAGES / package / "__init__.py").read_text().splitlines()) <= LINES[package]
