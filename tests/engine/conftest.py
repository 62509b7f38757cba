"""What several files of tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from .kept_files import later


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with nothing in it, and nothing in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    later()
    return tmp_path / "cann-fusion"
