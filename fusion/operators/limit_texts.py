"""Limits as text: `D % 2 == 0 and D < 896` is true, false, or (for symbolic sizes) undecided.

The grammar is a small part of Python's expressions: integers, strings, names, `+ - * // %`, comparisons, `in (...)`,
`and or not`, and the functions `size(tensor, dim)`, `sizes(tensor, start, stop)`, `shape(tensor)`, `rank(tensor)`,
`dtype(tensor)`, `itemsize(tensor)`, `numel(tensor)`, `length(list or tensor)`, `item(list, index)` and
`given(argument)`. The dtype of a list of tensors is their common dtype, or all dtypes joined by commas. `a // 0` is 0
and `a % 0` is a. Everything else is rejected, so a limit is data.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from fusion._torch.tensors import known_true
from fusion.errors import OperatorError


def _is_zero(size: Any) -> bool:
    return isinstance(size, int) and size == 0


Decide = Callable[["bool | torch.SymBool"], "bool | None"]
"""Function that decides a comparison of sizes: True, False, or None if undecided."""
_Test = Callable[[Mapping[str, Any], Decide], "bool | None"]
"""Compiled condition, of values and `decide`."""
_Term = Callable[[Mapping[str, Any]], Any]
"""Compiled operand, of values."""

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: 0 if _is_zero(b) else a // b,
    ast.Mod: lambda a, b: a if _is_zero(b) else a % b,
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
    """Parse `text` into a syntax tree.

    Raises:
        OperatorError: the text has something that is outside the grammar.
    """
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
    known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if not known or not node.args or not isinstance(node.args[0], ast.Name):
        raise OperatorError(
            f"reading the limit {text!r}: `{ast.unparse(node)}` is not a call that limits know; "
            f"write one of {', '.join(_FUNCTIONS)} with an argument's name"
        )


@cache
def names(text: str) -> frozenset[str]:
    """Return the names in the predicate `text`, of dims and arguments, without those of functions."""
    return frozenset(node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)) - set(_FUNCTIONS)


def holds(text: str, values: Mapping[str, Any], decide: Decide | None = None) -> bool | None:
    """Evaluate `text` for `values` (dim or argument -> size, argument or tensor): True, False, or None if undecided.

    `decide` decides each comparison of symbolic sizes: `proven` (the default), `hinted` or `guarded`.
    """
    return _compiled(text)(values, decide or proven)


def proven(condition: bool | torch.SymBool) -> bool | None:
    """Return the truth of `condition` if it is the same for all values of symbolic sizes, else None."""
    if isinstance(condition, bool):
        return condition
    if known_true(condition):
        return True
    if known_true(torch.sym_not(condition)):
        return False
    return None


def hinted(condition: bool | torch.SymBool) -> bool | None:
    """Return the truth of `condition` for the sizes of the traced call, None if these are unknown."""
    known = proven(condition)
    if known is not None or isinstance(condition, bool):
        return known
    return condition.node.hint if condition.node.has_hint() else None


def guarded(condition: bool | torch.SymBool) -> bool | None:
    """Return the truth of `condition` for the sizes of the traced call, and add a guard to the graph.

    By the guard, the compiled graph runs only calls for which the truth is the same. None, without a guard, if the
    sizes of the call are unknown.
    """
    known = hinted(condition)
    return known if known is None else bool(condition)


def facts(text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the terms of `text`, dims, arguments and calls: term -> value, as {"D": 1024, "dtype(x)": "float32"}.

    A property of an argument that is None has the value None.
    """
    terms = {ast.unparse(node): node for node in _terms(parse(text))}
    bound = {term: node for term, node in terms.items() if names(term) <= values.keys()}  # dims of this layout alone
    return {term: None if _is_absent(node, values) else _term(node)(values) for term, node in bound.items()}


def _is_absent(node: ast.expr, values: Mapping[str, Any]) -> bool:
    """Return True if `node` asks for a property of an argument that is None in `values`."""
    match node:
        case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=argument), *_]):
            return function != "given" and values[argument] is None
        case _:
            return False


def _terms(node: ast.AST) -> Iterable[ast.expr]:
    if isinstance(node, ast.Name | ast.Call):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _terms(child)


@cache
def _compiled(text: str) -> _Test:
    """Compile `text` to a function, memoised: compiling one model evaluates each limit many times."""
    return _test(parse(text))


def _test(node: ast.expr) -> _Test:
    """Compile the syntax tree `node` of a condition to a function of (values, decide) that gives True, False or
    None.
    """
    match node:
        case ast.BoolOp(op=ast.And()):
            terms = [*map(_test, node.values)]
            return lambda values, decide: _every(term(values, decide) for term in terms)
        case ast.BoolOp():
            terms = [*map(_test, node.values)]
            return lambda values, decide: _negated(_every(_negated(term(values, decide)) for term in terms))
        case ast.UnaryOp(op=ast.Not()):
            term = _test(node.operand)
            return lambda values, decide: _negated(term(values, decide))
        case ast.Compare():
            sides = [node.left, *node.comparators]
            pairs = [*map(_comparison, sides[:-1], node.ops, sides[1:])]
            if len(pairs) == 1:
                return pairs[0]
            return lambda values, decide: _every(pair(values, decide) for pair in pairs)
        case _:
            value = _term(node)
            return lambda values, decide: decide(value(values))


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> _Test:
    """Compile the comparison `left` `op` `right` to a function of (values, decide) that gives True, False or None."""
    a, b = _term(left), _term(right)
    match op:
        case ast.Eq():
            return lambda values, decide: same(a(values), b(values), decide)
        case ast.NotEq():
            return lambda values, decide: _negated(same(a(values), b(values), decide))
        case ast.In():
            return lambda values, decide: _negated(_is_none_of(a(values), b(values), decide))
        case ast.NotIn():
            return lambda values, decide: _is_none_of(a(values), b(values), decide)
        case _:
            order = _ORDER[type(op)]
            return lambda values, decide: decide(order(a(values), b(values)))


