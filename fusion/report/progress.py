"""A line on the terminal that says what a long compilation is at; none where nobody looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

AFTER = 5.0
"""Seconds after which a compilation is long."""


class _Line:
    """The line of one compilation: its stage and the seconds since it is shown; cleared at the end."""

    def __init__(self, doing: str) -> None:
        self._doing, self._lock = doing, Lock()
        self._shown: Progress | None = None
        self._timer = Timer(AFTER, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if not self._timer.finished.is_set():
                columns = SpinnerColumn(), TextColumn("cann-fusion: {task.description}"), TimeElapsedColumn()
                self._shown = Progress(*columns, console=Console(stderr=True), transient=True)
                self._shown.add_task(self._doing)
                self._shown.start()

    def say(self, doing: str) -> None:
        """What is done now."""
        with self._lock:
            self._doing = doing
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], description=doing)

    def close(self) -> None:
        """Take the line away, or never show it."""
        with self._lock:
            self._timer.cancel()
            if self._shown is not None:
                self._shown.stop()


_lines: list[_Line] = []  # the open one, if any: what is compiled inside has no line of its own


@contextmanager
def watched(doing: str, wanted: bool = True) -> Generator[None]:
    """Show a line while what is done inside takes long, if stderr is a terminal, and not in CI."""
    if not wanted or _lines or os.environ.get("CI") or not sys.stderr.isatty():
        yield
        return
    _lines.append(_Line(doing))
    try:
        yield
    finally:
        _lines.pop().close()


def at(doing: str) -> None:
    """Say what is done now."""
    for line in _lines:
        line.say(doing)
