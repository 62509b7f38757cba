"""Guards in source code: where they stand, and the same code with a probe around each of them.

    require(a and b, "why not")     a must hold, b must hold           probe.every(7, lambda: a, lambda: b)
    must(a and b)                   a must hold, b must hold           probe.every(8, lambda: a, lambda: b)
    if a or b: return None          a must not hold, b must not hold   probe.some(9, lambda: a, lambda: b)

One mutant drops one of these steps: what must hold is taken for true, what must not hold for false.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.changed import DOMAINS

ROOT = Path(__file__).parents[2]
PLACES = (
    *(f"patterns/{each}" for each in DOMAINS),
    "fusion/analysis",
    "fusion/stages",
    "fusion/graph",
    "fusion/caching/graph_cache.py",
    "fusion/caching/text_cache.py",
    "fusion/inputs/assumptions.py",
    "fusion/graph/aliasing.py",
    "fusion/operators/attention/visibility.py",
)
"""Folders and files whose guards are dropped, one at a time."""
PROBE = "__probe__"


@dataclass(frozen=True)
class Site:
    """One step of a guard; the name stays when other lines of the file change."""

    name: str
    line: int


def files() -> Iterator[Path]:
    """The files of `PLACES`."""
    for place in PLACES:
        path = ROOT / place
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def instrumented(source: str, file: str) -> tuple[ast.Module, list[Site]]:
    """The module `source` with probes, and its sites in the order of their numbers."""
    writer = _Probes(file)
    tree = writer.visit(ast.parse(source))
    return ast.fix_missing_locations(tree), writer.sites


class _Probes(ast.NodeTransformer):
    """Wraps the conditions of guards: `require`, `must`, refusing and proving branches, filters, results of proofs."""

    def __init__(self, file: str) -> None:
        self.file, self.sites = file, list[Site]()
        self._scopes, self._results = list[str](), list[str]()
        self._seen = Counter[str]()

    def _scope(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        returns = getattr(node, "returns", None)
        self._scopes.append(node.name)
        self._results.append(ast.unparse(returns) if returns else "")
        found = self.generic_visit(node)
        self._scopes.pop()
        self._results.pop()
        return found

    visit_ClassDef = visit_FunctionDef = _scope

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("require", "must"):
            node.args[0] = self._probed(node.args[0], must=True)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if not self._allows(node.body[-1]):
            node.test = self._probed(node.test, must=not (self._refuses(node.body[-1]) or _is_either(node.test)))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if _is_nothing(node.body) != _is_nothing(node.orelse):
            node.test = self._probed(node.test, must=_is_nothing(node.orelse))
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self._results[-1] == "bool" and node.value and not isinstance(node.value, (ast.Constant, ast.IfExp)):
            node.value = self._probed(node.value, must=True)
        return self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        if node.guard:
            node.guard = self._probed(node.guard, must=True)
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        node.ifs = [self._probed(each, must=True) for each in node.ifs]
        return self.generic_visit(node)

    def _refuses(self, last: ast.stmt) -> bool:
        """Whether a branch that ends so gives up: nothing, no, or a reason."""
        if isinstance(last, ast.Return):
            says_why = "str" in self._results[-1].split(" | ") and _is_text(last.value)
            return says_why or _is_nothing(last.value)
        return isinstance(last, (ast.Continue, ast.Raise))

    def _allows(self, last: ast.stmt) -> bool:
        """Whether a branch that ends so says that there is no reason to refuse."""
        nothing = isinstance(last, ast.Return) and (last.value is None or _is_none(last.value))
        return nothing and self._results[-1] == "str | None"

    def _probed(self, test: ast.expr, must: bool) -> ast.expr:
        if not self._scopes:
            return test
        joint = ast.And if must else ast.Or
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, joint) else [test]
        bound = any(isinstance(each, ast.NamedExpr) or _is_super(each) for each in ast.walk(test))
        parts = [test] if bound else parts
        place = ast.Tuple([ast.Constant(self.file), ast.Constant(len(self.sites))], ast.Load())
        self.sites.extend(self._site(each) for each in parts)
        asks = ast.Attribute(ast.Name(PROBE, ast.Load()), "every" if must else "some", ast.Load())
        if not bound:
            return ast.Call(asks, [place, *map(_delayed, parts)], [])
        # A name that is bound in a lambda would stay in it, so this condition is computed outside.
        given = ast.Name("given", ast.Load())
        return ast.Call(_delayed(ast.Call(asks, [place, _delayed(given)], []), "given"), [test], [])

    def _site(self, step: ast.expr) -> Site:
        name = f"{self.file} {'.'.join(self._scopes)}: {ast.unparse(step)}"
        self._seen[name] += 1
        return Site(name if self._seen[name] == 1 else f"{name} ({self._seen[name]})", step.lineno)


def _delayed(step: ast.expr, *names: str) -> ast.Lambda:
    taken = ast.arguments([], [ast.arg(each) for each in names], None, [], [], None, [])
    return ast.copy_location(ast.Lambda(taken, step), step)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "super"


def _is_either(test: ast.expr) -> bool:
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.expr | None) -> bool:
    named = isinstance(node, ast.Name) and node.id.isupper()  # a text that several refusals share
    return named or isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_nothing(node: ast.expr | None) -> bool:
    """None, False, or something empty."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return not node.elts
    if isinstance(node, ast.Dict):
        return not node.keys
    return node is None or (isinstance(node, ast.Constant) and (node.value in (None, "") or node.value is False))
