"""How each rule is tried: functions that it must recognise, and functions that it must refuse with a reason.

Each module says so of its rules in `TRIED`; several may try one rule. Only tests and the library's own checks load this
package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

from fusion import Example


def tried() -> Mapping[str, tuple[Example, ...]]:
    """The examples and rejects of every rule, by its name."""
    found: dict[str, tuple[Example, ...]] = {}
    for name, examples in _declared():
        found[name] = (*found.get(name, ()), *examples)
    return found


def _declared() -> Iterator[tuple[str, tuple[Example, ...]]]:
    for module in iter_modules(__path__, f"{__name__}."):
        yield from getattr(import_module(module.name), "TRIED", {}).items()
