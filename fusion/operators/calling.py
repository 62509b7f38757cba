"""Adapters from functions whose parameters name some arguments to functions with the signature of a schema.

A decomposition that writes serves two operators, one in place and one functional: its parameter `put` is a function
that writes rows into a tensor, or that returns a copy of the tensor with the rows. The decomposition returns the
results of the operator, and after them each written tensor that is not among the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from fusion.errors import OperatorError
from fusion.operators.cache.pages import write, written

Given = Mapping[str, Any]
"""The arguments of a call by name, defaults included."""


def parsed(schema: str) -> Any:
    """Parse `schema` into PyTorch's FunctionSchema."""
    return torch._C.parse_schema(schema)  # pyright: ignore[reportPrivateUsage]


Admit = Callable[[Given], Given]
"""Function of all arguments of a call that returns the computed ones; raises OperatorError for a rejected call."""


Explain = Callable[[Given], Exception | None]
"""Function of all arguments of a call that raised, which returns a more telling error, or None if it has none."""


def fallback(
    schema: str, compute: Callable[..., Any], copied: Sequence[str], admit: Admit, explain: Explain
) -> Callable[..., Any]:
    """Return a function with the signature of `schema` that computes an operator by `compute`.

    Args:
        schema: the schema of the operator.
        compute: the decomposition; a parameter `put` makes it one that writes.
        copied: arguments into copies of which it writes; empty if it writes into the arguments themselves.
        admit: function of the arguments of a call that returns those to compute with, or raises.
        explain: function of the arguments that returns a better error for one of PyTorch, or None.
    """
    call, count = _explained(by_name(compute), explain), len(parsed(schema).returns)
    if "put" not in signature(compute).parameters:
        return _by_schema(schema, lambda given: call(admit(given)))

    def computed(given: Given) -> Any:
        given = admit(given)
        if not copied:
            return _results(call(given, put=write)[:count])
        originals = tuple(given[name] for name in copied)  # a mode may not write one of them: its copy is made here
        made: Sequence[Tensor] = call(given, put=written)
        return _results(tuple(each.clone() if any(each is x for x in originals) else each for each in made))

    return _by_schema(schema, computed)


def meta(schema: str, outputs: Callable[..., Any], copied: Sequence[str], admit: Admit) -> Callable[..., Any]:
    """Return a function with the signature of `schema` that returns empty results.

    Args:
        schema: the schema of the operator.
        outputs: function that makes the results that are no arguments; they come first, before arguments that the
            schema returns.
        copied: arguments of which the operator returns copies, as last results.
        admit: function of the arguments of a call that returns those to compute with, or raises.
    """
    call, returned = by_name(outputs), _returned(schema)

    def promised(given: Given) -> Any:
        made = call(admit(given))
        arguments = (given[name] for name in returned)
        copies = (torch.empty_like(given[name]) for name in copied)
        return _results((*(made if isinstance(made, tuple) else (made,)), *arguments, *copies))

    return _by_schema(schema, promised)


def named(function: Callable[..., Any]) -> frozenset[str]:
    """Return the arguments of an operator that `function` has as parameters: all but `put` and `given`."""
    try:
        parameters = signature(function).parameters
    except ValueError:
        raise OperatorError(
            f"declaring an operator by {function!r}: it names no arguments; wrap it in a function that does, such as "
            "`lambda x: torch.empty_like(x)`"
        ) from None
    return frozenset(parameters) - {"put", "given"}


def takes_mapping(function: Callable[..., Any]) -> bool:
    """Return True if `function` has a parameter `given`, which receives the arguments of an operator as one mapping."""
    return "given" in signature(function).parameters


def functional_schema(schema: str, name: str) -> str:
    """Return the schema of the functional form `name` of `schema`, which mutates no argument.

    In place of each mutated argument among the results it returns a copy; if `schema` returns none, the copies are
    further results.
    """
    arguments, _, results = schema.partition("(")[2].rpartition(" -> ")
    count = len(parsed(schema).returns) + (0 if "!" in results else arguments.count("!"))
    tensors = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"{name}({re.sub(r'[(][a-z]![)]', '', arguments)} -> {tensors}"


def _returned(schema: str) -> list[str]:
    """List the arguments that `schema` returns, in the order of its results."""
    names = {frozenset(each.alias_info.before_set): each.name for each in parsed(schema).arguments if each.alias_info}
    return [names[frozenset(each.alias_info.before_set)] for each in parsed(schema).returns if each.alias_info]


def _results(made: tuple[Any, ...]) -> Any:
    """Return the results `made` as operators do: None for none, the only one, or a tuple of several."""
    return made if len(made) > 1 else next(iter(made), None)


def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one mapping of arguments that calls `function` with the arguments that it has as parameters.

    A parameter `given` receives the mapping itself.
    """
    names = list(signature(function).parameters)

    def called(given: Given, **more: Any) -> Any:
        known = {**given, "given": given, **more}
        return function(**{name: known[name] for name in names})

    return called


def _explained(call: Callable[..., Any], explain: Explain) -> Callable[..., Any]:
    """Return `call` with errors of PyTorch replaced by what `explain` returns for the arguments; kept if that is
    None.
    """

    def explained(given: Given, **more: Any) -> Any:
        try:
            return call(given, **more)
        except (RuntimeError, IndexError, ZeroDivisionError) as error:
            better = explain(given)
            if better is None:
                raise
            raise better from error

    return explained


def _by_schema(schema: str, compute: Callable[[Given], Any]) -> Callable[..., Any]:
    """Return a function with the signature of `schema` that passes its arguments, with defaults, to `compute` as one
    mapping."""
    taken = Signature([_parameter(argument) for argument in parsed(schema).arguments])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = taken.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute({name: coded(value) for name, value in bound.arguments.items()})

    function.__signature__ = taken  # pyright: ignore[reportFunctionMemberAccess]
    return function


def coded(value: Any) -> Any:
    """Return torch's number of a dtype, as schemas have for dtypes; any other `value` unchanged."""
    return _CODES.get(value, value) if isinstance(value, torch.dtype) else value


_CODES: Mapping[torch.dtype, int] = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.qint8: 12, torch.quint8: 13, torch.qint32: 14, torch.bfloat16: 15,
    torch.quint4x2: 16,
}  # fmt: skip


def _parameter(argument: Any) -> Parameter:
    kind = Parameter.KEYWORD_ONLY if argument.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else Parameter.empty
    return Parameter(argument.name, kind, default=default)
