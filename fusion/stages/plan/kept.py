"""Plans that are kept: for later graphs of this process, and in a file for later processes.

A plan depends on its rule, on how its inputs look, on the targets, on some options, and on each line of the engine and
the library. It is kept as JSON under a digest of all that. A symbolic size belongs to one graph: such plans are never
kept.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from fusion._torch import OpOverload
from fusion.language import Refused, Rule
from fusion.options import Options
from fusion.recording import Fakes
from fusion.records import Input, Output, Plan, Step

log = logging.getLogger("fusion")

Plans = Mapping[str, Plan | Refused]

MONTH = 30 * 24 * 3600
"""Seconds."""


def folder() -> Path:
    """Where plans are kept for later processes: `cann-fusion` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cann-fusion"


class _UnwrittenError(Exception):
    """A value has no text that says all of it."""


@dataclass
class Shelf:
    """The texts of plans by their digests, in memory and in a file; any number of processes may use one file.

    A file that cannot be read or written is done without.
    """

    file: Path | None
    texts: dict[str, str] = field(default_factory=dict[str, str])
    fresh: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Read what earlier processes have kept; files that none has read for a month, of other versions, go."""
        self._on_file(lambda rows: self.texts.update(rows.execute("SELECT digest, plans FROM kept")))
        with suppress(OSError):
            if self.file is not None:
                self.file.touch()
                _clear(self.file.parent)

    def put(self, digest: str, text: str) -> None:
        """Keep a text, in the file from the next `save` on."""
        self.texts[digest] = self.fresh[digest] = text

    def save(self) -> None:
        """Write what is new."""
        fresh, self.fresh = list(self.fresh.items()), {}
        if fresh:
            self._on_file(lambda rows: rows.executemany("INSERT OR IGNORE INTO kept VALUES (?, ?)", fresh))

    def _on_file(self, work: Any) -> None:
        if self.file is None:
            return
        import sqlite3

        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=2.0)) as rows, rows:
                rows.execute("CREATE TABLE IF NOT EXISTS kept (digest TEXT PRIMARY KEY, plans TEXT NOT NULL)")
                work(rows)
        except (OSError, sqlite3.Error) as error:
            log.debug("plans are not kept in %s: %s", self.file, error)


def _clear(where: Path) -> None:
    for each in where.glob("plans-*.sqlite"):
        if each.stat().st_mtime < time.time() - MONTH:
            each.unlink()


def shelf(code: str, options: Options) -> Shelf | None:
    """What is kept for this state of the code; None where nothing is to be."""
    if options.plan_cache == "off":
        return None
    versions = f"{torch.__version__} {code}"
    return _shelf(sha256(versions.encode()).hexdigest()[:16], folder() if options.plan_cache == "disk" else None)


@cache
def _shelf(versions: str, where: Path | None) -> Shelf:
    return Shelf(where and where / f"plans-{versions}.sqlite")


def digest(rule: Rule, *parts: Any) -> str | None:
    """What tells plans apart beside the versions; None where no text can."""
    if not _is_of_its_module(rule):
        return None
    try:
        told = json.dumps([type(rule).__module__, type(rule).__qualname__, _written(parts)])
    except _UnwrittenError:
        return None
    return sha256(told.encode()).hexdigest()


def _is_of_its_module(rule: Rule) -> bool:
    """Whether the versions tell all of a rule: its class stands in a file, and holds no values of its own."""
    module = sys.modules.get(type(rule).__module__)
    return getattr(module, type(rule).__qualname__, None) is type(rule) and not vars(rule)


def text_of(plans: Plans) -> str | None:
    """Plans as JSON; None where they hold what cannot be written."""
    try:
        return json.dumps({name: _written(each) for name, each in plans.items()})
    except _UnwrittenError:
        return None


def plans_of(text: str, fakes: Fakes) -> Plans:
    """The plans that a text tells, with fakes of this graph."""
    return {name: _read(each, fakes) for name, each in json.loads(text).items()}


def _written(value: Any) -> Any:
    """A value as JSON: what JSON has as it is, else a list of its kind and what it is made of."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Input(name):
            return ["input", name]
        case Output(step, item):
            return ["output", step, item]
        case Step(target=target, args=args, kwargs=kwargs, result=result):
            return ["step", *map(_written, (target, args, dict(kwargs), result))]
        case Plan(steps, results, fakes, refusals, costs, uses):
            return ["plan", *map(_written, (steps, results, fakes, dict(refusals), costs, uses))]
        case Refused():
            return ["refused", str(value)]
        case OpOverload():
            return ["operator", str(value)]
        case torch.Tensor():
            return ["tensor", _sizes(value.shape), _sizes(value.stride()), str(value.dtype), str(value.device)]
        case torch.dtype() | torch.memory_format() | torch.layout():
            return ["torch", str(value)]
        case torch.device():
            return ["device", str(value)]
        case dict():
            return ["dict", *([_written(name), _written(each)] for name, each in value.items())]
        case frozenset():
            return ["set", *sorted(map(str, value))]
        case list() | tuple():
            return ["tuple" if isinstance(value, tuple) else "list", *map(_written, value)]
        case type():
            return ["type", f"{value.__module__}.{value.__qualname__}"]
        case _ if is_dataclass(value):
            return ["record", _written(type(value)), *(_written(getattr(value, each.name)) for each in fields(value))]
        case _:
            raise _UnwrittenError


def _sizes(sizes: Any) -> list[int]:
    if not all(isinstance(each, int) for each in sizes):
        raise _UnwrittenError
    return list(sizes)


def _read(value: Any, fakes: Fakes) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        shape, stride, dtype, device = rest
        return fakes.made(shape, stride, _of_torch(dtype), torch.device(device))
    if kind == "dict":
        return {_read(name, fakes): _read(each, fakes) for name, each in rest}
    parts = [_read(each, fakes) for each in rest]
    return _KINDS[kind](*parts)


def _of_torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _operator(name: str) -> OpOverload:
    namespace, short, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), short), overload)


_KINDS: Mapping[str, Any] = {
    "input": Input,
    "output": Output,
    "step": Step,
    "plan": Plan,
    "refused": lambda text: Refused("{reason}", {"reason": text}),
    "operator": _operator,
    "torch": _of_torch,
    "device": torch.device,
    "set": lambda *names: frozenset(names),
    "list": lambda *parts: list(parts),
    "tuple": lambda *parts: parts,
}
"""How what `_written` gives is made again; what is only told apart (types, records) never is."""
