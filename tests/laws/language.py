"""Find docstrings and names that do not follow "How we write" of CONTRIBUTING.

python -m tests.laws.language                      # all of them, with their places
python -m tests.laws.language fusion/graph         # those of a folder or file
python -m tests.laws.language --list               # as many as each file has, as language.txt has them
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fusion", "patterns")
LIST = Path(__file__).with_name("language.txt")
VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text().split())
"""First words of the docstring of a function."""
CLAUSES = frozenset({"What", "Whether", "Which", "Why", "How", "Where", "Of", "As", "Both", "Whose", "That", "Those"})
"""First words of a relative clause, which begin no docstring of a module, class or property."""
WORDS = frozenset(
    {
        "told", "said", "odd", "beside", "whole", "held", "kept", "lies", "found", "numbered", "hiding", "granted",
        "unread", "unlike", "together", "spoken", "needless",
    }
)  # fmt: skip
"""Parts of names that have several meanings here, or none in the field."""
FORMULAS = frozenset({"pattern", "alternative", "lookalike", "word"})
"""Decorators of forms and words, whose docstring is a formula."""
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each docstring and name of a file that does not follow the rules."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, _Definition):
            yield from _fault_of_docstring(node)
    for name in sorted({path.stem, *_names(tree)}):
        parts = re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
        words = [each for each in parts if each in WORDS]
        if words or (parts[:1] == ["of"] and len(parts) > 1):
            yield f"1: {name}: {words[0] if words else 'of'!r} in a name"


def _fault_of_docstring(node: _Definition) -> Iterator[str]:
    text = ast.get_docstring(node)
    decorators = _decorators(node)
    if not text or decorators & FORMULAS:
        return
    place = f"{getattr(node, 'lineno', 1)}: {getattr(node, 'name', 'module')}"
    first = text.split()[0].rstrip(",.:;")
    is_action = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "property" not in decorators
    if is_action and first not in VERBS:
        yield f"{place}: {first!r} is no verb: {text.splitlines()[0]}"
    elif first in CLAUSES:
        yield f"{place}: {first!r} begins a clause: {text.splitlines()[0]}"


def _decorators(node: _Definition) -> set[str]:
    called = [each.func if isinstance(each, ast.Call) else each for each in getattr(node, "decorator_list", [])]
    names = {getattr(each, "id", getattr(each, "attr", "")) for each in called}
    return names | {"property"} if "cached_property" in names else names


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            yield from (each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if each)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def files(*paths: str) -> list[Path]:
    """List the modules below `paths`, or of both packages."""
    roots = [ROOT / each for each in paths or PACKAGES]
    return [each for root in roots for each in ([root] if root.is_file() else sorted(root.rglob("*.py")))]


def counts(*paths: str) -> dict[str, int]:
    """Count the faults of each file that has any."""
    named = {str(each.relative_to(ROOT)): sum(1 for _ in faults(each)) for each in files(*paths)}
    return {name: count for name, count in named.items() if count}


def listed() -> dict[str, int]:
    """Read how many faults each file may have at most."""
    rows = (line.split() for line in LIST.read_text().splitlines() if not line.startswith("#"))
    return {name: int(count) for name, count in rows}


def main(*arguments: str) -> None:
    """Print the faults of the given files, or the list of how many each has."""
    if "--list" in arguments:
        print("# Faults of the docstrings and names of each file. This list only gets shorter.")
        print("\n".join(f"{name} {count}" for name, count in counts().items()))
        return
    lines = [f"{each.relative_to(ROOT)}:{line}" for each in files(*arguments) for line in faults(each)]
    print("\n".join(lines))
    print(len(lines), "faults")


if __name__ == "__main__":
    main(*sys.argv[1:])
