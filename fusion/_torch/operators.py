"""Operators: types, schemas, kernels and decompositions."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["OpOverload", "OpOverloadPacket"]  # re-exported from torch

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
"""Composite operators that are not decomposed while a model is captured, because rules are written with them."""


def higher_order(target: Any) -> str:
    """Return the name of an operator that calls graphs, such as "cond"; "" for any other `target`.

    Private: `torch._ops.HigherOrderOperator`.
    """
    return target.name() if isinstance(target, HigherOrderOperator) else ""


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of `op`. Private: `OpOverload._schema`."""
    return op._schema


def given(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Map the arguments of a call of `op` to the names of its schema; defaults are left out."""
    names = (each.name for each in schema_of(op).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Map all arguments of a call of `op` to the names of its schema, defaults included."""
    known = given(op, args, kwargs)
    return {each.name: known.get(each.name, each.default_value) for each in schema_of(op).arguments}


def short_name(target: Any) -> str:
    """Return the name of an operator without namespace and overload, such as "mm"; "" for any other `target`."""
    return schema_of(target).name.split("::")[-1] if isinstance(target, OpOverload) else ""


def has_in_place_form(target: Any) -> bool:
    """Return True if the overload `target` has one of the same name in the packet with "_" appended, as `add` has."""
    if not isinstance(target, OpOverload):
        return False
    packet = getattr(getattr(torch.ops, target.namespace), f"{short_name(target)}_", None)
    return target._overloadname in (packet.overloads() if packet is not None else ())


def is_random(target: Any) -> bool:
    """Return True if `target` is an operator that draws from a random generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_composite(op: OpOverload) -> bool:
    """Return True if torch decomposes `op` on every device. Private: `OpOverload._can_decompose`."""
    return op._can_decompose()


def has_kernel(operator: str, device: str) -> bool:
    """Return True if `operator` (`npu::npu_rms_norm`) has its own kernel for the dispatch key `device`, such as "CPU".

    Private: `torch._C._dispatch_has_kernel_for_dispatch_key`.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, device)


@cache
def core_table() -> dict[OpOverload, Callable[..., Any]]:
    """Return the decompositions to core aten, not to be mutated. Private: `torch._decomp.core_aten_decompositions`."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())  # pyright: ignore[reportReturnType]
