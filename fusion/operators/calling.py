"""From a function that names the arguments that it uses to one that takes all arguments of an operator's schema.

A decomposition that writes is one function for two operators: it takes `put`, which writes into a tensor or makes a
copy with the rows in it, and gives the operator's results, then every tensor that it put rows into.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from fusion.operators.cache.pages import write, written

Given = Mapping[str, Any]
"""The arguments of a call by name, defaults included."""


def parsed(schema: str) -> Any:
    """The schema as PyTorch reads it."""
    return torch._C.parse_schema(schema)  # pyright: ignore[reportPrivateUsage]


Admit = Callable[[Given], Given]
"""From all arguments of a call to those that are computed; raises OperatorError for a call that is not."""


Explain = Callable[[Given], Exception | None]
"""From all arguments of a call that ended in an error to one that says more; None if there is nothing more to say."""


def fallback(
    schema: str, compute: Callable[..., Any], copied: Sequence[str], admit: Admit, explain: Explain
) -> Callable[..., Any]:
    """Return `compute` with the arguments of `schema`, writing into them, or into copies of those in `copied`."""
    call, count = _explained(by_name(compute), explain), len(parsed(schema).returns)
    if "put" not in signature(compute).parameters:
        return _by_schema(schema, lambda given: call(admit(given)))

    def computed(given: Given) -> Any:
        given = admit(given)
        if not copied:
            return _results(call(given, put=write)[:count])
        left = tuple(given[name] for name in copied)  # a mode may leave one alone: its copy is made here
        made: Sequence[Tensor] = call(given, put=written)
        return _results(tuple(each.clone() if any(each is x for x in left) else each for each in made))

    return _by_schema(schema, computed)


def meta(schema: str, outputs: Callable[..., Any], copied: Sequence[str], admit: Admit) -> Callable[..., Any]:
    """Return a function of empty results: `outputs`, arguments that `schema` returns, copies of those in `copied`."""
    call, returned = by_name(outputs), _returned(schema)

    def promised(given: Given) -> Any:
        made = call(admit(given))
        arguments = (given[name] for name in returned)
        copies = (torch.empty_like(given[name]) for name in copied)
        return _results((*(made if isinstance(made, tuple) else (made,)), *arguments, *copies))

    return _by_schema(schema, promised)


def named(function: Callable[..., Any]) -> frozenset[str]:
    """Arguments of an operator that `function` names."""
    return frozenset(signature(function).parameters) - {"put", "given"}


def takes_mapping(function: Callable[..., Any]) -> bool:
    """True if `function` takes the arguments of an operator as one mapping, `given`."""
    return "given" in signature(function).parameters


def functional_schema(schema: str, name: str) -> str:
    """The schema of `name`, which returns copies of what the one of `schema` writes: last, unless it returns them."""
    arguments, _, results = schema.partition("(")[2].rpartition(" -> ")
    count = len(parsed(schema).returns) + (0 if "!" in results else arguments.count("!"))
    tensors = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"{name}({re.sub(r'[(][a-z]![)]', '', arguments)} -> {tensors}"


def _returned(schema: str) -> list[str]:
    """Arguments that are results."""
    names = {frozenset(each.alias_info.before_set): each.name for each in parsed(schema).arguments if each.alias_info}
    return [names[frozenset(each.alias_info.before_set)] for each in parsed(schema).returns if each.alias_info]


def _results(made: tuple[Any, ...]) -> Any:
    """As an operator returns them: none, one, or several."""
    return made if len(made) > 1 else next(iter(made), None)


def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called with those of the arguments that it names; one that names `given` takes all of them."""
    names = list(signature(function).parameters)

    def called(given: Given, **more: Any) -> Any:
        known = {**given, "given": given, **more}
        return function(**{name: known[name] for name in names})

    return called


def _explained(call: Callable[..., Any], explain: Explain) -> Callable[..., Any]:
    """Return `call`, whose errors are those of `explain` where that has any."""

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
    """A function with the arguments of `schema`, which hands them to `compute` by name."""
    taken = Signature([_parameter(argument) for argument in parsed(schema).arguments])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = taken.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute({name: coded(value) for name, value in bound.arguments.items()})

    function.__signature__ = taken  # pyright: ignore[reportFunctionMemberAccess]
    return function


def coded(value: Any) -> Any:
    """Return torch's number of a dtype, as schemas name dtypes; any other value as it is."""
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
