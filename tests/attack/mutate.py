"""Slight changes of correct code: of one expression, of one statement, of what is returned, of how inputs lie.

A changed program need not mean anything: it must only do the same fused as plain.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .program import Program, changed
from .writer import Pick

NAMES: dict[str, tuple[str, ...]] = {
    "mean": ("sum", "amax"), "sum": ("mean", "prod"), "amax": ("amin", "sum"), "tril": ("triu",), "triu": ("tril",),
    "rsqrt": ("sqrt",), "sqrt": ("rsqrt",), "cos": ("sin",), "sin": ("cos",), "square": ("abs",),
    "silu": ("gelu", "relu"),
    "sigmoid": ("tanh",), "float": ("double", "half", "bfloat16"), "float32": ("bfloat16", "float16", "float64"),
    "repeat_interleave": ("repeat",), "index_copy_": ("index_add_",), "index_copy": ("index_add",),
    "softmax": ("log_softmax",), "round": ("floor",), "bool": ("float", "int"), "long": ("int", "short", "char"),
    "int8": ("uint8", "int16"), "int32": ("int8", "int16", "int64"), "int64": ("int32", "int8"), "min": ("max",),
    "max": ("min",), "copy_": ("add_",), "stack": ("cat",), "unsqueeze": ("squeeze",), "logical_not": ("bool",),
    "exp": ("exp2", "expm1"), "log": ("log2", "log1p"), "contiguous": ("clone", "detach"), "logsumexp": ("amax",),
    "view": ("reshape",), "type_as": ("expand_as",), "zeros": ("ones",), "ones": ("zeros",), "add_": ("sub_",),
    "zeros_like": ("ones_like",), "relu": ("abs", "sigmoid"), "expand": ("repeat",), "roll": ("narrow",),
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.GtE, ast.NotEq), ast.NotEq: (ast.Gt, ast.Eq),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult), ast.Sub: (ast.Add,), ast.Mult: (ast.Div, ast.Add), ast.Div: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd, ast.BitXor), ast.FloorDiv: (ast.Mod,), ast.Mod: (ast.FloorDiv,),
}  # fmt: skip
CASTS = (
    ".to(torch.bfloat16)", ".to(torch.float16)", ".to(torch.int8)", ".to(torch.uint8)", ".to(torch.int16)", ".double()",
    ".float()", ".int()", ".clone()", ".mT.contiguous().mT", ".neg().neg()", ".contiguous()",
)  # fmt: skip
WRITES = (".add_(1)", ".mul_(2)", ".neg_()", "[..., :1].zero_()", "[:1].add_(1)", ".mT.mul_(0.5)", "[:, :1].fill_(2)")
FIXED = ("lengths", "sorted")
"""Lines that stay: with fewer keys than queries Python gives NaN and kernels give 0, and without a sort along the list
the order in which `topk(sorted=False)` returns it would count, which torch leaves open."""
TRIES = 6
VIEWS = ("", "", ".transpose(0, -1)", "[..., :1]", ".view({}.shape)", "[:1]", ".flatten(0, 1)", ".detach()", ".mT")


def mutated(program: Program, count: int, pick: Pick) -> Program:
    """The program with so many changes, each of which leaves it one that runs."""
    program = changed(program, fusable=())
    for _ in range(count):
        tries = (pick(CHANGES)(program, pick) for _ in range(TRIES if program.lines else 0))
        program = next((each for each in tries if each != program and each.runs()), program)
    return program


def expression(program: Program, pick: Pick) -> Program:
    """One number, operator, name, keyword or call of one line becomes another."""
    if not program.lines:
        return program
    number = pick(range(len(program.lines)))
    line = program.lines[number]
    if line.startswith(FIXED):
        return program
    tree = ast.parse(line)
    names = [each.name for each in program.inputs] + [
        name for text in program.lines[:number] for name in assigned(text)
    ]
    options = list(_options(tree, names))
    if not options:
        return program
    node, make = pick(options)
    make(node, pick)
    return _with_lines(program, number, [ast.unparse(ast.fix_missing_locations(tree))], f"{line}  ->  line {number}")


def alike(program: Program, pick: Pick) -> Program:
    """One name becomes that of another value of its shape and dtype: other pages, another order, values for keys."""
    kinds = _kinds(program)
    number = pick(range(len(program.lines)))
    line = program.lines[number]
    known = [each.name for each in program.inputs] + [
        name for text in program.lines[:number] for name in assigned(text)
    ]
    tree = ast.parse(line)
    found = [
        (node, others)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if (
            others := [
                each for each in known if each != node.id and each in kinds and kinds[each] == kinds.get(node.id)
            ]
        )
    ]
    if not found:
        return expression(program, pick)
    node, others = pick(found)
    node.id = pick(others)
    return _with_lines(program, number, [ast.unparse(tree)], f"{line}  ->  {node.id} in line {number}")


def _kinds(program: Program) -> dict[str, Any]:
    """Shape and dtype of each value, where it is a tensor; none where the program does not run."""
    names = [each.name for each in program.inputs] + [name for line in program.lines for name in assigned(line)]
    whole = changed(program, results=tuple(dict.fromkeys(names)))
    if not whole.runs():
        return {}
    with torch.no_grad():
        made = zip(whole.results, whole.function()(*whole.tensors()), strict=True)
    return {name: (each.shape, each.dtype) for name, each in made if isinstance(each, torch.Tensor)}


def cast(program: Program, pick: Pick) -> Program:
    """One value becomes another dtype, or takes a detour, behind where it is computed."""
    number, name = _some_value(program, pick)
    made = f"{name} = {name}{pick(CASTS)}"
    return _with_lines(program, number, [program.lines[number], made], made)


def write(program: Program, pick: Pick) -> Program:
    """One value or input is written to in place, at any place behind where it is computed."""
    number, name = _some_value(program, pick)
    names = [name, *(each.name for each in program.inputs)]
    made = f"{pick(names)}{pick(WRITES)}"
    number = pick(range(number, len(program.lines)))
    return _with_lines(program, number, [program.lines[number], made], made)


def order(program: Program, pick: Pick) -> Program:
    """Two lines change places, or one goes to another place."""
    first, second = pick(range(len(program.lines))), pick(range(len(program.lines)))
    lines = list(program.lines)
    lines.insert(second, lines.pop(first))
    return changed(program, lines=tuple(lines), mutations=(*program.mutations, f"line {first} moved to {second}"))


def drop(program: Program, pick: Pick) -> Program:
    """One statement is left out."""
    number = pick(range(len(program.lines)))
    if assigned(program.lines[number]):
        return expression(program, pick)
    lines = program.lines[:number] + program.lines[number + 1 :]
    return changed(program, lines=lines, mutations=(*program.mutations, f"without {program.lines[number]!r}"))


def returned(program: Program, pick: Pick) -> Program:
    """More is returned: a value inside, an input, a result twice, a view of one of them."""
    _, name = _some_value(program, pick)
    name = pick((name, name, *program.results, *(each.name for each in program.inputs)))
    result = f"{name}{pick(VIEWS).format(name)}"
    return changed(program, results=(*program.results, result), mutations=(*program.mutations, f"returns {result}"))


def layout(program: Program, pick: Pick) -> Program:
    """One input lies in memory otherwise, or shares the memory of another."""
    inputs = list(program.inputs)
    number = pick(range(len(inputs)))
    each = inputs[number]
    if each.values in ("gain", "matrix"):
        return program
    others = [
        one.name for one in inputs[:number] if one.dims == each.dims and not one.shares and one.values == each.values
    ]
    if others and pick((True, False)):
        inputs[number] = changed(each, shares=pick(others), layout="plain")
    else:
        inputs[number] = changed(each, layout=pick(("transposed", "reversed", "expanded", "offset", "strided")))
    return changed(program, inputs=tuple(inputs), mutations=(*program.mutations, f"{each.name} lies otherwise"))


def dtype(program: Program, pick: Pick) -> Program:
    """One input is of another dtype."""
    inputs = list(program.inputs)
    number = pick(range(len(inputs)))
    each = inputs[number]
    whole = each.values.startswith(("below", "distinct", "left", "right"))
    kinds = ("int8", "uint8", "int16", "int32") if whole else ("float32", "bfloat16", "float16")
    inputs[number] = changed(each, dtype=pick(kinds))
    return changed(program, inputs=tuple(inputs), mutations=(*program.mutations, f"{each.name} of another dtype"))


CHANGES = (
    expression, expression, expression, expression, expression, alike, alike, cast, write, write, order, drop,
    returned, returned, layout, dtype,
)  # fmt: skip


# lines ---------------------------------------------------------------------------------------------------------------


def assigned(line: str) -> list[str]:
    """The names that a line gives to new values."""
    statement = ast.parse(line).body[0]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [each.id for target in targets for each in ast.walk(target) if _is_new(each, target)]


def _is_new(node: ast.AST, target: ast.expr) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not isinstance(target, ast.Subscript)


def _some_value(program: Program, pick: Pick) -> tuple[int, str]:
    found = [(number, name) for number, line in enumerate(program.lines) for name in assigned(line)]
    return pick(found) if found else (len(program.lines) - 1, program.inputs[0].name)


def _with_lines(program: Program, number: int, lines: Sequence[str], what: str) -> Program:
    made = (*program.lines[:number], *lines, *program.lines[number + 1 :])
    return changed(program, lines=made, mutations=(*program.mutations, what))


# expressions ---------------------------------------------------------------------------------------------------------

Change = Callable[[Any, Pick], None]


def _options(tree: ast.AST, names: Sequence[str]) -> Iterator[tuple[Any, Change]]:
    """Every node that can be changed, with how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, _other_number
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield node, _other_comparison
        elif isinstance(node, ast.BinOp):
            yield node, _other_operation
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node, _other_name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            yield node, lambda each, pick: setattr(each, "id", pick(names))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            yield node, _without_call
        elif isinstance(node, ast.UnaryOp):
            yield node, _without_sign


