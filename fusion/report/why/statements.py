"""Edits as text: the statement of the model that made a call, with the change that an edit of the call is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from linecache import getlines
from math import inf
from typing import Any

from fusion.report.statements import statement_at
from fusion.report.why.edits import EPS, Edit

_BINARY: Mapping[str, type[ast.operator]] = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div}
_CALLED: Mapping[str, frozenset[str]] = {
    "_softmax": frozenset({"softmax"}),
    "_to_copy": frozenset({"float", "to", "half", "bfloat16", "double", "type", "type_as"}),
    "clamp": frozenset({"clamp", "clip", "clamp_"}),
    "full": frozenset({"full", "new_full", "where"}),
    "scalar_tensor": frozenset({"where", "tensor"}),
    "native_layer_norm": frozenset({"layer_norm"}),
}
"""Names by which the source calls an operator, where they are not its own."""
_INSERTED = frozenset({"correction", "largest"})
"""Arguments that are written out where the source leaves them at their defaults."""
_SYNONYMS = ("axis", "other", "value")
"""Names of keywords that the source has for arguments of other names."""
_MODULES = frozenset({"torch", "F", "functional", "nn"})


def difference(where: str, edit: Edit) -> str:
    """Return the statement at `where` (`file:line`) with `edit`, as a diff; "" if the place in it is not certain."""
    file, _, line = where.rpartition(":")
    text = "".join(getlines(file))
    statement = statement_at(text, int(line)) if text and line.isdigit() else None
    if statement is None:
        return ""
    if edit.kind == "swap":
        changes = set(_exchanged(text, statement))
    else:
        changes = {change for each in _calls(statement, edit.operator) for change in _changes(text, each, edit)}
    if len(changes) != 1:
        return ""
    start, end, new = changes.pop()
    changed = (text[:start] + new + text[end:]).splitlines()
    return "\n".join(unified_diff(text.splitlines(), changed, file, file, n=0, lineterm=""))


def _calls(statement: ast.stmt, operator: str) -> Iterator[ast.expr]:
    """Yield the expressions of `statement` that may be calls of `operator`."""
    names = _CALLED.get(operator, frozenset({operator, f"{operator}_"}))
    binary = _BINARY.get(operator)
    for each in ast.walk(statement):
        is_call = isinstance(each, ast.Call) and _called(each) in names
        is_binary = binary is not None and isinstance(each, ast.BinOp) and isinstance(each.op, binary)
        if isinstance(each, ast.expr) and (is_call or is_binary):
            yield each


def _exchanged(text: str, statement: ast.stmt) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and new text of the two names that `statement` assigns, in the other order."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        (start, _), (_, end) = spans = [_span(text, each) for each in target.elts]
        yield start, end, ", ".join(text[first:last] for first, last in reversed(spans))


def _changes(text: str, call: ast.expr, edit: Edit) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and new text of each change of the expression `call` that may be `edit`."""
    if edit.kind == "constant":
        constants = [each for each in _arguments(call, edit) if _is(each, edit.old)]
        yield from ((*_span(text, each), _written(edit.new)) for each in constants)
        if edit.argument in _INSERTED and isinstance(call, ast.Call) and not list(_arguments(call, edit)):
            end = _span(text, call)[1] - 1
            yield end, end, f", {edit.argument}={_written(edit.new)}"
        return
    if edit.kind == "allocate":
        return
    operand = _stepped(call, edit) if edit.kind == "step" else _operand(call, edit)
    if operand is None or not _has_constant(call, edit.old):
        return
    start, end = _span(text, operand)
    is_simple = isinstance(operand, (ast.Name, ast.Call, ast.Attribute, ast.Subscript))
    in_brackets = text[start - 1 : start] == "(" and text[end : end + 1] == ")"
    if edit.kind == "step" and in_brackets and operand is getattr(getattr(call, "func", None), "value", None):
        start, end, is_simple = start - 1, end + 1, True  # (x + y).to(..)
    inner = text[start:end]
    if edit.kind == "step":
        yield start, end, f"{inner if is_simple else f'({inner})'}{edit.new}"
    elif edit.kind == "omit":
        yield (*_span(text, call), inner if is_simple else f"({inner})")
    else:
        is_method = isinstance(call, ast.Call) and operand not in call.args
        yield start, end, f"({inner} + {EPS})" if is_method else f"{inner} + {EPS}"


def _arguments(call: ast.expr, edit: Edit) -> Iterator[ast.expr]:
    """Yield the operands of the expression `call` that may be the argument of `edit`."""
    if isinstance(call, ast.BinOp):
        yield from (call.left, call.right)
    if not isinstance(call, ast.Call):
        return
    yield from (each.value for each in call.keywords if each.arg in (edit.argument, *_SYNONYMS))
    position = edit.position - _is_method(call)
    is_own = _called(call).rstrip("_") == edit.operator.strip("_")
    yield from call.args[position : position + 1] if is_own else call.args


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_method(call: ast.Call) -> bool:
    """Return True if `call` is a call of a method of its first operand, not of a function of a module."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner is not None and getattr(owner, "attr", getattr(owner, "id", "")) not in _MODULES


def _operand(call: ast.expr, edit: Edit) -> ast.expr | None:
    """Return the expression of the operand that stays where `call` is left out."""
    if isinstance(call, ast.BinOp):
        is_right = edit.argument == "other" or isinstance(call.left, ast.Constant)
        return call.right if is_right else call.left
    if not isinstance(call, ast.Call) or edit.argument not in ("self", "input"):
        return None
    if isinstance(call.func, ast.Attribute) and _is_method(call):
        return call.func.value
    return call.args[0] if call.args else None


def _stepped(call: ast.expr, edit: Edit) -> ast.expr | None:
    """Return the expression of the operand of `call` that goes through the step of `edit`."""
    if isinstance(call, ast.BinOp):
        return call.right if edit.argument == "other" else call.left
    if not isinstance(call, ast.Call):
        return None
    if edit.position == 0 and _is_method(call):
        return getattr(call.func, "value", None)
    named = [each.value for each in call.keywords if each.arg == edit.argument]
    position = edit.position - _is_method(call)
    return next(iter(named or call.args[position : position + 1]), None)


def _has_constant(call: ast.expr, value: Any) -> bool:
    """Return True if the constant `value` is an operand of the expression `call`; for None, if no number is one of a
    binary expression."""
    if value is not None:
        return any(isinstance(each, ast.expr) and _is(each, value) for each in ast.iter_child_nodes(call))
    return not isinstance(call, ast.BinOp) or not any(
        isinstance(each, ast.Constant) for each in (call.left, call.right)
    )


def _is(node: ast.expr, value: Any) -> bool:
    """Return True if the expression `node` is the constant `value`, or a list of it alone."""
    try:
        written = ast.literal_eval(node)
    except ValueError:
        return False
    alone = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value  # pyright: ignore
    return isinstance(written, bool) == isinstance(alone, bool) and written in (value, alone)


def _written(value: Any) -> str:
    """Return the source text of the constant `value`."""
    if isinstance(value, list):
        return ", ".join(map(_written, value))  # pyright: ignore[reportUnknownArgumentType]
    return 'float("-inf")' if value == -inf else repr(value)


def _span(text: str, node: ast.expr) -> tuple[int, int]:
    """Return start and end of the expression `node` in the source `text`, in characters."""
    lines = text.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
