"""Lines of the model's code: the variable that a statement assigns, and the lines that a fused call replaces."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch.fx as fx

from fusion.graph.origin import frames
from fusion.records import Candidate
from fusion.report.folding import ranges
from fusion.report.statements import statement_at


@dataclass(frozen=True)
class Statement:
    """One statement of the model: `file`, first line, and the names that it assigns to."""

    file: str
    line: int
    names: tuple[str, ...] = ()


def statement_of(node: fx.Node, kind: Any) -> Statement | None:
    """Return the statement of `node` in the forward of the module class or function `kind`.

    The statement in the innermost function if no frame of `node` is in that forward; None if it has no frames.
    """
    stack = frames(node)
    if not stack:
        return None
    span = _span(kind)
    inside = [each for each in stack if span and each["file"] == span[0] and span[1] <= int(each["line"]) <= span[2]]
    frame = inside[-1] if inside else stack[-1]
    return _statement(frame["file"], int(frame["line"]))


def statements_of(node: fx.Node, kind: Any) -> list[Statement]:
    """List the statements around `node`, outermost first: that of `statement_of`, and those of functions called by it.

    Several calls of one statement are told apart by the lines of the functions that make them.
    """
    outermost = statement_of(node, kind)
    stack = [_statement(each["file"], int(each["line"])) for each in frames(node)]
    return stack[max(at for at, each in enumerate(stack) if each == outermost) :] if stack else []


def is_part(node: fx.Node, statement: Statement) -> bool:
    """Return True if `node` is computed inside `statement`, or inside a function that `statement` calls."""
    return any(_statement(each["file"], int(each["line"])) == statement for each in frames(node))


def lines_in(node: fx.Node, kind: Any) -> tuple[int, ...]:
    """Return the first line of the statement of `node` in the forward of `kind`, and those in functions called there.

    The first is 0 for calls made elsewhere; all their lines follow.
    """
    span, around = _span(kind), statements_of(node, kind)
    is_inside = span is not None and bool(around) and around[0].file == span[0] and span[1] <= around[0].line <= span[2]
    return tuple(each.line for each in around) if is_inside else (0, *(int(each["line"]) for each in frames(node)))


@cache
def _span(kind: Any) -> tuple[str, int, int] | None:
    """Return file, first and last line of the forward of a module class; None where it has no source."""
    forward = inspect.unwrap(getattr(kind, "forward", kind))
    try:
        lines, first = inspect.getsourcelines(forward)
        return str(inspect.getsourcefile(forward)), first, first + len(lines) - 1
    except (OSError, TypeError):
        return None


@cache
def _statement(file: str, line: int) -> Statement:
    inner = statement_at("".join(linecache.getlines(file)), line)
    if inner is None or hasattr(inner, "body"):
        return Statement(file, line)
    targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
    return Statement(file, inner.lineno, _names(targets[-1]))


def _names(target: ast.expr | None) -> tuple[str, ...]:
    """List the variables that an assignment target names: one, or those of a tuple; () for anything else."""
    if isinstance(target, ast.Name):
        return (target.id,)
    if isinstance(target, (ast.Tuple, ast.List)) and all(isinstance(each, ast.Name) for each in target.elts):
        return tuple(each.id for each in target.elts if isinstance(each, ast.Name))
    return ()


class Replaced:
    """The lines of the model that fused calls replace, by the rewrite that made each call."""

    def __init__(self, chosen: Iterable[Candidate]) -> None:
        self._nodes = {each.match.node.name: dict.fromkeys([*each.dying, *each.match.makers]) for each in chosen}
        self.files: set[str] = set()

    def lines(self, node: fx.Node, kind: Any) -> list[str]:
        """List the lines that the call `node` replaces, as "file:line  text", in the order of the code.

        Lines of the forward of the module class `kind` have their text; code that these call has its places alone.
        """
        made = node.meta.get("fusion")
        nodes = self._nodes.get(made.get("root"), ()) if made else ()
        called: dict[str, set[int]] = {}
        shown: dict[tuple[str, int], None] = {}
        for each in nodes:
            statement = statement_of(each, kind)
            if statement is None:
                continue
            inner = frames(each)[-1]
            shown[statement.file, statement.line] = None
            if (inner["file"], _statement(inner["file"], int(inner["line"])).line) != (statement.file, statement.line):
                called.setdefault(inner["file"], set()).add(int(inner["line"]))
        self.files.update([*called, *(file for file, _ in shown)])
        home = _span(kind)
        own = [place for place in shown if home is not None and place[0] == home[0]]
        for file, line in shown if own else ():
            if (file, line) not in own:
                called.setdefault(file, set()).add(line)
        places_shown = sorted(own or shown)
        texts = [f"{Path(file).name}:{line}  {linecache.getline(file, line).strip()}" for file, line in places_shown]
        if len(texts) > _MOST:
            texts = [*texts[: _MOST - 1], f"... and {len(texts) - _MOST + 1} more lines, to line {places_shown[-1][1]}"]
        places = [f"{Path(file).name}:{_listed(lines)}" for file, lines in sorted(called.items())]
        return [_shortened(each) for each in texts] + ([_shortened(f"  by {'; '.join(places)}")] if places else [])


def _listed(lines: Iterable[int]) -> str:
    """Format numbers of lines, consecutive ones as a range: "60-63, 81"."""
    return ranges(lines).replace(",", ", ")


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 4] + " ..."


_MOST = 6
"""Lines of a comment."""
_WIDTH = 88
"""Characters of a comment, so that it fits into an indented line."""
