"""Patterns import the names that `fusion` publishes, the graph and its analysis; a user, nothing that is not needed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fusion

from ..support.child import child

ROOT = Path(__file__).parents[2]
OPEN = ("fusion.graph", "fusion.analysis", "fusion.facts", "fusion.inputs.nz_format")
HEAVY = ("rich", "typer", "networkx", "jinja2", "transformers", "hypothesis", "torch._inductor", "tests.examples")
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


@pytest.mark.rotates(8)
def test_importing_and_loading_the_library_loads_nothing_heavy():
    """Dynamo and torch.export, which `import torch` may bring itself, are not counted if it does."""
    source = """
        import sys, torch
        before = set(sys.modules)
        import fusion
        from fusion.frontend.library import installed
        installed()
        print(*sorted(set(sys.modules) - before))
    """
    loaded = child(source).stdout.split()
    assert "patterns.norm.rms_norm" in loaded
    assert [each for each in loaded if each.startswith((*HEAVY, "torch._dynamo", "torch.export"))] == []
