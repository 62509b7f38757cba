"""The documentation is true: its code runs, its generated parts are current, its links lead somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("README.md", 4),
        pytest.param("docs/generate.md", 3, marks=pytest.mark.rotates),
        pytest.param("docs/guests.md", 2, marks=pytest.mark.rotates),
        pytest.param("docs/expect.md", 2, marks=pytest.mark.rotates),
    ],
)
def test_the_code_of_a_page_runs(page: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= least
    name = f"blocks_of_{Path(page).stem.lower()}"  # a module: Dynamo reads the source of what it compiles
    (tmp_path / f"{name}.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    torch._dynamo.reset()
    importlib.import_module(name)


def test_generated_parts_are_current():
    for path, text in build().generated().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date: run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", ["first_fusion", pytest.param("decorator", marks=pytest.mark.rotates)])
def test_examples_run(name: str):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
