"""Convert fused examples and models by torchair and npugraph_ex; compare with what is kept, or keep it."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

from rich.progress import track

from tests.goldens.__main__ import show
from tests.goldens.outcome import keep, kept

from . import __doc__ as about
from .cases import is_kept, numbered
from .grid import FOLDER, converted


def main() -> int:
    """Return 0 where no law is broken and every text is as it is kept, or was kept now."""
    parser = argparse.ArgumentParser("python -m tests.conversions", description=about)
    parser.add_argument("files", nargs="?", default="", help="a part of the names of the files; all without it")
    parser.add_argument("--accept", action="store_true", help="keep what comes out now")
    given = parser.parse_args()
    chosen = [number for number, case in enumerate(numbered()) if given.files in case.file]
    if not chosen:
        parser.error(f"no file has {given.files!r} in its name")
    found: dict[str, dict[str, str]] = defaultdict(dict)
    count = 0
    for number, text, broken in track(converted(chosen), "converting", total=len(chosen)):
        case = numbered()[number]
        if is_kept(case):
            found[case.file][case.name] = text
        for law in broken:
            print(f"{case.file} [{case.name}] {law}")
        count += bool(broken)
    differing = [name for name in found if show(name, kept(name, FOLDER), found[name])]
    if given.accept:
        for name, bodies in found.items():
            keep(name, bodies, FOLDER)
    accepted = " and were kept" * given.accept
    print(f"{len(chosen)} cases; {count} break a law; {len(differing)} files differ{accepted}")
    return int(count > 0 or (bool(differing) and not given.accept))


if __name__ == "__main__":
    sys.exit(main())
