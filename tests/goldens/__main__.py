"""Compare what the pass does with what is kept, or keep it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rich.progress import track

from . import __doc__ as about
from .outcome import FOLDER, keep, kept
from .recorded import numbered, recorded


def main() -> int:
    """0 where everything is as it is kept, or was kept now."""
    parser = argparse.ArgumentParser("python -m tests.goldens", description=about, formatter_class=_Formatter)
    parser.add_argument("files", nargs="?", default="", help="a part of the names of the files; all without it")
    parser.add_argument("--accept", action="store_true", help="keep what comes out now")
    parser.add_argument("--share", type=int, default=1, help="compare one case in so many (default: every one)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    given = parser.parse_args()
    if given.accept and given.share > 1:
        parser.error("what is kept must be whole: leave --share out, or --accept")
    chosen = [number for number, case in enumerate(numbered()) if given.files in case.file][:: given.share]
    if not chosen:
        names = ", ".join(sorted({case.file for case in numbered()}))
        parser.error(f"no file has {given.files!r} in its name; there are {names}")
    found: dict[str, dict[str, str]] = defaultdict(dict)
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:  # torch's threads do not survive a fork
        texts = pool.map(recorded, chosen, chunksize=4)
        for number, body in zip(chosen, track(texts, "recording", total=len(chosen)), strict=True):
            case = numbered()[number]
            found[case.file][case.name] = body
    differing = [name for name in found if show(name, _compared(kept(name), found[name], given.share), found[name])]
    if given.accept:
        for name, bodies in found.items():
            keep(name, bodies)
        left = {path.stem for path in FOLDER.glob("*.txt")} - {case.file for case in numbered()}
        for name in left if not given.files else ():
            (FOLDER / f"{name}.txt").unlink()
    print(f"{len(chosen)} cases in {len(found)} files; {len(differing)} files differ{' and were kept' * given.accept}")
    return int(bool(differing) and not given.accept)


def show(name: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Print what differs in one file."""
    old, new = (
        [f"[{case}] {line}" for case, body in each.items() for line in body.split("\n")] for each in (before, now)
    )
    lines = list(difflib.unified_diff(old, new, f"{name} as kept", f"{name} now", lineterm="", n=0))
    print("\n".join(lines)) if before and lines else None
    return bool(lines)


def _compared(before: dict[str, str], now: dict[str, str], share: int) -> dict[str, str]:
    """What of a file is to be compared: all, or what was asked for."""
    return before if share == 1 else {name: body for name, body in before.items() if name in now}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    sys.exit(main())
