"""Code that gets a reason, and code without the obstacle: from the rejects, cures and look-alikes of the tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import getfile, getsource, isfunction
from pathlib import Path
from pkgutil import iter_modules
from textwrap import dedent

from docs.generate.markdown import DOMAINS, ROOT, link
from fusion import Example
from tests import examples
from tests.goldens.outcome import FOLDER, kept
from tests.laws.cures import CURES
from tests.support.tried import declared

_REFUSED = re.compile(r"^  refused: \w+: (.*?)(?: x\d+)?$", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """One example of a rule that must be refused, with the reason that it gets.

    Attributes:
        rule: the rule.
        refused: the name of the example.
        reasons: the sentences of the report that the example is made for.
        cure: the name of the example without the obstacle.
    """

    rule: str
    refused: str
    reasons: tuple[str, ...]
    cure: str


def counterexamples(matches: Callable[[str], bool], domain: str, path: str, here: str) -> list[str]:
    """Return code that gets a reason, and code that does not, for the page docs/`here`.

    Args:
        matches: True for a sentence of a report that is the reason.
        domain: the folder of tests with look-alikes.
        path: the file that gives the reason; a trial of its own rule is shown rather than another one.
        here: the page.
    """
    found = (each for each in trials() if any(map(matches, each.reasons)))
    trial = min(found, key=lambda each: each.rule not in path, default=None)
    if trial is None:
        return _spelled(matches, domain, here) or _seen(matches, path, here)
    pair = ("refused", trial.refused), ("fused", trial.cure)
    return [_shown(verdict, trial.rule, name, here) for verdict, name in pair]


def _spelled(matches: Callable[[str], bool], domain: str, here: str) -> list[str]:
    """Return the code of the first look-alike that gets a reason, of `domain` where there is one."""
    found = [name for name, texts in _lookalikes() if any(map(matches, texts))]
    for folder in (domain, *DOMAINS):
        for name, path, shown in ((key, *each) for key in found for each in _definitions(folder).get(key, ())):
            where = link(Path(path).name, path, here)
            return [f"*refused*: `{name}`, in {where}\n\n```python\n{shown}\n```"]
    return []


def _seen(matches: Callable[[str], bool], path: str, here: str) -> list[str]:
    """Return the code of an example that gets a reason beside others, of the rule of file `path` where there is one."""
    found = [(rule, name) for rule, name, texts in _recorded() if any(map(matches, texts)) and _code(rule, name)]
    chosen = min(found, key=lambda each: each[0] not in path, default=None)
    return [_shown("refused", *chosen, here)] if chosen is not None else []


@cache
def _recorded() -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return rule and name of each example with the reasons that are recorded of it."""
    names = {(rule, each.name) for rule, several in declared().items() for each in several}
    recorded = (
        (path.stem.removeprefix("example_"), name.removesuffix(" (to be refused)"), tuple(_REFUSED.findall(text)))
        for path in sorted(FOLDER.glob("example_*.txt"))
        for name, text in kept(path.stem).items()
    )
    return tuple(each for each in recorded if each[:2] in names)


def _shown(verdict: str, rule: str, name: str, here: str) -> str:
    """Return the code of an example of `rule`, with its name and file."""
    found = _code(rule, name)
    if found is None:
        return f"*{verdict}*: “{name}” of `{rule}`"
    path, text = found
    return f"*{verdict}*: “{name}” of `{rule}`, in {link(Path(path).name, path, here)}\n\n```python\n{text}\n```"


@cache
def trials() -> tuple[Trial, ...]:
    """Return the examples that must be refused, with those recorded reasons that they are made for."""
    return tuple(
        Trial(
            rule,
            refused,
            tuple(each for each in _REFUSED.findall(text) if _example(rule, refused).refusal in each),
            cure,
        )
        for rule, cures in CURES.items()
        for refused, cure in cures.items()
        if (text := kept(f"example_{rule}").get(f"{refused} (to be refused)", ""))
    )


def _example(rule: str, name: str) -> Example:
    return next(each for each in declared()[rule] if each.name == name)


@cache
def _code(rule: str, name: str) -> tuple[str, str] | None:
    """Return the file and the code of an example: of one that a function of the tests makes, that of what it calls.

    None if it has no code of its own.
    """
    example = _example(rule, name)
    for path in _files_by_rule()[rule]:
        text, functions = _functions(path)
        for node in functions.get(name, ()):
            if _defines(node, example.function):
                named = isinstance(node, ast.Name)
                shown = getsource(example.function) if named else ast.get_source_segment(text, node) or ""
                return path.relative_to(ROOT).as_posix(), dedent(shown).strip()
    called = getattr(example.function, "func", example.function)  # of a partial
    if not isfunction(called) or called.__name__ == "<lambda>":
        return None
    return Path(getfile(called)).relative_to(ROOT).as_posix(), dedent(getsource(called)).strip()


@cache
def _functions(path: Path) -> tuple[str, dict[str, list[ast.expr]]]:
    """Return the text of a file, and the expressions of the functions of its examples by their names."""
    text = path.read_text()
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name("Example"), args=[ast.Constant(value=str(name)), function, *_]):
                found.setdefault(name, []).append(function)
            case _:
                pass
    return text, found


def _defines(node: ast.expr, function: Callable[..., object]) -> bool:
    """Return True if `node` may be the expression that `function` is the value of."""
    match node:
        case ast.Lambda(lineno=line):
            return getattr(getattr(function, "__code__", None), "co_firstlineno", 0) == line
        case ast.Name(name):
            return getattr(function, "__name__", "") == name
        case _:
            return True


@cache
def _files_by_rule() -> dict[str, list[Path]]:
    """Return the files of tests/examples that try each rule."""
    found: dict[str, list[Path]] = {}
    for each in iter_modules(examples.__path__, f"{examples.__name__}."):
        module = import_module(each.name)
        for rule in getattr(module, "TRIED", {}):
            found.setdefault(rule, []).append(Path(module.__file__ or ""))
    return found


@cache
def _lookalikes() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the functions of the corpus with the reasons that are recorded of them."""
    recorded = (entry for path in sorted(FOLDER.glob("corpus_*.txt")) for entry in kept(path.stem).items())
    return tuple((name.rpartition("/")[2].partition(" ")[0], tuple(_REFUSED.findall(text))) for name, text in recorded)


@cache
def _definitions(domain: str) -> dict[str, list[tuple[str, str]]]:
    """Return the functions that the tests of a domain define: name -> file and code."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tests" / domain).glob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found.setdefault(node.name, []).append((path.relative_to(ROOT).as_posix(), code))
    return found
