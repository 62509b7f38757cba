"""cost = launch + bytes / bandwidth per kernel: static figures of the target, no measurement."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from fusion._torch import OpOverload, schema_of, tree_leaves
from fusion.mutation import is_write
from fusion.target import Target

_VIEWS = {
    "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select",
    "split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "unfold", "diagonal", "chunk", "narrow",
    "view_as", "unflatten", "flatten", "expand_as", "swapaxes", "movedim", "_reshape_alias", "lift_fresh_copy",
    "view_as_real", "view_as_complex", "real", "imag", "empty", "new_empty", "empty_like", "sym_size", "sym_stride",
    "_assert_tensor_metadata", "_assert_scalar",
}  # fmt: skip
# A composite operator is no kernel: what its decomposition launches on an NPU.
_COMPOSITES = {
    "aten::rms_norm": 6, "aten::_fused_rms_norm": 6, "aten::einsum": 2, "aten::linear": 1,
    "aten::scaled_dot_product_attention": 5, "aten::_scaled_dot_product_flash_attention_for_cpu": 5,
}  # fmt: skip
_COMPLEX = 6  # no complex arithmetic in the vector unit: four products and two sums


def is_view(target: Any) -> bool:
    """Whether a call only gives another shape or name to memory that exists (or reserves memory)."""
    if target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and schema_of(target).name.split("::")[-1].rstrip("_") in _VIEWS


def is_contiguous_copy(node: fx.Node) -> bool:
    """Whether a node copies a tensor to make it contiguous."""
    wanted = node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target is torch.ops.aten.clone.default and wanted


def is_data(val: Any) -> bool:
    """Whether a result holds floating-point or quantised numbers (not positions, masks or counts)."""
    for each in tree_leaves(val):
        if isinstance(each, torch.Tensor) and (
            each.is_floating_point() or each.is_complex() or each.dtype == torch.int8
        ):
            return True
    return False


def is_launch(node: fx.Node) -> bool:
    """Whether a node is a live call on data: it makes or reads such numbers and is not a view, alias or getitem."""
    if not is_call(node):
        return False
    return is_data(node.meta.get("val")) or any(is_data(each.meta.get("val")) for each in node.all_input_nodes)


def is_bookkeeping(node: fx.Node) -> bool:
    """Whether a node is a live call on tensors of integers or booleans alone."""
    return is_call(node) and not is_launch(node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_call(node: fx.Node) -> bool:
    """Whether a node is live and does more than view memory or compute a size."""
    if node.op not in ("call_function", "call_method", "call_module") or is_view(node.target):
        return False
    scalar = isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
    return bool(node.users or is_write(node)) and not scalar


def call_cost(target: Any, inputs: Iterable[Any], result: Any, machine: Target) -> float:
    """Predicted microseconds of one call."""
    if is_view(target):
        return 0.0
    count = _COMPOSITES.get(schema_of(target).name, 1) if isinstance(target, OpOverload) else 1
    if isinstance(result, torch.Tensor) and result.is_complex():
        count *= _COMPLEX
    moved = sum(_bytes(each) for each in tree_leaves((list(inputs), result)))
    return count * machine.launch + moved / machine.bandwidth


def node_cost(node: fx.Node, machine: Target) -> float:
    """Predicted microseconds of one node of a user's graph."""
    if not is_launch(node):
        return 0.0
    inputs = [each.meta.get("val") for each in node.all_input_nodes]
    return call_cost(node.target, inputs, node.meta.get("val"), machine)


def _bytes(val: Any) -> int:
    if not isinstance(val, torch.Tensor) or not is_data(val):
        return 0
    sizes = (_hint(size) if isinstance(size, torch.SymInt) else size for size in val.shape)
    return math.prod(sizes) * val.element_size()


def _hint(size: torch.SymInt) -> int:
    hint: Any = size.node.hint
    return int(hint) if hint is not None else 1
