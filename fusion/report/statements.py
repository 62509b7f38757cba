"""Statements of source text."""

from __future__ import annotations

import ast
from functools import lru_cache


def statement_at(text: str, line: int) -> ast.stmt | None:
    """Return the innermost statement of the source `text` at `line`; None where there is none, or no Python."""
    there = [each for each in _statements(text) if each.lineno <= line <= (each.end_lineno or each.lineno)]
    return min(there, key=lambda each: ((each.end_lineno or 0) - each.lineno, -each.col_offset), default=None)


@lru_cache(maxsize=16)
def _statements(text: str) -> list[ast.stmt]:
    """List all statements of the source `text`; none where it is no Python."""
    try:
        return [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.stmt)]
    except SyntaxError:
        return []
