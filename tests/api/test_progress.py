"""The line on the terminal: shown where a compilation is long and somebody looks, and nowhere else."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stderr

import pytest
import torch

import fusion
from fusion.options import Options
from fusion.report import progress
from fusion.report.failures import stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal outside CI, where each compilation is long."""
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    return Terminal()


def work(terminal: Terminal, wanted: bool = True) -> None:
    with redirect_stderr(terminal), progress.watched("trace", wanted), progress.watched("inside", wanted):
        for name in ("match", "plan"):
            with stage(name):
                time.sleep(0.3)


def test_a_long_compilation_says_what_it_is_at(terminal: Terminal):
    work(terminal)
    shown = terminal.getvalue()
    assert "cann-fusion: match" in shown
    assert "cann-fusion: plan" in shown
    assert "inside" not in shown


@pytest.mark.rotates(4)
def test_nothing_is_shown_where_nobody_looks_or_wants_it(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    work(terminal, wanted=False)
    monkeypatch.setenv("CI", "true")
    work(terminal)
    monkeypatch.delenv("CI")
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    work(terminal)
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_it_is_quick(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "AFTER", 30.0)
    work(terminal)
    assert terminal.getvalue() == ""


def test_the_line_goes_where_something_is_raised(terminal: Terminal):
    with redirect_stderr(terminal), pytest.raises(ValueError, match="no"), progress.watched("trace"):
        raise ValueError("no")
    assert progress._lines == []


def test_explain_and_the_backend_are_watched(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, bool]] = []
    watched = progress.watched

    def noted(doing: str, wanted: bool = True):
        asked.append((doing, wanted))
        return watched(doing, wanted)

    for name in ("fusion.frontend.explain", "fusion.frontend.backend"):
        monkeypatch.setattr(sys.modules[name], "watched", noted)
    fusion.explain(torch.exp, torch.rand(2))
    torch.compile(torch.exp, backend="cann_fusion", options=vars(Options(lower="eager", progress=False)))(torch.rand(2))
    assert asked == [("trace", True), ("capture", False)]
