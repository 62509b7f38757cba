"""Serialisation of calls, plans and fake tensors as JSON; hashable keys of calls."""

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
"""Function of shape, strides, dtype and device that makes a fake tensor."""


class UnwrittenError(Exception):
    """A value has no lossless JSON."""


def written(value: Any) -> Any:
    """Encode `value` as JSON: values of JSON as they are, others as a list of their kind and parts.

    Raises:
        UnwrittenError: `value` has no lossless JSON, as a tensor of symbolic sizes has none.
    """
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
    """Decode JSON of `written`; `make` makes its tensors."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        shape, stride, dtype, device = rest
        return make(shape, stride, _torch_constant(dtype), torch.device(device))
    if kind == "dict":
        return {read(name, make): read(each, make) for name, each in rest}
    parts = [read(each, make) for each in rest]
    return _KINDS[kind](*parts)


def _torch_constant(name: str) -> Any:
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
    "torch": _torch_constant,
    "device": torch.device,
    "set": lambda *names: frozenset(names),
    "list": lambda *parts: list(parts),
    "tuple": lambda *parts: parts,
}
"""Decoders of the kinds of `written`; types and records only serve as keys, and have none."""


_THEMSELVES = frozenset(
    {int, bool, str, type(None), fx.Node, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types whose values are their own keys: most arguments of calls, tested first because all others cost more."""


def frozen(argument: Any) -> Hashable:
    """Return a hashable key of an argument: metadata of a tensor; type and value of a number, -0.0 apart from 0.0."""
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
