"""Source of a model for the page: the functions whose lines a report names, with highlighted syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusion.report.trace import Line


@dataclass(frozen=True)
class Block:
    """Consecutive lines of a file: name of the function, number of the first line, and HTML of each."""

    name: str
    first: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class File:
    """A source file: its shortened path, and the blocks to show."""

    name: str
    blocks: tuple[Block, ...]


def files(lines: Iterable[Line]) -> list[File]:
    """Collect the functions around `lines`, by file; lines alone where a file has changed."""
    by_file: dict[str, dict[int, Line]] = {}
    for line in sorted(lines, key=lambda each: bool(each.text)):
        by_file.setdefault(line.file, {})[line.number] = line
    ordered = sorted(by_file.items(), key=lambda each: -len(each[1]))
    return [File(name, tuple(_blocks(known))) for name, known in ordered]


def _blocks(known: Mapping[int, Line]) -> Iterable[Block]:
    """Yield a block for each function that has one of the `known` lines of a file."""
    text = _text(next(iter(known.values())).path).split("\n")
    is_same = all(number <= len(text) and line.text in ("", text[number - 1].strip()) for number, line in known.items())
    spans = _functions("\n".join(text)) if is_same else {}
    blocks = {spans.get(number, ("", number, number)): None for number in sorted(known)}
    for name, first, last in sorted(blocks, key=lambda each: each[1]):
        shown = text[first - 1 : last] if is_same else [known[first].text]
        yield Block(name, first, tuple(_highlighted(shown)))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _functions(text: str) -> dict[int, tuple[str, int, int]]:
    """Map each line of a module to the outermost function around it: its name, first and last line."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    spans: dict[int, tuple[str, int, int]] = {}

    def visit(node: ast.AST, around: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef):
                visit(each, f"{around}{each.name}.")
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([each.lineno, *(mark.lineno for mark in each.decorator_list)])
                last = each.end_lineno or each.lineno
                spans.update(dict.fromkeys(range(first, last + 1), (f"{around}{each.name}", first, last)))
            else:
                visit(each, around)

    visit(tree, "")
    return spans


def _highlighted(lines: Iterable[str]) -> list[str]:
    """Convert lines of Python to HTML, one string for each."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    text = "\n".join(lines)
    shown: str = highlight(
        text, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True, classprefix="t-")
    )
    return shown.split("\n")[: text.count("\n") + 1]