def _other_number(node: ast.Constant, pick: Pick) -> None:
    value = node.value
    if isinstance(value, bool):
        node.value = not value
    elif isinstance(value, int):
        node.value = pick((value - 1, value + 1, 0, 1, 2, value * 2))
    else:
        node.value = pick((value * 10, -value, 0.0, 1.0, value / 2))


def _other_comparison(node: ast.Compare, pick: Pick) -> None:
    node.ops = [pick(COMPARISONS[type(node.ops[0])])()]


def _other_operation(node: ast.BinOp, pick: Pick) -> None:
    others = OPERATORS.get(type(node.op), ())
    if not others or pick((True, False)):
        node.left, node.right = node.right, node.left
    else:
        node.op = pick(others)()


def _other_name(node: ast.Attribute, pick: Pick) -> None:
    node.attr = pick(NAMES[node.attr])


def _without_call(node: ast.Call, pick: Pick) -> None:
    """What it is called on takes the place of a call without positional arguments: `x.float()` becomes `x[...]`."""
    source = copy.deepcopy(node.func.value)  # type: ignore[attr-defined]
    node.func, node.args = ast.Attribute(source, "detach", ast.Load()), []
    node.keywords = []


def _without_sign(node: ast.UnaryOp, pick: Pick) -> None:
    node.op = pick((ast.UAdd(), ast.USub(), ast.Invert()))
