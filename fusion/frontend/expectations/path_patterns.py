"""Patterns of module paths: `layers.*.attn` for all layers, `layers.0-2,5.attn` for some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TypeVar

from fusion.report.folding import ranges

Segment = str | frozenset[int]
_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
Value = TypeVar("Value")


def pattern_error(pattern: object) -> str:
    """Return the reason why `pattern` is no pattern of module paths, "" if it is one."""
    if not isinstance(pattern, str) or not pattern:
        return "give names with dots between them, such as 'layers.*.attn'"
    empty = not all(pattern.split("."))
    return "a name between its dots is missing; give one such as 'layers.*.attn'" if empty else ""


def matches(pattern: str, path: str) -> bool:
    """Return True if a module `path` is one of `pattern`: `*` is any name, `0-2,5` one of these numbers."""
    wanted, given = pattern.split("."), path.split(".")
    return len(wanted) == len(given) and all(map(_is_one_of, wanted, given))


def _is_one_of(wanted: str, given: str) -> bool:
    if wanted in ("*", given):
        return True
    return given.isdigit() and bool(_NUMBERS.fullmatch(wanted)) and int(given) in _numbers(wanted)


def _numbers(text: str) -> frozenset[int]:
    """Parse "0-2,5" to {0, 1, 2, 5}."""
    ends = (part.partition("-") for part in text.split(","))
    return frozenset(each for first, _, last in ends for each in range(int(first), int(last or first) + 1))


def is_within(path: str, module: str) -> bool:
    """Return True if `path` is `module`, or a module inside it; every path is within ""."""
    return not module or path == module or path.startswith(f"{module}.")


def with_parents(paths: Iterable[str]) -> frozenset[str]:
    """Add to module `paths` the modules that hold them; without "", the model itself."""
    return frozenset(each for path in paths if path for each in accumulate(path.split("."), "{}.{}".format))


def layer_part(path: str) -> str:
    """Shorten a module path to the part of a layer: the name behind its first number, as in `layers.0.attn`."""
    names = path.split(".")
    first = next((place for place, name in enumerate(names) if name.isdigit()), len(names))
    return ".".join(names[: first + 2])


def folded(values: Mapping[str, Value], known: Iterable[str]) -> list[tuple[str, Value]]:
    """Join module paths that differ in numbers alone and have equal values, to patterns; sorted by pattern.

    A number becomes `*` if the paths have all that the `known` paths have in its place.
    """
    rows = [(_segments(path), value) for path, value in values.items()]
    for place in range(max((len(path) for path, _ in rows), default=0)):
        rows = _joined(rows, place)
    universe = [path.split(".") for path in known]
    return sorted(((_pattern(path, universe), value) for path, value in rows), key=lambda row: _order(row[0]))


def _segments(path: str) -> tuple[Segment, ...]:
    return tuple(frozenset({int(name)}) if name.isdigit() else name for name in path.split("."))


def _joined(rows: list[tuple[tuple[Segment, ...], Value]], place: int) -> list[tuple[tuple[Segment, ...], Value]]:
    """Unite the numbers at one `place` of rows that agree in everything else."""
    groups: list[tuple[tuple[Segment, ...], Value]] = []
    for path, value in rows:
        alike = (
            number
            for number, (other, same) in enumerate(groups)
            if same == value and _differ_in_numbers(path, other, place)
        )
        if (number := next(alike, None)) is None:
            groups.append((path, value))
        else:
            groups[number] = _united(path, groups[number][0], place), value
    return groups


def _differ_in_numbers(path: tuple[Segment, ...], other: tuple[Segment, ...], place: int) -> bool:
    if len(path) != len(other) or place >= len(path):
        return False
    are_numbers = isinstance(path[place], frozenset) and isinstance(other[place], frozenset)
    return are_numbers and path[:place] == other[:place] and path[place + 1 :] == other[place + 1 :]


def _united(path: tuple[Segment, ...], other: tuple[Segment, ...], place: int) -> tuple[Segment, ...]:
    one, more = path[place], other[place]
    assert isinstance(one, frozenset)
    assert isinstance(more, frozenset)
    return *path[:place], one | more, *path[place + 1 :]


def _pattern(path: tuple[Segment, ...], universe: Iterable[list[str]]) -> str:
    shape = [each if isinstance(each, str) else None for each in path]
    alike = [
        names
        for names in universe
        if len(names) == len(shape)
        and all(name.isdigit() if wanted is None else name == wanted for wanted, name in zip(shape, names, strict=True))
    ]
    return ".".join(
        each if isinstance(each, str) else _text(each, frozenset(int(names[place]) for names in alike))
        for place, each in enumerate(path)
    )


def _text(numbers: frozenset[int], known: frozenset[int]) -> str:
    """Format `numbers` as "0-2,5", or as "*" if they are several and all that are `known`."""
    if len(numbers) > 1 and numbers >= known:
        return "*"
    return ranges(numbers)


def _order(pattern: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers by size, and patterns behind them."""
    names = pattern.split(".")
    return [(int(first), name) if (first := re.split("[-,]", name)[0]).isdigit() else (-1, name) for name in names]
