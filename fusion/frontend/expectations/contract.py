"""Expectations as a record, read from a TOML file or a mapping of the same content.

target = "ascend910_93"

[at_most]
launches = 34

[fusions]
attention = 2

[modules."model.layers.*.self_attn"]
attention = 1
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fusion.errors import OptionError
from fusion.frontend.expectations.path_patterns import pattern_error
from fusion.options import check_names
from fusion.planning.target import Target

LIMITS = ("launches", "prepared_bytes", "result_copies")
"""Counts of a report that `at_most` may limit."""
_COUNTS = "a table of names and numbers, such as attention = 2"
_MODULES = 'a table of module paths and fusions, such as [modules."layers.*.attn"]'


@dataclass(frozen=True)
class Expectations:
    """Fusions that a model must have, and limits that it must keep.

    Attributes:
        source: the file that they were read from, or "the option expect".
        target: the target that the model must be planned for; "" for any.
        at_most: greatest allowed counts, by their name in `LIMITS`.
        fusions: least number of fusions in all of the model, by rule.
        modules: by the pattern of a module path, the least number of fusions in each module that it matches, by rule.
    """

    source: str
    target: str = ""
    at_most: Mapping[str, int] = field(default_factory=dict[str, int])
    fusions: Mapping[str, int] = field(default_factory=dict[str, int])
    modules: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])

    def rules(self) -> Mapping[str, frozenset[str]]:
        """Return the names of rules by the table that has them."""
        tables = {"[fusions]": self.fusions, **{f"[modules.{name!r}]": each for name, each in self.modules.items()}}
        return {table: frozenset(each) for table, each in tables.items()}


def expectations(given: str | Mapping[str, Any]) -> Expectations:
    """Read the expectations of `given`, the path of a TOML file or a mapping of its content.

    Names of rules are not checked.

    Raises:
        OptionError: the file cannot be read, or has an unknown key or a value of another type.
    """
    source = given if isinstance(given, str) else "the option expect"
    doing = f"reading expectations of {source}"
    content = _loaded(given, doing) if isinstance(given, str) else given
    check_names("key", content, [each.name for each in fields(Expectations) if each.name != "source"], doing=doing)
    target = content.get("target", "")
    if not isinstance(target, str):
        raise _wrong(doing, "target", target, 'the name of a target, such as "ascend910_93"')
    if target:
        Target.resolve(target)
    at_most = _counts(doing, "at_most", content.get("at_most", {}), least=0)
    check_names("limit in [at_most]", at_most, LIMITS, doing=doing)
    fusions = _counts(doing, "fusions", content.get("fusions", {}))
    return Expectations(source, target, at_most, fusions, _modules(doing, content.get("modules", {})))


def _loaded(path: str, doing: str) -> Mapping[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        hint = "write it by `cann-fusion expect write MODEL -o FILE`"
        raise OptionError(f"{doing}: it cannot be read ({error.strerror or error}); {hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{doing}: it is no TOML ({error}); mend it, or write it anew by cann-fusion") from error


def _modules(doing: str, given: Any) -> Mapping[str, Mapping[str, int]]:
    if not isinstance(given, Mapping):
        raise _wrong(doing, "modules", given, _MODULES)
    for pattern in given:
        if wrong := pattern_error(pattern):
            raise OptionError(f"{doing}: [modules]: {pattern!r} is no path of a module: {wrong}")
    return {pattern: _counts(doing, f"modules.{pattern!r}", each) for pattern, each in given.items()}


def _counts(doing: str, table: str, given: Any, least: int = 1) -> Mapping[str, int]:
    """Check that `given`, the content of `table`, maps names to integers of `least` or more."""
    if not isinstance(given, Mapping):
        raise _wrong(doing, table, given, _COUNTS)
    for name, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise _wrong(doing, f"{table}.{name}", count, "a number")
        if count < least:
            raise OptionError(f"{doing}: {table}.{name} is {count}; give {least} or more, or leave it out")
    return dict(given)


def _wrong(doing: str, key: str, given: object, wanted: str) -> OptionError:
    return OptionError(f"{doing}: {key} is {given!r} of type {type(given).__name__}; give {wanted}")
