"""Writing of the page: the template, filled with entries, source, modules and drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.report.document import Document, Memory, Module, Scope
from fusion.report.page.drawing import HEIGHT, Drawing, drawn
from fusion.report.page.entries import ANALYSIS, MISSED, PASSED, STAYS, by_call, by_line, entries, ids_of
from fusion.report.page.source import Block, files
from fusion.report.text import microseconds, place, size

_MARKS = (MISSED, PASSED, STAYS, ANALYSIS)  # the first of its entries marks a line


@dataclass(frozen=True)
class _Shown:
    """One of several equal layers, or the code outside: identifiers of its entries, drawings before and after."""

    name: str
    ids: frozenset[str]
    before: Drawing
    after: Drawing


@dataclass(frozen=True)
class _Row:
    """A module in the tree: its depth, identifiers of entries about it with and without its submodules."""

    module: Module
    label: str
    ids: tuple[str, ...]
    own: tuple[str, ...]


def to_html(document: Document) -> str:
    """Write `document` as one HTML page, which needs no other file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fusion.report.page", "")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"us": microseconds, "size": size}
    return environment.get_template("page.html").render(_content(document))


def _content(document: Document) -> Mapping[str, Any]:
    """Return the variables of the template."""
    listed = entries(document)
    known = by_call(listed)
    scopes = [_shown(each, known) for each in document.scopes]
    return {
        "document": document,
        "groups": [(title, kind, [each for each in listed if each.kind == kind]) for title, kind in _TITLES],
        "rules": sorted({each.rule for each in listed if each.rule}),
        "scopes": scopes,
        "first": max(range(len(scopes)), key=lambda each: document.scopes[each].times, default=0),
        "scopes_of": {
            each.id: [number for number, scope in enumerate(scopes) if each.id in scope.ids] for each in listed
        },
        "rows": _nested(_rows(document, known)),
        "files": files(line for each in listed for line in each.lines),
        "remarks": by_line(listed),
        "marks": _MARKS,
        "with_numbers": with_numbers,
        "ids_of": lambda call: ids_of(call, known),
        "kind_of": {each.id: each.kind for each in listed},
        "share": share,
        "height": HEIGHT,
    }


_TITLES = (("To change", MISSED), ("Fused", PASSED), ("Stays", STAYS), ("Also", ANALYSIS))


def with_numbers(block: Block) -> list[tuple[int, str]]:
    """List the lines of `block` with their numbers in the file."""
    return list(enumerate(block.lines, block.first))


def share(memory: Memory) -> str:
    """Format the additional bytes of prepared weights in per cent of the Parameters."""
    return f"{100 * memory.bytes / memory.parameter_bytes:.2f} %" if memory.parameter_bytes else "-"


def _shown(scope: Scope, known: Mapping[str, Sequence[str]]) -> _Shown:
    ids = frozenset(each for call in (*scope.before, *scope.after) for each in ids_of(call, known))
    name = place(scope.path, scope.times) if scope.path else "outside of layers"
    return _Shown(name, ids, drawn(scope.before), drawn(scope.after))


def _rows(document: Document, known: Mapping[str, Sequence[str]]) -> list[_Row]:
    """List the modules with the entries about their calls, as far as these are drawn."""
    ids: dict[str, dict[str, None]] = {}
    for scope in document.scopes:
        for call in (*scope.before, *scope.after):
            ids.setdefault(call.module, {}).update(dict.fromkeys(ids_of(call, known)))
    return [_row(module, ids) for module in document.modules]


def _row(module: Module, ids: Mapping[str, Mapping[str, None]]) -> _Row:
    inner = dict.fromkeys(each for path in sorted(module.modules) for each in ids.get(path, ()))
    shortest = min(map(len, module.modules))
    own = dict.fromkeys(each for path in module.modules if len(path) == shortest for each in ids.get(path, ()))
    return _Row(module, module.name or "outside of modules", tuple(inner), tuple(own))


@dataclass(frozen=True)
class _Tree:
    """A module with its submodules."""

    row: _Row
    inner: tuple[_Tree, ...]


def _nested(rows: Sequence[_Row], depth: int = 0) -> tuple[_Tree, ...]:
    """Group `rows`, each of which comes before its submodules."""
    groups: list[list[_Row]] = []
    for row in rows:
        if row.module.depth == depth:
            groups.append([])
        groups[-1].append(row)
    return tuple(_Tree(group[0], _nested(group[1:], depth + 1)) for group in groups)
