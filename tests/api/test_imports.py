"""Patterns import the names that `fusion` publishes, the graph and its analysis: no other module of the engine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fusion

ROOT = Path(__file__).parents[2]
OPEN = ("fusion.graph", "fusion.analysis", "fusion.facts")
FILES = sorted((ROOT / "patterns").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_patterns_use_public_names(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(each.name.startswith("fusion.") for each in node.names)
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "fusion":
            continue
        assert node.module
        if node.module == "fusion":
            assert {each.name for each in node.names} <= set(fusion.__all__)
        else:
            assert node.module.startswith(OPEN)
            assert not any(each.name.startswith("_") for each in node.names)
