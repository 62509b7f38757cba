"""Patterns import the names that `fusion` publishes, never its modules: the import contracts cannot tell them apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fusion

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "patterns").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_patterns_use_public_names(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(each.name.startswith("fusion.") for each in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fusion":
            assert node.module == "fusion"
            assert {each.name for each in node.names} <= set(fusion.__all__)
