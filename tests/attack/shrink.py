"""Failures are made small: lines, results, inputs and whatever else is not needed go, while they stay the same."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from .mutate import assigned
from .program import Input, Program, changed

Holds = Callable[[Program], bool]


def shrunk(program: Program, holds: Holds, tries: int = 150) -> Program:
    """The smallest program found for which `holds` is still true, after at most so many tries."""
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for each in _smaller(program):
            left -= 1
            if left < 0:
                break
            if holds(each):
                program, smaller = each, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something less, the largest steps first."""
    for number in range(len(program.results)):
        if len(program.results) > 1:
            yield tidied(changed(program, results=_without(program.results, number)))
    for number in reversed(range(len(program.lines))):
        yield tidied(changed(program, lines=_without(program.lines, number)))
    yield from _plainer(program)
    for number, line in enumerate(program.lines):
        for simple in _simpler(line):
            yield tidied(changed(program, lines=(*program.lines[:number], simple, *program.lines[number + 1 :])))


def _plainer(program: Program) -> Iterator[Program]:
    if program.fusable or program.mutations:
        yield changed(program, fusable=(), mutations=())
    if program.autocast:
        yield changed(program, autocast=False)
    if program.disabled:
        yield changed(program, disabled=())
    if program.again:
        yield changed(program, again=())
    if program.dtype != "float32":
        yield changed(program, dtype="float32")
    for number, each in enumerate(program.inputs):
        for plain in ({"layout": "plain"}, {"shares": ""}, {"dtype": ""}, {"power": 0}):
            if changed(each, **plain) != each:
                inputs = list(program.inputs)
                inputs[number] = changed(each, **plain)
                yield changed(program, inputs=tuple(inputs))
    for number, (name, size) in enumerate(program.sizes):
        for least in (1, 2, 3):
            if least < size:
                yield changed(program, sizes=(*program.sizes[:number], (name, least), *program.sizes[number + 1 :]))


def _simpler(line: str) -> Iterator[str]:
    """The line with one expression replaced by a part of it."""
    for number, node in enumerate(_expressions(ast.parse(line))):
        for part in _PARTS[type(node)]:
            tree = ast.parse(line)
            old = _expressions(tree)[number]
            inside = getattr(old, part)
            inside = inside.value if isinstance(inside, ast.Attribute) and part == "func" else inside
            yield ast.unparse(_Replaced(old, inside).visit(tree))


_PARTS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Call: ("func",),
    ast.BinOp: ("left", "right"),
    ast.Subscript: ("value",),
}


def _expressions(tree: ast.AST) -> list[ast.AST]:
    return [each for each in ast.walk(tree) if type(each) in _PARTS]


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().visit(node)


def tidied(program: Program) -> Program:
    """Without lines and inputs that nothing reads."""
    lines = list(program.lines)
    for number in reversed(range(len(lines))):
        read = set[str]().union(*map(_names, [*lines[number + 1 :], *program.results]))
        made = assigned(lines[number])
        if made and not read & set(made):
            del lines[number]
    read = set[str]().union(*map(_names, [*lines, *program.results]))
    inputs = tuple(each for each in program.inputs if each.name in read or _is_shared(each, program, read))
    return changed(program, lines=tuple(lines), inputs=inputs)


def _is_shared(each: Input, program: Program, read: set[str]) -> bool:
    return any(other.shares == each.name and other.name in read for other in program.inputs)


def _names(line: str) -> set[str]:
    return {
        each.id for each in ast.walk(ast.parse(line)) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def _without(items: tuple[str, ...], number: int) -> tuple[str, ...]:
    return items[:number] + items[number + 1 :]
