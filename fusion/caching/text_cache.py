"""Cache of texts by digest, in memory and in a SQLite file for later processes.

The contents depend on every line of the engine and the library: each state of the code has files of its own.
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
from fusion.language.cache_keys import loaded
from fusion.options import Options

log = logging.getLogger("fusion")

MONTH = 30 * 24 * 3600
"""Seconds after which an unused file is deleted."""


def folder() -> Path:
    """Return the folder for files: `cann-fusion` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cann-fusion"


@dataclass
class TextCache:
    """Texts by digest, in memory and in a file that any number of processes may share.

    Without a usable file, texts are cached in memory alone.

    Attributes:
        file: the file; None for memory alone.
        most: most texts in the file, the latest ones, which are read one by one. 0 for no limit: all are read at once.
        texts: the texts in memory.
        fresh: the texts that are not written yet.
    """

    file: Path | None
    most: int = 0
    texts: dict[str, str] = field(default_factory=dict[str, str])
    fresh: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Read all texts of `file` unless `most` limits them; mark it as used, and delete files unused for a month."""
        if not self.most:
            self._on_file(lambda rows: self.texts.update(rows.execute("SELECT digest, text FROM kept")))
        with suppress(OSError):
            if self.file is not None:
                self.file.touch()
                _clear(self.file.parent)

    def get(self, digest: str) -> str | None:
        """Return the text of `digest`, None where there is none."""
        if self.most and digest not in self.texts:
            query = "SELECT digest, text FROM kept WHERE digest = ?"
            self._on_file(lambda rows: self.texts.update(rows.execute(query, (digest,))))
        return self.texts.get(digest)

    def put(self, digest: str, text: str) -> None:
        """Store `text` in memory, and in the file at the next `save`."""
        self.texts[digest] = self.fresh[digest] = text

    def save(self) -> None:
        """Write the new texts; a file that others lock for too long is written at the next `save`."""
        if self.fresh and self._on_file(lambda rows: self._add(rows, [*self.fresh.items()])):
            self.fresh = {}

    def _add(self, rows: Any, fresh: Sequence[tuple[str, str]]) -> None:
        rows.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", fresh)
        if self.most:
            latest = "SELECT rowid FROM kept ORDER BY rowid DESC LIMIT ?"
            rows.execute(f"DELETE FROM kept WHERE rowid NOT IN ({latest})", (self.most,))

    def _on_file(self, work: Callable[[Any], Any]) -> bool:
        """Call `work` with a connection to the database in the file; return True if it succeeds, or there is no
        file.
        """
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
    """Return the cache of this `kind` for the current state of the code; None if the options turn caching off.

    Its file has at most `most` texts, see `TextCache`.
    """
    if options.plan_cache == "off":
        return None
    versions = sha256(f"{torch.__version__} {operators.ensure()} {loaded(library)}".encode()).hexdigest()[:16]
    return _text_cache(f"{kind}-{versions}", folder() if options.plan_cache == "disk" else None, most)


@cache
def _text_cache(name: str, where: Path | None, most: int) -> TextCache:
    return TextCache(where and where / f"{name}.sqlite", most)
