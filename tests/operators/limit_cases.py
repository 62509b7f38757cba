"""For a limit of an operator, a legal call and a change of it beyond that limit alone, found from the limit's text.

A search changes one dim, dtype, shape or argument that the limit reads at a time. What equations of other limits force
on other arguments follows: a dim that equals a product, a dtype that equals another.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from fusion.errors import OperatorError
from fusion.operators import HOST, Limit, Operator, named_dims, refusal
from fusion.operators.limit_texts import all_hold, holds, names, parse, proven, tensors

Call = dict[str, Any]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32, torch.int64, torch.bool)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "size": lambda x, dim: x.shape[dim],
    "shape": lambda x: tuple(x.shape),
    "dtype": lambda x: ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors(x))),
    "length": len,
    "itemsize": lambda x: x.dtype.itemsize,
    "rank": lambda x: x.ndim,
    "numel": lambda x: x.numel(),
    "given": lambda x: x is not None,
    "item": lambda x, index: x[index],
    "sizes": lambda x, start, stop: tuple(x.shape[start:stop]),
}
UNREADABLE = (TypeError, KeyError, IndexError, AttributeError, AssertionError)
"""Errors of limits that read what a call does not have; that it has it is for other limits to say."""
FOLLOWING = 4
"""How many equations may follow one change."""


@dataclass(frozen=True)
class Search:
    """A search for both sides of `limit`, one of an `op` on a `chip`."""

    op: Operator
    chip: str
    limit: Limit

    def sides(self, calls: Sequence[Call]) -> tuple[Call, Call] | None:
        """Return a legal call and one beyond the limit, a change of one of `calls` apart; None if none is found."""
        applied = [call for call in calls if self._applies(call) and self.is_legal(call)]
        tried = (self._beyond_from(call, alone) for alone in (True, False) for call in applied)
        return next(filter(None, tried), None)

    def is_legal(self, call: Call) -> bool:
        """True if the chip takes `call`, and the limit and all others hold as they are declared."""
        values = valued(self.op, call)
        if values is None or not (self._holds(self.limit, values) and self._others_hold(values)):
            return False
        return refusal(self.op, self.chip, (), call, self.limit.lowering) is None

    def is_beyond(self, call: Call, alone: bool) -> bool:
        """True if `call` is refused for the limit; if `alone`, for no other one either."""
        values = valued(self.op, call)
        if values is None or self._holds(self.limit, values) or (alone and not self._others_hold(values)):
            return False
        try:
            text = refusal(self.op, self.chip, (), call, self.limit.lowering)
        except UNREADABLE:
            return False
        return f" requires {self.limit.text}" in str(text)

    def _holds(self, limit: Limit, values: Mapping[str, Any]) -> bool:
        """True if `values` satisfy `limit`, and have what it reads."""
        try:
            return limit.evaluate(values, proven) is True
        except UNREADABLE:
            return False

    def _others_hold(self, values: Mapping[str, Any]) -> bool:
        try:
            return self._other_limits(values)
        except UNREADABLE:
            return False

    @cached_property
    def _limits(self) -> tuple[Limit, ...]:
        """The other limits of calls that run as those of the limit."""
        declared = (*self.op.limits_on(HOST), *(self.op.limits_on(self.chip) if self.chip != HOST else ()))
        lowerings, text = (None, self.limit.lowering), self.limit.text
        return tuple(each for each in declared if each.lowering in lowerings and each.text != text)

    @cached_property
    def _other_limits(self) -> Callable[[Mapping[str, Any]], bool]:
        return all_hold((each.text, each.when) for each in self._limits)

    def _applies(self, call: Call) -> bool:
        return not self.limit.when or bool(holds(self.limit.when, valued(self.op, call) or {}))

    def _beyond_from(self, call: Call, alone: bool) -> tuple[Call, Call] | None:
        """Return both sides of the limit, one change of `call` apart; None if no change of it is beyond the limit."""
        for name, value, changed in self._changes(call, self.limit.text):
            for each in self._ways(changed, name):
                if self.is_beyond(each, alone):
                    return self._nearest(call, name, value), each
        return None

    def _nearest(self, call: Call, name: str, value: Any) -> Call:
        """Return the legal call whose size or number `name` is nearest to `value`, beyond the limit; else `call`."""
        if not _is_number(value):
            return call
        alike = [each for each in self._changes(call, self.limit.text) if each[0] == name and _is_number(each[1])]
        ordered = sorted(alike, key=lambda each: abs(each[1] - value))
        ways = (way for _, _, changed in ordered for way in self._ways(changed, name))
        return next((each for each in ways if self.is_legal(each) and self._applies(each)), call)

    def _ways(self, call: Call, name: str) -> Iterator[Call]:
        """Yield `call`, of which `name` was changed, as it is and with what follows from equations."""
        yield call
        followed = self._followed(call, name)
        if followed is not call:
            yield followed

    def _changes(self, call: Call, text: str) -> Iterator[tuple[str, Any, Call]]:
        """Yield name, new value and changed call for each other value of what `text` reads."""
        values = valued(self.op, call) or {}
        for name in sorted(names(text) & values.keys()):
            yield from ((name, value, changed) for value, changed in self._of_one(call, name, text, values))

    def _of_one(self, call: Call, name: str, text: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, Call]]:
        """Yield new value and changed call for other values of the dim or argument `name`."""
        value = values[name]
        if name not in self.op.arguments:
            for size in _numbers(value, text, values) if isinstance(value, int) else ():
                if size >= 0:
                    yield size, resized(self.op, call, name, size)
            return
        for other in _others(self.op, name, value, text, values):
            yield other, call | {name: other}

    def _followed(self, call: Call, name: str) -> Call:
        """Return `call` with equations of other limits solved for what is not `name`."""
        for _ in range(FOLLOWING):
            values = valued(self.op, call)
            if values is None or self._others_hold(values):
                return call
            broken = next((each for each in self._limits if not self._holds(each, values)), None)
            solved = None if broken is None else _solved(self.op, call, broken, name, values)
            if solved is None:
                return call
            call = solved
        return call


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a meta tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def starts(*calls: Call, name: str | Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """Return legal `calls`, of the operator `name` if it is given, as cases from which both sides are searched."""
    given = (name,) if isinstance(name, str) else name
    return [(*each, (), call, call, "") for call in calls for each in ([(one,) for one in given] or [()])]


def valued(op: Operator, call: Call) -> dict[str, Any] | None:
    """Return argument or dim -> value of a call; None if its tensors do not have the declared dims."""
    try:
        values = op.bind((), call)
        bound = named_dims.bind(op.dims, values)
    except (OperatorError, TypeError, AttributeError, IndexError):
        return None
    return None if isinstance(bound, named_dims.Misfit) else values | bound


def resized(op: Operator, call: Call, dim: str, size: int) -> Call:
    """Return `call` with `size` for `dim` in every tensor that is declared with it."""
    values = valued(op, call) or {}
    given = {name: call[name] for name in op.dims if list(tensors(call.get(name)))}
    return call | {name: _mapped(each, _new_shape(op, values, name, dim, size)) for name, each in given.items()}


def _new_shape(op: Operator, values: Mapping[str, Any], name: str, dim: str, size: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        layout = _layout(op, values, name)
        shape, place = list(x.shape), 0
        for each in layout:
            width = len(values[each]) if each.startswith("*") else 1
            if dim in each.split("|") and shape[place] == values[dim]:
                shape[place] = size
            place += width
        return x if shape == list(x.shape) else torch.empty(shape, dtype=x.dtype, device="meta")

    return change


def _layout(op: Operator, values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the dims of the argument `name` in the layout that the call has."""
    count = max(len(named_dims.layouts(text)) for text in op.dims.values())
    for place in range(count):
        choice = {
            each: named_dims.layouts(text)[place % len(named_dims.layouts(text))] for each, text in op.dims.items()
        }
        shapes = [(each, x.ndim) for each in choice for x in tensors(values[each])]
        if all(one.selected(values) for one in choice.values()) and all(choice[n].fits(r) for n, r in shapes):
            return choice[name].dims
    return ()


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return [change(each) for each in value] if isinstance(value, (list, tuple)) else change(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: int, text: str, values: Mapping[str, Any]) -> list[int]:
    """Return numbers on both sides of the bounds that `text` sets, those near to `value` first."""
    nodes = (node for node in ast.walk(parse(text)) if isinstance(node, ast.Constant))
    stated = [node.value for node in nodes if _is_number(node.value)]
    read = [values[name] for name in names(text) if _is_number(values.get(name)) and values[name] > 0]
    bounds = {value, 1, *stated, *read, *(s // r for s in stated for r in read), *(s * r for s in stated for r in read)}
    bounds |= {value * each for each in stated} | {value // each for each in (*stated, *read) if each > 0}
    steps = {1, 2, 8, *(each for each in stated if 0 < each <= 64)}
    near = {each + by for each in bounds for by in (-1, 0, 1)}
    near |= {each + sign * by for each in (value, *stated) for by in steps for sign in (1, -1)}
    return sorted(near - {value}, key=lambda each: (abs(each - value), each))


def _others(op: Operator, name: str, value: Any, text: str, values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield other values of an argument: of its own kind, others that `text` names, and none."""
    constants = [node.value for node in ast.walk(parse(text)) if isinstance(node, ast.Constant)]
    kind = str(op.arguments[name].type).removeprefix("Optional[").removesuffix("]")
    match kind:
        case "Tensor" | "List[Tensor" | "List[Tensor]":
            yield from _other_tensors(op, name, value, values)
        case "int":
            yield from _numbers(value if _is_number(value) else 0, text, values)
            yield from _constants(op, int)
        case "str":
            yield from (
                each for each in (*constants, *_constants(op, str), "other") if isinstance(each, str) and each != value
            )
        case "bool":
            yield from (each for each in (True, False) if each is not value)
        case "float":
            yield from (each for each in (0.5, 1.5, -1.0, 0.0, 1.0) if each != value)
        case _:
            flags = "bool" in kind
            own = list(value or ())
            yield from ([*own, own[-1] if own else 1], own[:-1], own[::-1], [0, 1], [1, 0, 2], [0, 2, 1], [2, 1, 0])
            yield from (
                ([False, False], [True, True]) if flags else ([each + 1 for each in own], [each - 1 for each in own])
            )
            yield from (
                [*own[:place], each + by, *own[place + 1 :]] for place, each in enumerate(own) for by in (-1, 1, -9, 9)
            )
    if value is not None:
        yield None


@cache
def _constants(op: Operator, kind: type) -> tuple[Any, ...]:
    """Return the constants of a kind that limits of `op` name."""
    texts = [limit.text for chip in op.limits for limit in op.limits_on(chip)]
    nodes = (node for text in texts for node in ast.walk(parse(text)) if isinstance(node, ast.Constant))
    return tuple(dict.fromkeys(each.value for each in nodes if type(each.value) is kind))


def _other_tensors(op: Operator, name: str, value: Any, values: Mapping[str, Any]) -> Iterator[Any]:
    if value is None:
        yield from _new_tensors(op, name, values)
        return
    if isinstance(value, (list, tuple)):
        yield from (list(value[:-1]), [*value, *value[-1:]], [*value, *[value[-1]] * 20] if value else [])
        yield from ([*value[:-1], value[-1].to(dtype)] for dtype in DTYPES if value)
    yield from (_mapped(value, lambda x, dtype=dtype: x.to(dtype)) for dtype in DTYPES)
    yield from (_mapped(value, lambda x, change=change: _empty(change(tuple(x.shape)), x)) for change in _RESHAPES)


_RESHAPES: tuple[Callable[[tuple[int, ...]], tuple[int, ...]], ...] = (
    *(lambda s, p=p, by=by: tuple(max(n + by, 0) if i == p % max(len(s), 1) else n for i, n in enumerate(s))
      for p in range(4) for by in (1, -1, 2, 16)),
    *(lambda s, p=p: tuple(1 if i == p % max(len(s), 1) else n for i, n in enumerate(s)) for p in range(4)),
    lambda s: s[1:], lambda s: s[:-1], lambda s: (1, *s), lambda s: (*s, 1), lambda s: (2, *s), lambda s: s[::-1],
    lambda s: (1,), lambda s: (), *(lambda s, n=n: (1,) * (n - len(s)) + s for n in (7, 9, 11)),
)  # fmt: skip


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _new_tensors(op: Operator, name: str, values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield tensors for an argument that is not given: in its declared dims, or in a few sizes."""
    layout = _layout(op, values, name) if name in op.dims else ()
    declared = [tuple(n for each in layout for n in _sizes(each, values))] if layout else []
    first = next((tuple(x.shape) for each in op.arguments for x in tensors(values[each])), ())
    dtypes = (*op.dtypes.get(name, ()), torch.float32)
    several = "List" in str(op.arguments[name].type)
    for shape in dict.fromkeys((*declared, (1,), (2, 2), first[-1:], first, ())):
        for dtype in dict.fromkeys(dtypes):
            made = torch.empty(shape, dtype=dtype, device="meta")
            yield [made] if several else made


def _sizes(dim: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    known = values.get(dim, (2,) if dim.startswith("*") else None)
    if isinstance(known, tuple):
        return known
    return (known if known is not None else int(dim) if dim.isdigit() else values.get(dim.split("|")[-1], 2),)


def _solved(op: Operator, call: Call, limit: Limit, fixed: str, values: Mapping[str, Any]) -> Call | None:
    """Return `call` changed so that an equation of `limit` holds, by something else than `fixed`; None if none is."""
    for node in ast.walk(parse(limit.text)):
        if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.In))):
            continue
        other = node.comparators[0]
        for left, right in ((node.left, other), (other, node.left)):
            wanted = value(ast.unparse(right), values)
            wanted = wanted[0] if isinstance(node.ops[0], ast.In) and right is other and wanted else wanted
            if (
                wanted is not None
                and value(ast.unparse(left), values) != wanted
                and fixed not in names(ast.unparse(left))
            ):
                solved = _with(op, call, left, wanted)
                if solved is not None:
                    return solved
    return None


def value(text: str, values: Mapping[str, Any] | None) -> Any:
    """Evaluate `text` of a limit as Python; None where it reads what is not there."""
    try:
        plain = {name: tuple(each) if isinstance(each, list) else each for name, each in (values or {}).items()}
        return eval(text, dict(FUNCTIONS), plain)
    except (TypeError, NameError, AttributeError, IndexError, ZeroDivisionError, StopIteration):
        return None


def _with(op: Operator, call: Call, node: ast.expr, wanted: Any) -> Call | None:
    """Return `call` changed so that `node`, a term of a limit, is `wanted`; None for other terms than those known."""
    match node:
        case ast.Name(id=name) if name in op.arguments:
            return call | {name: wanted}
        case ast.Name(id=name) if _is_number(wanted) and wanted >= 0:
            return resized(op, call, name, wanted)
        case ast.Call(func=ast.Name(id="dtype"), args=[ast.Name(id=name)]) if isinstance(wanted, str) and hasattr(
            torch, wanted or ","
        ):
            return call | {name: _mapped(call[name], lambda x: x.to(getattr(torch, wanted)))}
        case ast.Call(func=ast.Name(id="shape"), args=[ast.Name(id=name)]) if isinstance(wanted, tuple):
            return (
                call | {name: _mapped(call[name], lambda x: _empty(wanted, x))}
                if all(map(_is_number, wanted))
                else None
            )
        case ast.Call(func=ast.Name(id="length"), args=[ast.Name(id=name)]) if isinstance(call.get(name), list):
            own = call[name] or [1]
            return call | {name: [*own[:wanted], *own[-1:] * (wanted - len(own))]}
        case _:
            return None
