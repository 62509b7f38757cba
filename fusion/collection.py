"""Garbage collection, which is of no use while a graph is rewritten."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Without garbage collection, which looks through all of a traced model each time and frees next to nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            _settle()
            gc.enable()


def _settle() -> None:
    """Take all that was made for old: it lives as long as the graph, and the next collection would look through it.

    What is frozen becomes old when it is thawed; where a program keeps objects frozen, that is left alone.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
