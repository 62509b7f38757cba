"""Limits as text: `D % 2 == 0 and D < 896` holds, does not hold, or (for symbolic sizes) is not proven.

The grammar is a small part of Python's expressions: integers, strings, names, `+ - * // %`, comparisons, `in (...)`,
`and or not`, and the functions `size(tensor, dim)`, `shape(tensor)`, `rank(tensor)`, `dtype(tensor)`,
`itemsize(tensor)`, `length(list or tensor)` and `given(argument)`; the dtype of a list of tensors is
the one that all have, or every one. `a // 0` is 0 and `a % 0` is a. Nothing else can be written, so a limit is data.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from fusion._torch import known_true
from fusion.errors import OperatorError


def _is_nothing(size: Any) -> bool:
    return isinstance(size, int) and size == 0


FUNCTIONS = ("size", "shape", "rank", "dtype", "itemsize", "length", "given")

Decide = Callable[["bool | torch.SymBool"], "bool | None"]

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: 0 if _is_nothing(b) else a // b,
    ast.Mod: lambda a, b: a if _is_nothing(b) else a % b,
}
_ORDER: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUALITY = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
_STRUCTURE = (ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare)
_LEAVES = (ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.Call)
_ALLOWED = (*_ARITHMETIC, *_ORDER, *_EQUALITY, *_STRUCTURE, *_LEAVES)


@cache
def parse(text: str) -> ast.expr:
    """The tree of `text`; `OperatorError` for anything outside the grammar."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise OperatorError(f"reading the limit {text!r}: {error.msg}; write one Python expression") from None
    for node in ast.walk(tree):
        _check(node, text)
    return tree


def _check(node: ast.AST, text: str) -> None:
    if not isinstance(node, _ALLOWED):
        raise OperatorError(f"reading the limit {text!r}: {type(node).__name__} is not part of the grammar of limits")
    if not isinstance(node, ast.Call):
        return
    known = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if not known or not node.args or not isinstance(node.args[0], ast.Name):
        raise OperatorError(
            f"reading the limit {text!r}: `{ast.unparse(node)}` is not a call that limits know; "
            f"write one of {', '.join(FUNCTIONS)} with an argument's name"
        )


@cache
def names(text: str) -> frozenset[str]:
    """Dims and arguments that `text` speaks of."""
    return frozenset(node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)) - set(FUNCTIONS)


def holds(text: str, values: Mapping[str, Any], decide: Decide | None = None) -> bool | None:
    """Whether `text` is true for `values` (dim or argument -> size, attribute or tensor); None when not proven.

    `decide` settles one comparison of symbolic sizes: `proven` (the default), `hinted` or `guarded`.
    """
    return _truth(parse(text), values, decide or proven)


def proven(condition: bool | torch.SymBool) -> bool | None:
    """What is true whatever the sizes are."""
    if known_true(condition):
        return True
    if known_true(torch.sym_not(condition)):
        return False
    return None


def hinted(condition: bool | torch.SymBool) -> bool | None:
    """What is true for the sizes of the call that is traced."""
    known = proven(condition)
    if known is not None or isinstance(condition, bool):
        return known
    return condition.node.hint if condition.node.has_hint() else None


def guarded(condition: bool | torch.SymBool) -> bool | None:
    """The same, and the compiled graph is used for no call for which it is not."""
    known = hinted(condition)
    return known if known is None else bool(condition)


def facts(text: str, values: Mapping[str, Any]) -> str:
    """The values that decide `text`, as `D=1024, dtype(x)=float32`."""
    seen: dict[str, Any] = {}
    for node in _terms(parse(text)):
        if all(name in values for name in names(ast.unparse(node))):  # a dim of another layout has no size here
            seen[ast.unparse(node)] = _value(node, values)
    return ", ".join(f"{term}={value}" for term, value in seen.items())


def _terms(node: ast.AST) -> Iterable[ast.expr]:
    if isinstance(node, ast.Name | ast.Call):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _terms(child)


def _truth(node: ast.expr, values: Mapping[str, Any], decide: Decide) -> bool | None:
    match node:
        case ast.BoolOp(op=ast.And()):
            return _every(_truth(value, values, decide) for value in node.values)
        case ast.BoolOp():
            return _negated(_every(_negated(_truth(value, values, decide)) for value in node.values))
        case ast.UnaryOp(op=ast.Not()):
            return _negated(_truth(node.operand, values, decide))
        case ast.Compare():
            pairs = zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
            return _every(_compared(left, op, right, values, decide) for left, op, right in pairs)
        case _:
            return decide(_value(node, values))


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr, values: Mapping[str, Any], decide: Decide) -> bool | None:
    a, b = _value(left, values), _value(right, values)
    match op:
        case ast.Eq():
            return same(a, b, decide)
        case ast.NotEq():
            return _negated(same(a, b, decide))
        case ast.In():
            return _negated(_every(_negated(same(a, item, decide)) for item in b))
        case ast.NotIn():
            return _every(_negated(same(a, item, decide)) for item in b)
        case _:
            return decide(_ORDER[type(op)](a, b))


def same(a: Any, b: Any, decide: Decide = proven) -> bool | None:
    """Whether two sizes, attributes, shapes or lists are equal; None when not proven."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and _every(same(x, y, decide) for x, y in zip(a, b, strict=True))
    return decide(a == b)


def tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of an argument: itself, those of a list, or none."""
    several = value if isinstance(value, tuple | list) else (value,)
    return tuple(each for each in several if isinstance(each, torch.Tensor))


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(_value(item, values) for item in node.elts)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, values)
        case ast.BinOp():
            return _ARITHMETIC[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=argument), *rest]):
            return _called(function, values[argument], [_value(item, values) for item in rest])
        case ast.Name():
            return values[node.id]
        case _:
            raise OperatorError(f"evaluating a limit: `{ast.unparse(node)}` has no value; write it as a comparison")


def _called(function: str, value: Any, rest: list[Any]) -> Any:
    match function:
        case "size":
            return value.shape[rest[0]]
        case "shape":
            return tuple(value.shape)
        case "rank":
            return value.ndim
        case "dtype":
            return ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors(value)))
        case "itemsize":
            return value.dtype.itemsize
        case "length":
            return len(value) if isinstance(value, list | tuple) else value.shape[0]
        case _:
            return value is not None


def _every(truths: Iterable[bool | None]) -> bool | None:
    """Three-valued `and`, which stops at the first False: later terms may speak of dims that are not there."""
    proven = True
    for truth in truths:
        if truth is False:
            return False
        proven = proven and truth is True
    return True if proven else None


def _negated(truth: bool | None) -> bool | None:
    return None if truth is None else not truth
