"""Every argument of every operator is computed, and agrees with a reference, or raises by name, or changes nothing.

What is asked of an argument comes from schemas and declarations alone: a new operator, a new argument or a new value
of a mode without a case fails here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fusion.errors import OperatorError
from fusion.operators import HOST, OPERATORS, Operator, ensure
from tests.operators import prolog_quant_cases
from tests.operators.agreement import require_agreement
from tests.operators.cases import CASES, Case, flat
from tests.operators.undocumented import Undocumented

DOUBLE = torch.float64
"""In which decompositions and references agree to the last bits, and results in int8 are the same."""
LINES = [Case("npu_mla_prolog_v3", *case) for case in prolog_quant_cases.LINES]
ALL = (*CASES, *LINES)
LEFT_OUT = object()


@cache
def cases_of(name: str) -> tuple[Case, ...]:
    """Cases of an operator, and of those that share its decomposition: overloads, and the form in place."""
    return tuple(case for case in ALL if OPERATORS[case.name].compute is OPERATORS[name].compute)


def first(name: str) -> Case:
    return next(case for case in ALL if case.name == name)


DECOMPOSITIONS = tuple({op.compute: name for name, op in reversed(OPERATORS.items())}.values())
"""One operator of each decomposition: what takes lengths in tensors, or gives copies, computes the same arguments."""


def kind_of(op: Operator, argument: str) -> str:
    """The type of an argument, whether or not it may be None."""
    text = str(op.arguments[argument].type)
    return text[len("Optional[") : -1] if text.startswith("Optional[") else text


@cache
def appearance(case: Case) -> Mapping[str, Any]:
    """What a case gives, with `Tensor` for tensors, and lists as tuples."""

    def seen(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(seen, value))
        return Tensor if isinstance(value, Tensor) else value

    return {name: seen(value) for name, value in case.arguments(DOUBLE).items()}


def results(case: Case, **changed: Any) -> list[Tensor]:
    """What a call gives and what it writes, with arguments changed or left out."""
    arguments = case.arguments(DOUBLE) | changed
    arguments = {name: value for name, value in arguments.items() if value is not LEFT_OUT}
    op = OPERATORS[case.name]
    return [*flat(op.fallback(**arguments)), *(arguments[name] for name in op.written)]


@cache
def unchanged(case: Case) -> list[Tensor]:
    return results(case)


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(got, expected, strict=False)
    return len(got) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs
    )


def pairs(kind: str) -> list[tuple[str, str]]:
    """Operators and their arguments that are `uncomputed`, or `without_effect`."""
    return [(name, argument) for name, op in OPERATORS.items() for argument in sorted(getattr(op, kind))]


def other_value(op: Operator, argument: str) -> Any:
    """A value of the type of an argument that is not its default."""
    default = op.default(argument)
    match kind_of(op, argument):
        case "Tensor":
            return torch.ones(1)
        case "List[Tensor]":
            return [torch.ones(1)]
        case "List[int]":
            return [1]
        case "bool":
            return not default
        case "str":
            return f"{default}_"
        case _:
            return (default or 0) + 1


@pytest.mark.parametrize(("name", "argument"), pairs("uncomputed"))
@pytest.mark.rotates(3)
def test_an_argument_that_is_not_computed_raises_by_name(name: str, argument: str):
    ensure()
    op, case = OPERATORS[name], first(name)
    arguments = case.arguments(torch.float32) | {argument: other_value(op, argument)}
    before = {each: arguments[each].clone() for each in op.written}
    for function in (op.fallback, op.meta, op.overload()):
        with pytest.raises(OperatorError, match=rf"calling {name}: {argument} is .*; leave {argument} at its default"):
            function(**arguments)
    with FakeTensorMode() as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, arguments)
        with pytest.raises(OperatorError, match=f"calling {name}: {argument} is "):
            op.overload()(**fake)
    assert all(torch.equal(arguments[each], before[each]) for each in op.written)


def values_of(op: Operator, argument: str, given: Any) -> Iterator[Any]:
    """Values of the type of an argument, whatever they mean; tensors of the shape of the one that a case gives."""
    match kind_of(op, argument):
        case "Tensor":
            yield from (torch.zeros_like(given), torch.ones_like(given)) if isinstance(given, Tensor) else ()
        case "bool":
            yield from (True, False)
        case "int":
            yield from (-1, 0, 1, 2, 3, 64, 128)
        case "float":
            yield from (0.0, 0.5, 1.0)
        case "str":
            yield from ("", "other")
        case "List[int]":
            yield from ([], [1], [0, 1, 2], [1, 0, 2], [1, 2, 3, 4])
        case kind:
            raise AssertionError(f"{op.name}: no values of {kind} for {argument}")


def outcome(case: Case, **changed: Any) -> Exception | list[Tensor]:
    """The error of a call, or what it gives."""
    try:
        return results(case, **changed)
    except (OperatorError, IndexError, RuntimeError) as error:
        return error


def lies_nowhere(got: Any) -> bool:
    """Whether a call ended at a position that its tensors do not have: only numbers tell of it, not their sizes."""
    return isinstance(got, IndexError | RuntimeError) and "out of" in str(got)


@pytest.mark.rotates(6)
@pytest.mark.parametrize(("name", "argument"), pairs("without_effect"))
def test_an_argument_without_effect_changes_nothing_or_raises_by_name(name: str, argument: str):
    case = first(name)
    for value in values_of(OPERATORS[name], argument, case.arguments(DOUBLE).get(argument)):
        got = outcome(case, **{argument: value})
        assert argument in str(got) if isinstance(got, OperatorError) else same(got, unchanged(case))


@cache
def agrees(case: Case) -> bool:
    require_agreement(case.name, case.arguments(DOUBLE), DOUBLE)
    return True


def matters(case: Case, argument: str) -> bool:
    """Whether a call gives something else, or raises by name, without an argument that it sets."""
    got = outcome(case, **{argument: LEFT_OUT})
    if isinstance(got, list):
        return not same(got, unchanged(case))
    return lies_nowhere(got) or argument in str(got)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_what_is_computed_agrees_with_a_reference_in_a_call_in_which_it_matters(name: str):
    op = OPERATORS[name]
    for argument in (each for each in op.computed if op.arguments[each].has_default_value()):
        default = op.default(argument)
        given = [case for case in cases_of(name) if appearance(case).get(argument, default) != default]
        assert given, f"no case gives {argument}"
        assert any(matters(case, argument) and agrees(case) for case in given), f"in no case {argument} matters"


def listed(op: Operator) -> dict[str, set[Any]]:
    """The values of modes: those that limits of every machine list, both of a flag."""
    found: dict[str, set[Any]] = {}
    for limit in op.limits_on(HOST):
        for node in ast.walk(ast.parse(limit.text, mode="eval")):
            match node:
                case ast.Compare(left=ast.Name(id=name), ops=[ast.In()], comparators=[ast.Tuple(elts=elements)]):
                    constants = [each for each in elements if not any(map(is_name, ast.walk(each)))]
                    found.setdefault(name, set()).update(map(ast.literal_eval, constants))
                case _:
                    pass
    found |= {name: {True, False} for name in op.arguments if kind_of(op, name) == "bool"}
    return {name: values for name, values in found.items() if name in op.computed}


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


@pytest.mark.parametrize("name", DECOMPOSITIONS)
@pytest.mark.rotates(3)
def test_every_value_of_a_mode_has_a_case_that_agrees(name: str):
    op = OPERATORS[name]
    for argument, values in listed(op).items():
        for value in values:
            cased = [case for case in cases_of(name) if appearance(case).get(argument, op.default(argument)) == value]
            assert cased, f"no case of {argument}={value!r}"
            assert agrees(cased[0])


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_no_other_value_of_a_mode_is_taken(name: str):
    op, case = OPERATORS[name], first(name)
    for argument in op.computed:
        kind = kind_of(op, argument)
        if kind == "str" or (kind == "int" and argument in listed(op)):
            with pytest.raises(OperatorError, match=argument):
                results(case, **{argument: "other" if kind == "str" else 99})


def tensors(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else flat(value) if isinstance(value, list) else ()


def scaled(value: Any) -> Any:
    """A tensor of floats, or those of a list, with other numbers."""
    if isinstance(value, list):
        return [scaled(each) for each in value]
    return 1 - value * 2 if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.rotates
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_the_numbers_of_every_tensor_matter(name: str):
    op = OPERATORS[name]
    for argument in set(op.computed) - {*op.written, *op.copied}:
        floats = [
            case
            for case in cases_of(name)
            if any(map(Tensor.is_floating_point, tensors(case.arguments(DOUBLE).get(argument))))
        ]
        changed = (outcome(case, **{argument: scaled(case.arguments(DOUBLE)[argument])}) for case in floats)
        differ = (
            isinstance(got, Exception) or not same(got, unchanged(case))
            for case, got in zip(floats, changed, strict=True)
        )
        assert not floats or any(differ), f"the numbers of {argument} matter in no case"


def reshaped(x: Tensor) -> Iterator[Tensor]:
    """Tensors of other sizes: each dim one less and one more, a dim more and a dim less."""
    for dim in range(x.dim()):
        if x.shape[dim] > 1:
            yield x.narrow(dim, 0, x.shape[dim] - 1).contiguous()
        if x.shape[dim]:
            yield torch.cat((x, x.narrow(dim, 0, 1)), dim)
    yield x.unsqueeze(0)
    if x.dim() and x.shape[0]:
        yield x.select(0, 0).contiguous()


@pytest.mark.rotates
@pytest.mark.parametrize("case", ALL, ids=str)
def test_sizes_that_contradict_each_other_are_refused(case: Case):
    for argument, value in case.arguments(DOUBLE).items():
        for other in (each for tensor in tensors(value) for each in reshaped(tensor)):
            got = outcome(case, **{argument: [other] if isinstance(value, list) else other})
            assert isinstance(got, OperatorError | list) or lies_nowhere(got), argument


def donors(case: Case) -> Iterator[tuple[str, Case]]:
    """Arguments, and other cases of the same operator that give them otherwise: once each value and size."""
    op, known = OPERATORS[case.name], set()
    for other in ALL:
        if other.name != case.name:
            continue
        for argument, value in other.arguments(DOUBLE).items():
            sizes = tuple(tuple(each.shape) for each in tensors(value))
            key = argument, appearance(other)[argument], sizes
            if key not in known and appearance(other)[argument] != appearance(case).get(argument, op.default(argument)):
                known.add(key)
                yield argument, other


@pytest.mark.rotates
@pytest.mark.parametrize("case", ALL, ids=str)
def test_what_another_case_gives_agrees_or_raises(case: Case):
    """An argument that a mode ignores would change nothing where the reference reads it."""
    for argument, other in donors(case):
        changed = {argument: other.arguments(DOUBLE)[argument]}
        got = outcome(case, **changed)
        if not isinstance(got, list):
            assert isinstance(got, OperatorError) or lies_nowhere(got), argument
            continue
        with suppress(Undocumented):
            require_agreement(case.name, case.arguments(DOUBLE) | changed, DOUBLE)
