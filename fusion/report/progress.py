"""A progress line on the terminal for a long compilation; none where stderr is no terminal, or in CI."""

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
"""Seconds after which the line is shown."""


class _Line:
    """The line of one compilation: its stage and the seconds since the line is shown; cleared at the end."""

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
        """Replace the name of the stage by `doing`."""
        with self._lock:
            self._doing = doing
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], description=doing)

    def close(self) -> None:
        """Remove the line, or cancel it before it is shown."""
        with self._lock:
            self._timer.cancel()
            if self._shown is not None:
                self._shown.stop()


_lines: list[_Line] = []  # at most one: nested compilations share the line


@contextmanager
def watched(doing: str, wanted: bool = True) -> Generator[None]:
    """Show the line `doing` while the context takes long, if `wanted`, stderr is a terminal, and not in CI."""
    if not wanted or _lines or os.environ.get("CI") or not sys.stderr.isatty():
        yield
        return
    _lines.append(_Line(doing))
    try:
        yield
    finally:
        _lines.pop().close()


def at(doing: str) -> None:
    """Show `doing` as the current stage."""
    for line in _lines:
        line.say(doing)
