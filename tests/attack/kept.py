"""Programs that went wrong once, as small as they were found; each push runs a share of them for all targets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .program import Program

FILE = Path(__file__).with_suffix(".txt")
_CASE = re.compile(r"== (?P<name>.*?)(?: \(by the door (?P<door>\w+)\))?\n(?P<why>.*)\n(?P<program>(?:.+\n?)+)")


@dataclass(frozen=True)
class Kept:
    """One program.

    Attributes:
        name: what it does.
        why: what went wrong.
        program: as it was printed.
        door: by which door; "" for the backend.
    """

    name: str
    why: str
    program: Program
    door: str = ""


def kept(text: str) -> Kept:
    """One program with what it does, and what went wrong, in the two lines above it."""
    match = _CASE.fullmatch(text)
    assert match, f"{FILE.name}: no program:\n{text}"
    return Kept(match["name"], match["why"], Program.of(match["program"].rstrip()), match["door"] or "")


KEPT = tuple(map(kept, FILE.read_text().strip().split("\n\n")))