def _is_none_of(a: Any, several: Iterable[Any], decide: Decide) -> bool | None:
    return _every(_negated(same(a, each, decide)) for each in several)


def same(a: Any, b: Any, decide: Decide = proven) -> bool | None:
    """Compare two sizes, arguments, shapes or lists by `decide`: True if equal, False if not, None if undecided."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and _every(same(x, y, decide) for x, y in zip(a, b, strict=True))
    return decide(a == b)


def tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an argument `value`: itself, those of a list, or none."""
    several = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(each for each in several if isinstance(each, torch.Tensor))


def _term(node: ast.expr) -> _Term:
    """Compile the syntax tree `node` of an operand to a function of the values that gives the operand's.

    Raises:
        OperatorError: `node` is a condition, which has no value.
    """
    match node:
        case ast.Constant(value=value):
            return lambda values: value
        case ast.Tuple() if all(isinstance(each, ast.Constant) for each in node.elts):
            constant = ast.literal_eval(node)
            return lambda values: constant
        case ast.Tuple():
            items = [*map(_term, node.elts)]
            return lambda values: tuple(item(values) for item in items)
        case ast.UnaryOp(op=ast.USub()):
            operand = _term(node.operand)
            return lambda values: -operand(values)
        case ast.BinOp():
            join, left, right = _ARITHMETIC[type(node.op)], _term(node.left), _term(node.right)
            return lambda values: join(left(values), right(values))
        case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=argument), *rest]):
            ask, others = _FUNCTIONS[function], [*map(_term, rest)]
            return lambda values: ask(values[argument], *(other(values) for other in others))
        case ast.Name(id=name):
            return lambda values: values[name]
        case _:
            raise OperatorError(f"reading a limit: `{ast.unparse(node)}` has no value; write it as a comparison")


def _dtype(value: Any) -> str:
    return ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors(value)))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "size": lambda value, dim: value.shape[dim],
    "sizes": lambda value, start, stop: tuple(value.shape[start:stop]),
    "shape": lambda value: tuple(value.shape),
    "rank": lambda value: value.ndim,
    "dtype": _dtype,
    "itemsize": lambda value: value.dtype.itemsize,
    "length": lambda value: len(value) if isinstance(value, list | tuple) else value.shape[0],
    "given": lambda value: value is not None,
    "item": lambda value, index: value[index],
    "numel": lambda value: value.numel(),
}


def is_plain(value: Any) -> bool:
    """Return True if `value`, an argument or a size, contains no symbolic size."""
    if isinstance(value, torch.Tensor):
        return all(map(is_plain, value.shape))
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def all_hold(conditions: Iterable[tuple[str, str]]) -> Callable[[Mapping[str, Any]], bool]:
    """Compile `conditions`, pairs (text, when), to one function that is True if each text holds or its `when` does not.

    The values must be without symbolic sizes; a `when` of "" holds always. One function of Python is faster than an
    evaluation of each limit, and every planned call is tested against all limits.
    """
    terms = [
        f"({f'not {_python(parse(when))} or ' if when else ''}{_python(parse(text))})" for text, when in conditions
    ]
    return eval(f"lambda values: {' and '.join(['True', *terms])}", dict(_KNOWN))


def _python(node: ast.AST) -> str:
    """Translate a syntax tree of the grammar to Python source that reads `values`; operators become calls of functions
    of `_KNOWN`, because some differ from Python's, as `a % 0` does."""
    match node:
        case ast.Name(id=name):
            return f"values[{name!r}]"
        case ast.Constant(value=value):
            return repr(value)
        case ast.Tuple(elts=items):
            return f"({''.join(f'{_python(each)}, ' for each in items)})"
        case ast.Call(func=ast.Name(id=function), args=given):
            return f"{function}({', '.join(map(_python, given))})"
        case ast.UnaryOp(op=op, operand=operand):
            return f"({'not ' if isinstance(op, ast.Not) else '-'}{_python(operand)})"
        case ast.BoolOp(op=op, values=terms):
            return f"({(' and ' if isinstance(op, ast.And) else ' or ').join(map(_python, terms))})"
        case ast.BinOp(left=left, op=op, right=right):
            return f"_{type(op).__name__}({_python(left)}, {_python(right)})"
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip([left, *others], ops, others, strict=False)
            return f"({' and '.join(f'_{type(op).__name__}({_python(a)}, {_python(b)})' for a, op, b in pairs)})"
        case _:
            raise OperatorError(f"reading a limit: `{ast.unparse(node)}` is not part of the grammar of limits")


def _every(truths: Iterable[bool | None]) -> bool | None:
    """Return the conjunction of `truths`, of True, False and None for undecided: False if any is, else None if any is.

    It ends at the first False: later truths may read dims that have no size.
    """
    proven = True
    for truth in truths:
        if truth is False:
            return False
        proven = proven and truth is True
    return True if proven else None


def _negated(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


_KNOWN: Mapping[str, Any] = {
    **_FUNCTIONS,
    **{f"_{op.__name__}": run for op, run in (*_ARITHMETIC.items(), *_ORDER.items())},
    "_Eq": same,
    "_NotEq": lambda a, b: not same(a, b),
    "_In": lambda a, several: not _is_none_of(a, several, proven),
    "_NotIn": lambda a, several: _is_none_of(a, several, proven),
    "__builtins__": {},
}
"""Globals of the functions that `all_hold` compiles."""
