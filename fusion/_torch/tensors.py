"""Properties that torch records of tensors, sizes, and attributes of graphs."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary as WeakTensors

__all__ = ["WeakTensors", "is_traceable_wrapper_subclass"]  # re-exported from torch

aten = torch.ops.aten


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if `x` and `y`, fake or real, are views of one storage."""
    return storage_of(x) == storage_of(y)


def storage_of(x: torch.Tensor) -> int:
    """Return the address of the storage object of `x`, fake or real. Private: `torch.UntypedStorage._cdata`."""
    return x.untyped_storage()._cdata


_MOST_NUMBERS = 256


_NUMBERS = frozenset({torch.int32, torch.int64, torch.float32})


def attribute_of(node: fx.Node) -> Any:
    """Return the attribute that a `get_attr` node reads, or a `call_module` node calls.

    None where its graph has no module, or no such attribute.
    """
    attribute: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part, None)
    return attribute


def constant_numbers(node: fx.Node) -> tuple[float, ...] | None:
    """Return the numbers of a small constant tensor that `node` reads, written in the model's code; else None.

    A constant is an attribute of the graph that every user copies; Parameters and buffers, which may change, are read
    without a copy.
    Private: `torch._subclasses.fake_tensor.FakeTensor.constant`, the numbers of a constant under a fake mode.
    """
    if any(user.target is not aten.lift_fresh_copy.default for user in node.users):
        return None
    constant = attribute_of(node)
    if isinstance(constant, FakeTensor):
        constant = constant.constant
    if not isinstance(constant, torch.Tensor) or constant.is_complex():
        return None
    if constant.numel() > (_MOST_NUMBERS if constant.dtype in _NUMBERS else 1):
        return None
    with unset_fake_temporarily():
        return tuple(constant.detach().reshape(-1).tolist())


def memory_order(x: torch.Tensor) -> list[int]:
    """Return the dims of `x` from the outermost in memory to the innermost, as elementwise results keep them.

    Private: `torch._prims_common.compute_elementwise_output_logical_to_physical_perm`.
    """
    return list(compute_elementwise_output_logical_to_physical_perm(x)[0])


def known_true(condition: bool | torch.SymBool) -> bool:
    """Return True if `condition` is proven for all values of symbolic sizes.

    Private: `torch.fx.experimental.symbolic_shapes.statically_known_true`.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def hint(size: Any) -> int:
    """Return `size` as an int, that of the example inputs where it is symbolic; 1 where there is none."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known: Any = size.node.hint
    return int(known) if known is not None else 1


def count(x: torch.Tensor) -> int:
    """Count the elements of `x`, by the sizes of the example inputs where they are symbolic."""
    elements: Any = x.numel()
    return elements if type(elements) is int else math.prod(map(hint, x.shape))


def byte_count(x: torch.Tensor) -> int:
    """Count the bytes of the elements of `x`, by the sizes of the example inputs where they are symbolic."""
    return count(x) * x.element_size()


def as_distinct(values: Iterable[Any]) -> list[Any]:
    """Return `values` with every repeated tensor detached, so that no two tensors are the same object."""
    seen, result = set[int](), list[Any]()
    for value in values:
        result.append(value.detach() if isinstance(value, torch.Tensor) and id(value) in seen else value)
        seen.add(id(value))
    return result
