"""The list of steps that no test misses, `survivors.txt`: a heading says why that does not matter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).with_name("survivors.txt")
UNJUDGED = "Not judged yet"


def listed(text: str) -> dict[str, str]:
    """Step -> the heading that it stands under."""
    found: dict[str, str] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line and not line.startswith("#"):
            found[line] = heading
    return found


def with_unjudged(text: str, names: Iterable[str]) -> str:
    """The list with these steps at its end, not judged."""
    known = listed(text)
    fresh = [name for name in names if name not in known]
    heading = [] if UNJUDGED in known.values() or not fresh else ["", f"## {UNJUDGED}"]
    return "\n".join([text.rstrip("\n"), *heading, *fresh]) + "\n"
