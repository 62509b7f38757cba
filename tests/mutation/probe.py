"""What the guards of instrumented code ask: which step is dropped now, and which steps decided something.

A step decides where dropping it changes the condition that it is part of. A test in which no guard is decided by a step
cannot tell whether that step is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutation import sites

dropped = ""
"""Name of the step that is left out, "" for none."""
watching = False
"""Whether steps that decide are noted."""
decided: set[str] = set()
"""Names of the steps that decided something since this was last cleared."""

_names: dict[str, list[str]] = {}


def every(place: tuple[str, int], *steps: Callable[[], object]) -> bool:
    """Whether all steps hold, those beginning at this place of a file; the dropped one does."""
    return not _stopped(place, steps, by=False)


def some(place: tuple[str, int], *steps: Callable[[], object]) -> bool:
    """Whether some step holds; the dropped one does not."""
    return _stopped(place, steps, by=True)


def _stopped(place: tuple[str, int], steps: Sequence[Callable[[], object]], by: bool) -> bool:
    file, first = place
    names = _names[file][first : first + len(steps)]
    for number, (name, step) in enumerate(zip(names, steps, strict=True)):
        if name != dropped and bool(step()) is by:
            if watching and name not in decided and not _stopped_later(steps[number + 1 :], by):
                decided.add(name)
            return True
    return False


def _stopped_later(steps: Sequence[Callable[[], object]], by: bool) -> bool:
    """Whether another step gives the same answer; one that fails without those before it would change it."""
    try:
        return any(bool(step()) is by for step in steps)
    except Exception:
        return False


class _Loader(SourceFileLoader):
    """Compiles a file with probes; nothing is read from or written to a cache of bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        return compiled(Path(self.path))

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, sites.PROBE, sys.modules[__name__])
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, files: frozenset[str]) -> None:
        self.files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname.startswith(("fusion", "patterns")) else None
        if spec is None or spec.origin not in self.files:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def compiled(path: Path) -> CodeType:
    """The code of a file with probes, whose sites are known from then on."""
    file = str(path.relative_to(sites.ROOT))
    tree, found = sites.instrumented(path.read_text(), file)
    _names[file] = [each.name for each in found]
    return compile(tree, str(path), "exec", dont_inherit=True)


def install() -> None:
    """From now on, modules of `sites.PLACES` are imported with probes."""
    loaded = [name for name in sys.modules if name.split(".")[0] in ("fusion", "patterns")]
    if loaded:
        raise RuntimeError(f"installing probes: {loaded[0]} is imported already; install them first")
    sys.meta_path.insert(0, _Finder(frozenset(map(str, sites.files()))))
