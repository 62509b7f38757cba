"""Pages of the reasons: every text that refuses a rewrite, by operator, with code that gets it and code that fuses."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from docs.generate.counterexamples import counterexamples
from docs.generate.markdown import DOMAINS, ROOT, code, link, prose, slug, wrapped
from fusion.records import NOTHING_TO_CHANGE

TITLES = {**DOMAINS, "engine": "Every rule"}
"""Pages -> titles; the last has the reasons that the engine gives, whichever the rule."""
_REFUSES = re.compile(
    r"[:;}] .*(\brequires? |\(nothing to change\)|us slower|as fast as)|cannot be lowered by|does not exist on"
)
_PLACE = re.compile(r"\\\{[^{}]*\\\}")
_OPERATOR = re.compile(r"\b_?(?:npu|atb)_\w+|\bscatter_update_?\b")
_HEAD = """# Reasons

Every sentence by which a rewrite is refused, by the operator that asks for something else. Each has the form
`argument: what was found; operator requires what; what to write`. Names in braces are filled in by your model.

Below a sentence stand, where the tests have them, code that gets it (*refused*), and code without the obstacle that is
fused (*fused*). Functions that the code calls are in the file that is named. Of {all} sentences {both} have both, {one}
the first alone, and {none} none, which they say. For a place of your own model, `report.why(place)` tries changes, and
names one that it has proven by making it.

To find a sentence of a report, search this site for the words before the semicolon.
"""
_FINAL = "No change of the model makes the fusion."
_UNPROVEN = "No change of this code is proven to fuse by the tests; the sentence says what the operator requires."
_UNSEEN = "No example has this sentence."


@dataclass(frozen=True)
class Reason:
    """One text that refuses.

    Attributes:
        text: the text, with what is found out at run time in braces.
        path: the file that has it.
        line: its line in that file.
    """

    text: str
    path: str
    line: int

    @property
    def page(self) -> str:
        """The page that lists it: the domain of its file."""
        folder = Path(self.path).parts
        return folder[1] if folder[0] == "patterns" and folder[1] in DOMAINS else "engine"

    @cached_property
    def shown(self) -> list[str]:
        """Code that gets it, and code that does not, as far as the tests have them."""
        return counterexamples(self.matches, self.page, self.path, f"reasons/{self.page}.md")

    @property
    def note(self) -> str:
        """Remark on code that is missing; "" where none is."""
        if len(self.shown) > 1:
            return ""
        if NOTHING_TO_CHANGE in self.text:
            return _FINAL
        return _UNPROVEN if self.shown else _UNSEEN

    @property
    def operator(self) -> str:
        """The operator that it names, or "" if it names none."""
        asking = self.text.partition(" requires ")[0].rpartition("; ")[2]
        found = _OPERATOR.search(asking) or _OPERATOR.search(self.text)
        return found[0] if found else ""

    def matches(self, reason: str) -> bool:
        """Return True if `reason`, as a report has it, is made of the text."""
        return self._longest in reason and self._pattern.fullmatch(reason) is not None

    @cached_property
    def _longest(self) -> str:
        """Longest part of the text that no model changes: most sentences lack it, so that no pattern is tried."""
        return max(re.split(r"\{[^{}]*\}", self.text), key=len)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_PLACE.sub(".*?", re.escape(self.text)) + ".*")


def index() -> str:
    """Return docs/reasons/index.md: the operators that each page has."""
    found = reasons()
    counts = Counter(len(each.shown) for each in found)
    lines = [_HEAD.format(all=len(found), both=counts[2], one=counts[1], none=counts[0])]
    for page, title in TITLES.items():
        names = sorted({each.operator for each in found if each.page == page and each.operator})
        count = sum(each.page == page for each in found)
        named = ", ".join(f"[{code(name)}]({page}.md#{slug(name.strip('_'))})" for name in names)
        lines.append(f"\n## {title}\n\n[{count} reasons]({page}.md){': ' if named else ''}{named}\n")
    return "".join(lines)


def pages() -> dict[str, str]:
    """Return the page of each domain, by its path below docs/."""
    return {f"reasons/{page}.md": _page(page, title) for page, title in TITLES.items()}


def _page(page: str, title: str) -> str:
    by_operator: dict[str, list[Reason]] = {}
    for each in reasons():
        if each.page == page:
            by_operator.setdefault(each.operator, []).append(each)
    parts = [f"# {title}: reasons\n\n[How to read them](index.md).\n"]
    for operator in sorted(by_operator, key=lambda name: (not name, name)):
        parts.append(f"\n## {operator.strip('_') or 'Several operators'}\n")
        parts += [_entry(each, f"reasons/{page}.md") for each in by_operator[operator]]
    return "\n".join(parts)


def _entry(reason: Reason, here: str) -> str:
    """Return a reason, the file that gives it, and code that gets it."""
    where = link(f"{Path(reason.path).name}, line {reason.line}", reason.path, here)
    found, _, wanted = reason.text.partition("; ")
    lines = [f"#### {prose(found)}", *([wrapped(prose(wanted) + ".")] if wanted else []), f"Given by {where}."]
    return "\n\n".join(filter(None, [*lines, *reason.shown, reason.note])) + "\n"


@cache
def reasons() -> tuple[Reason, ...]:
    """Return every text that refuses, in the order of the files; a text that stands twice is listed once."""
    found: dict[str, Reason] = {}
    for package in ("patterns", "fusion"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for line, text in _texts(ast.parse(path.read_text())):
                found.setdefault(text, Reason(text, name, line))
    return tuple(found.values())


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module that say what an operator requires, and what lookalikes are refused for."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped, constants = parts | docstrings, dict(_constants(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped:
            text = _template(node, constants)
            if _REFUSES.search(text):
                yield node.lineno, text


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of a module that stand for texts, with the texts."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(value=str(text))):
                yield name, text
            case _:
                pass


def _template(node: ast.Constant | ast.JoinedStr, constants: Mapping[str, str]) -> str:
    """Return the text of a literal: names in `constants` as their texts, what is computed in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_part(part, constants) for part in node.values)


def _part(part: ast.expr, constants: Mapping[str, str]) -> str:
    match part:
        case ast.Constant(value=text):
            return str(text)
        case ast.FormattedValue(ast.Name(name)) if name in constants:
            return constants[name]
        case _:
            return f"{{{_last_name(part)}}}"


def _last_name(part: ast.expr) -> str:
    """Return the last name in a replaced part of a text: what it stands for."""
    return re.findall(r"[a-z_]+", ast.unparse(part).lower())[-1]
