"""What torch knows of tensors and sizes and does not say; arguments and results of calls as trees."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary as WeakTensors

__all__ = [
    "WeakTensors",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]  # of torch, as is

aten = torch.ops.aten


def leaves(*arguments: Any) -> list[Any]:
    """What stands in arguments or results of calls, in lists, tuples and mappings: quicker than torch's trees."""
    found: list[Any] = []
    for each in arguments:
        if isinstance(each, (list, tuple)):
            found.extend(leaves(*each))
        elif isinstance(each, dict):
            found.extend(leaves(*each.values()))
        else:
            found.append(each)
    return found


def map_only(kinds: type | tuple[type, ...], change: Callable[[Any], Any], argument: Any) -> Any:
    """Arguments or results of calls with those of their `leaves` changed that are of some kinds."""
    if isinstance(argument, tuple):
        return tuple([map_only(kinds, change, each) for each in argument])
    if isinstance(argument, list):
        return [map_only(kinds, change, each) for each in argument]
    if isinstance(argument, dict):
        return {name: map_only(kinds, change, each) for name, each in argument.items()}
    return change(argument) if isinstance(argument, kinds) else argument


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors, fake ones too, are views of one storage."""
    return storage_of(x) == storage_of(y)


def storage_of(x: torch.Tensor) -> int:
    """Which storage a tensor, a fake one too, is a view of. Private: `torch.UntypedStorage._cdata`."""
    return x.untyped_storage()._cdata


_MOST_NUMBERS = 256


_NUMBERS = frozenset({torch.int32, torch.int64, torch.float32})


def held_by(node: fx.Node) -> Any:
    """What a `get_attr` node reads; None where the graph has no module, or the module no such attribute."""
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def constant_numbers(node: fx.Node) -> tuple[float, ...] | None:
    """The numbers of a small tensor that the code itself writes down; else None.

    A graph holds it as an attribute and copies it wherever it is read; Parameters and buffers, which others may change,
    are read as they are.
    Private: `torch._subclasses.fake_tensor.FakeTensor.constant`, which keeps the numbers of a constant under fakes.
    """
    if any(user.target is not aten.lift_fresh_copy.default for user in node.users):
        return None
    found = held_by(node)
    if isinstance(found, FakeTensor):
        found = found.constant
    if not isinstance(found, torch.Tensor) or found.is_complex():
        return None
    if found.numel() > (_MOST_NUMBERS if found.dtype in _NUMBERS else 1):
        return None
    with unset_fake_temporarily():
        return tuple(found.detach().reshape(-1).tolist())


def memory_order(x: torch.Tensor) -> list[int]:
    """Dims of `x` from the outermost in memory to the innermost, as elementwise results keep them.

    Private: `torch._prims_common.compute_elementwise_output_logical_to_physical_perm`.
    """
    return list(compute_elementwise_output_logical_to_physical_perm(x)[0])


def known_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on symbolic sizes holds for all of them.

    Private: `torch.fx.experimental.symbolic_shapes.statically_known_true`.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def hint(size: Any) -> int:
    """A size, of the example where it is symbolic."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known: Any = size.node.hint
    return int(known) if known is not None else 1


def count(x: torch.Tensor) -> int:
    """How many elements a tensor has, for the sizes of the example where they are symbolic."""
    found: Any = x.numel()
    return found if type(found) is int else math.prod(map(hint, x.shape))


def told_apart(values: Iterable[Any]) -> list[Any]:
    """The values, those that are there already as tensors of their own, for what knows a tensor by its identity."""
    seen, found = set[int](), list[Any]()
    for value in values:
        found.append(value.detach() if isinstance(value, torch.Tensor) and id(value) in seen else value)
        seen.add(id(value))
    return found
