"""Docstrings and names follow "How we write" of CONTRIBUTING; the list of what does not yet only gets shorter."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fusion.analysis
from tests.laws.language import PACKAGES, ROOT, counts, faults, listed


def test_no_file_has_more_faults_than_are_listed():
    now, most = counts(), listed()
    more = {name: f"{count}, of {most.get(name, 0)} listed" for name, count in now.items() if count > most.get(name, 0)}
    fewer = {name: f"{now.get(name, 0)}, of {count} listed" for name, count in most.items() if now.get(name, 0) < count}
    assert not more, "python -m tests.laws.language FILE names the faults"
    assert not fewer, "python -m tests.laws.language --list > tests/laws/language.txt"


def test_the_list_of_analyses_names_every_module():
    lines = [line[4:] for line in (fusion.analysis.__doc__ or "").splitlines() if line.startswith("    ")]
    named = [name for line in lines for name in line.partition("  ")[0].split(", ")]
    modules = {path.stem for path in Path(fusion.analysis.__file__).parent.glob("*.py")} - {"__init__"}
    assert sorted(named) == sorted(modules)


def test_tests_import_public_names_alone():
    private: list[str] = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
                private += [f"{path.name}: {each.name}" for each in node.names if each.name.startswith("_")]
    assert [each for each in private if not each.endswith(": _torch")] == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('def f(x):\n    """Whether x is one."""', "'Whether' is no verb"),
        ('def f(x):\n    """The rows of x."""', "'The' is no verb"),
        ('def f(x):\n    """Return the rows of `x`."""', ""),
        ('def f(x):\n    """Return True if `x` is one."""', ""),
        ('def f(x):\n    """True if `x` is one."""', "'True' is no verb"),
        ('class C:\n    """What is in a row."""', "'What' begins a clause"),
        ('class C:\n    """A row."""', ""),
        ("def told(x): ...", "'told' in a name"),
        ("def of_rows(x): ...", "'of' in a name"),
        ("def f(x, *, is_whole=1): ...", "'whole' in a name"),
        ("class HeldScales: ...", "'held' in a name"),
    ],
)
def test_faults(source: str, fault: str, tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text(source)
    lines = list(faults(file))
    assert [fault in line for line in lines] == ([True] if fault else [])
