"""Calls, plans and fake tensors as JSON, and made again from it; calls as what may be compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx

from fusion._torch.operators import OpOverload
from fusion.graph import dim_of, dims_of
from fusion.language import Refused
from fusion.records import Input, Output, Plan, Step

Maker = Callable[..., torch.Tensor]
"""Gives a fresh fake tensor of a shape, strides, a dtype and a device."""


class UnwrittenError(Exception):
    """A value has no text that says all of it."""


def written(value: Any) -> Any:
    """A value as JSON: what JSON has as it is, else a list of its kind and what it is made of."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Input(name):
            return ["input", name]
        case Output(step, item):
            return ["output", step, item]
        case Step(target, args, kwargs, result, covered):
            return ["step", *map(written, (target, args, dict(kwargs), result, covered))]
        case Plan(steps, results, fakes, refusals, costs, uses):
            return ["plan", *map(written, (steps, results, fakes, dict(refusals), costs, uses))]
        case Refused():
            return ["refused", str(value)]
        case OpOverload():
            return ["operator", str(value)]
        case torch.Tensor():
            return ["tensor", _sizes(value.shape), _sizes(value.stride()), str(value.dtype), str(value.device)]
        case torch.dtype() | torch.memory_format() | torch.layout():
            return ["torch", str(value)]
        case torch.device():
            return ["device", str(value)]
        case dict():
            return ["dict", *([written(name), written(each)] for name, each in value.items())]
        case frozenset():
            return ["set", *sorted(map(str, value))]
        case list() | tuple():
            return ["tuple" if isinstance(value, tuple) else "list", *map(written, value)]
        case type():
            return ["type", f"{value.__module__}.{value.__qualname__}"]
        case _ if is_dataclass(value):
            return ["record", written(type(value)), *(written(getattr(value, each.name)) for each in fields(value))]
        case _:
            raise UnwrittenError


def _sizes(sizes: Any) -> list[int]:
    if not all(isinstance(each, int) for each in sizes):
        raise UnwrittenError
    return list(sizes)


def read(value: Any, make: Maker) -> Any:
    """What `written` has told, with tensors from `make`."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        shape, stride, dtype, device = rest
        return make(shape, stride, _of_torch(dtype), torch.device(device))
    if kind == "dict":
        return {read(name, make): read(each, make) for name, each in rest}
    parts = [read(each, make) for each in rest]
    return _KINDS[kind](*parts)


def _of_torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _operator(name: str) -> OpOverload:
    namespace, short, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), short), overload)


_KINDS: Mapping[str, Any] = {
    "input": Input,
    "output": Output,
    "step": Step,
    "plan": Plan,
    "refused": lambda text: Refused("{reason}", {"reason": text}),
    "operator": _operator,
    "torch": _of_torch,
    "device": torch.device,
    "set": lambda *names: frozenset(names),
    "list": lambda *parts: list(parts),
    "tuple": lambda *parts: parts,
}
"""How what `written` gives is made again; what is only told apart (types, records) never is."""


_THEMSELVES = frozenset(
    {int, bool, str, type(None), fx.Node, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types that are told apart by their values, most of what calls are given: asked first, as all others cost more."""


def frozen(argument: Any) -> Hashable:
    """What a call depends on, to compare and to keep: of tensors how they look, of numbers their type and sign too."""
    kind: Any = type(argument)
    if kind in _THEMSELVES:
        return kind, argument
    match argument:
        case torch.Tensor():
            return dims_of(argument.shape), dims_of(argument.stride()), argument.dtype, argument.device
        case list() | tuple():
            return tuple(map(frozen, argument))
        case Mapping():
            return tuple((name, frozen(each)) for name, each in sorted(argument.items()))
        case slice():
            return slice, frozen((argument.start, argument.stop, argument.step))
        case torch.SymInt():
            return dim_of(argument)
        case float() | complex() | torch.SymFloat() | torch.SymBool():  # 0.0 equals -0.0
            return type(argument), str(argument)
        case _:
            return type(argument), argument
