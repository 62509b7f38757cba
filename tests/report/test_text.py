"""The text of a report: 80 columns, on paper and from the command, the reasons first."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fusion
from fusion.frontend.cli import app
from fusion.report.text import counted, microseconds, place, size

from .models import NPU, capped, inputs, layered

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def text() -> str:
    return str(layered(3, 1))


def test_it_fits_80_columns_and_has_no_colours(text: str):
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b[" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_reasons_come_before_what_was_fused(text: str):
    titles = (
        "fused for ascend910_93",
        "not fused, and why",
        "fused, and from which lines",
        "launches that stay",
        "layers",
        "launches by module",
    )
    places = [text.index(f"{each} " if each == "layers" else each) for each in titles]
    assert places == sorted(places)


def test_it_says_which_lines_became_a_call_what_stays_and_what_to_change(text: str):
    words = " ".join(text.split())
    for each in (
        "npu_add_rms_norm by add_norm: layers.0,2.norm x2",
        "variance = y.pow(2).mean(-1, keepdim=True)",
        "rms_norm: layers.1.norm eps: it is 0.5",
        "would save at most",
        "layer 1 differs from 0,2: ",
        "-npu_add_rms_norm in norm",
        "tests/report/models.py:",
    ):
        assert each in words, text


def test_of_many_launches_that_stay_the_longest_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = "\n".join(f"    x = x.sin() * {number}.5" for number in range(30))
    (tmp_path / "long_model.py").write_text(f"def many(x):\n{lines}\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = fusion.explain(import_module("long_model").many, torch.randn(4, 64).bfloat16(), options=NPU)
    assert len(report.document().left) == 60
    text = str(report)
    assert len(re.findall(r"^(?:sin|mul): ", text, re.MULTILINE)) == 20
    assert "40 launches, " in text
    assert "more, of shorter ones: listed by --html, --json and report.document()" in " ".join(text.split())


def test_text_of_a_model_is_no_markup():
    def odd(q, k, v):
        return capped(q, k, v)  # [bold]no markup[/bold] :smile:

    text = str(fusion.explain(odd, *(torch.randn(1, 2, 16, 64).bfloat16() for _ in range(3)), options=NPU))
    assert "[on " not in text
    assert "scores = 30 * torch.tanh(q @ k.transpose(-1, -2) / 30)" in text


def test_the_command_writes_80_columns_into_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "piped_model.py").write_text(
        "from tests.report.models import Norm, inputs\n\n\ndef build():\n"
        "    return Norm(0.5).bfloat16(), inputs()[:1]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, ["explain", "piped_model:build"])
    assert done.exit_code == 0, done.output
    assert "not fused, and why" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (microseconds(12.34), "12.3 us"),
        (microseconds(1234.5), "1,234 us"),
        (size(12), "12 B"),
        (size(2048), "2.0 KiB"),
        (size(3 * 2**40), "3,072 GiB"),
        (counted(1, "launch"), "1 launch"),
        (counted(2, "launch"), "2 launches"),
        (place("", 1), "outside of modules"),
        (place("layers.0-2", 3), "layers.0-2 x3"),
    ],
)
def test_numbers(written: str, text: str):
    assert written == text


def test_weights_of_symbolic_sizes_have_sizes_in_bytes():
    def gated(x, gate, up):
        return torch.nn.functional.silu(x @ gate.T) * (x @ up.T)

    x, _ = inputs(1, 4)
    weights = [torch.nn.Parameter(torch.randn(96, 64).bfloat16(), requires_grad=False) for _ in range(2)]
    report = fusion.explain(gated, x, *weights, options=NPU, dynamic=True)
    assert report.prepared
    assert report.parameter_bytes == 2 * 96 * 64 * 2
    assert type(report.parameter_bytes) is type(report.prepared_bytes) is int
    assert " MiB beside the Parameters" in str(report)
