"""Operators: their types and schemas, kernels and decompositions."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["OpOverload", "OpOverloadPacket"]  # of torch, used as they are

aten = torch.ops.aten


COMPOSITES: tuple[OpOverload, ...] = (
    aten.linear.default,
    aten.matmul.default,
    aten.scaled_dot_product_attention.default,
    aten.softmax.int,
    aten.einsum.default,
    aten.rms_norm.default,
    aten.layer_norm.default,
    aten.repeat_interleave.self_int,
)
"""Composite operators that stay whole while a model is captured, because rules are written with them."""


def higher_order(target: Any) -> str:
    """The name of an operator that calls graphs, such as "cond"; "" for any other call.

    Private: `torch._ops.HigherOrderOperator`.
    """
    return target.name() if isinstance(target, HigherOrderOperator) else ""


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Name, arguments and writes of an operator. Private: `OpOverload._schema`."""
    return op._schema


def given(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the operator `op` by the names of its schema."""
    names = (each.name for each in schema_of(op).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, with the defaults of those that are not given."""
    known = given(op, args, kwargs)
    return {each.name: known.get(each.name, each.default_value) for each in schema_of(op).arguments}


def short_name(target: Any) -> str:
    """The name of an operator without namespace and overload, such as "mm"; "" for any other target of a call."""
    return schema_of(target).name.split("::")[-1] if isinstance(target, OpOverload) else ""


def is_random(target: Any) -> bool:
    """True if each call of an operator draws from a random generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_composite(op: OpOverload) -> bool:
    """True if torch makes `op` of other operators on every device. Private: `OpOverload._can_decompose`."""
    return op._can_decompose()


def has_kernel(operator: str, device: str) -> bool:
    """Whether an operator (`npu::npu_rms_norm`) has a kernel of its own for a dispatch key such as "CPU".

    Private: `torch._C._dispatch_has_kernel_for_dispatch_key`.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, device)


@cache
def core_table() -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions to core aten, not to be changed. Private: `torch._decomp.core_aten_decompositions`."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())  # pyright: ignore[reportReturnType]
