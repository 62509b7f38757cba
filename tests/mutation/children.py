"""Tasks in forked processes: each begins as a copy of this one, and what it changes is gone with it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Task = TypeVar("Task")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class _Child:
    process: Any
    task: Any
    until: float


def in_children(
    tasks: Iterable[Task], work: Callable[[Task], Any], seconds: Callable[[Task], float], workers: int
) -> Iterator[tuple[Task, Any]]:
    """Each task with what `work` gives for it, as they end; None where a process dies or does not end in time."""
    waiting, running = iter(tasks), dict[Connection, _Child]()
    try:
        while True:
            while len(running) < workers and (task := next(waiting, None)) is not None:
                here, there = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_run, args=(there, work, task))
                process.start()
                there.close()
                running[here] = _Child(process, task, time.monotonic() + seconds(task))
            if not running:
                return
            yield from _ended(running)
    finally:
        for child in running.values():
            child.process.kill()


def _ended(running: dict[Connection, _Child]) -> Iterator[tuple[Any, Any]]:
    """Wait until a process ends or should have, and take it out of those that run."""
    first = min(child.until for child in running.values())
    ready = wait(list(running), max(0.0, first - time.monotonic()))
    late = [each for each, child in running.items() if child.until < time.monotonic() and each not in ready]
    for here in (*ready, *late):
        child = running.pop(here)
        found = None if here in late else _received(here)
        child.process.kill()
        child.process.join()
        here.close()
        yield child.task, found


def _run(there: Connection, work: Callable[[Any], Any], task: Any) -> None:
    there.send(work(task))


def _received(here: Connection) -> Any:
    try:
        return here.recv()
    except EOFError:
        return None
