"""Texts that are kept by their digests, for later graphs of this process and in a file for later processes.

What is kept depends on each line of the engine and the library: one file holds what one state of the code has made.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from fusion import operators
from fusion.language import Library
from fusion.language.code import loaded
from fusion.options import Options

log = logging.getLogger("fusion")

MONTH = 30 * 24 * 3600
"""Seconds."""


def folder() -> Path:
    """Where texts are kept for later processes: `cann-fusion` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cann-fusion"


@dataclass
class TextCache:
    """Texts by their digests, in memory and in a file; any number of processes may use one file.

    A file that cannot be read or written is done without.

    Attributes:
        file: None to keep texts in memory alone.
        most: of how many texts the file keeps the latest; such texts are read one by one. 0 to keep all, read at once.
        texts: what is in memory.
        fresh: what is to be written.
    """

    file: Path | None
    most: int = 0
    texts: dict[str, str] = field(default_factory=dict[str, str])
    fresh: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Read what earlier processes have kept; files that none has read for a month, of other versions, go."""
        if not self.most:
            self._on_file(lambda rows: self.texts.update(rows.execute("SELECT digest, text FROM kept")))
        with suppress(OSError):
            if self.file is not None:
                self.file.touch()
                _clear(self.file.parent)

    def get(self, digest: str) -> str | None:
        """The text of this digest, None where there is none."""
        if self.most and digest not in self.texts:
            query = "SELECT digest, text FROM kept WHERE digest = ?"
            self._on_file(lambda rows: self.texts.update(rows.execute(query, (digest,))))
        return self.texts.get(digest)

    def put(self, digest: str, text: str) -> None:
        """Keep a text, in the file from the next `save` on."""
        self.texts[digest] = self.fresh[digest] = text

    def save(self) -> None:
        """Write what is new; while others write for longer than we wait, it stays new until the next time."""
        if self.fresh and self._on_file(lambda rows: self._add(rows, [*self.fresh.items()])):
            self.fresh = {}

    def _add(self, rows: Any, fresh: Sequence[tuple[str, str]]) -> None:
        rows.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", fresh)
        if self.most:
            latest = "SELECT rowid FROM kept ORDER BY rowid DESC LIMIT ?"
            rows.execute(f"DELETE FROM kept WHERE rowid NOT IN ({latest})", (self.most,))

    def _on_file(self, work: Callable[[Any], Any]) -> bool:
        """Whether the work was done, as far as there is a file."""
        if self.file is None:
            return True
        import sqlite3

        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=2.0)) as rows, rows:
                rows.execute("CREATE TABLE IF NOT EXISTS kept (digest TEXT PRIMARY KEY, text TEXT NOT NULL)")
                work(rows)
        except (OSError, sqlite3.Error) as error:
            log.debug("nothing is kept in %s: %s", self.file, error)
            return False
        return True


def _clear(where: Path) -> None:
    for each in where.glob("*-*.sqlite"):
        if each.stat().st_mtime < time.time() - MONTH:
            each.unlink()


def text_cache(kind: str, library: Library, options: Options, most: int = 0) -> TextCache | None:
    """What of this kind is kept for this state of the code; None where nothing is to be."""
    if options.plan_cache == "off":
        return None
    versions = sha256(f"{torch.__version__} {operators.ensure()} {loaded(library)}".encode()).hexdigest()[:16]
    return _text_cache(f"{kind}-{versions}", folder() if options.plan_cache == "disk" else None, most)


@cache
def _text_cache(name: str, where: Path | None, most: int) -> TextCache:
    return TextCache(where and where / f"{name}.sqlite", most)
