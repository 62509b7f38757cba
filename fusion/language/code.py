"""What tells one state of the code that decides from another."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fusion.language.reader import Library
from fusion.language.rule import Rule


def names_of(library: Library) -> str:
    """The names of its rules and readers."""
    return " ".join(sorted([*(rule.name for rule in library.rules), *(each.name for each in library.readers)]))


def code_of(library: Library) -> str:
    """A digest of every file of this package and of those that a library is from."""
    kinds = [*map(type, library.rules), *(each.read for each in library.readers)]
    packages = {kind.__module__.partition(".")[0] for kind in kinds} | {"fusion"}
    return " ".join(f"{each} {_code(each)}" for each in sorted(packages))


loaded = cache(code_of)
"""That of the code which runs: what was loaded, whatever becomes of the files."""


def _code(package: str) -> str:
    """A digest of the files of a package, or of a module alone."""
    module = import_module(package)
    folders = [Path(each) for each in getattr(module, "__path__", ())]
    alone: Any = getattr(module, "__file__", None)
    files = [each for folder in folders for each in sorted(folder.rglob("*.py"))] or [Path(alone)] * bool(alone)
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.read_bytes())
    return digest.hexdigest()


def is_of_its_module(rule: Rule) -> bool:
    """Whether the files tell all of a rule: its class stands in a file, and holds no values of its own."""
    module = sys.modules.get(type(rule).__module__)
    return getattr(module, type(rule).__qualname__, None) is type(rule) and not vars(rule)
