"""Launches: classify calls of an FX graph into views, kernels that move data, and arithmetic of positions and sizes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import leaves
from fusion._torch.operators import short_name
from fusion._torch.tensors import shares_memory
from fusion.graph.aliasing import is_write, reserves

_VIEWS = {
    "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select",
    "split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "unfold", "diagonal", "chunk", "narrow",
    "view_as", "unflatten", "flatten", "expand_as", "swapaxes", "movedim", "_reshape_alias", "lift_fresh_copy",
    "view_as_real", "view_as_complex", "real", "imag", "sym_size", "sym_stride", "_assert_tensor_metadata",
    "_assert_scalar",
}  # fmt: skip
_VIEW_OR_COPY = {"reshape", "flatten"}  # composites that only graphs of torch.export have


@cache
def is_view(target: Any) -> bool:
    """Return True if a call of `target` launches no kernel: a view, an alias, an assertion, or memory without
    content.
    """
    if target is operator.getitem or reserves(target):
        return True
    return short_name(target).rstrip("_") in _VIEWS


def is_contiguous_copy(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of `target` with `kwargs` copies a tensor to make it contiguous."""
    return target is torch.ops.aten.clone.default and kwargs.get("memory_format") is torch.contiguous_format


def is_data(val: Any) -> bool:
    """Return True if a tensor of the result `val` has floating-point, complex or int8 dtype, as data has."""
    if isinstance(val, torch.Tensor):
        return is_data_dtype(val.dtype)
    return any(is_data_dtype(each.dtype) for each in leaves(val) if isinstance(each, torch.Tensor))


@cache
def is_data_dtype(dtype: torch.dtype) -> bool:
    """Return True if tensors of `dtype` hold floating-point, complex or int8 data, not positions, masks or counts."""
    return dtype.is_floating_point or dtype.is_complex or dtype == torch.int8


def is_launch(node: fx.Node) -> bool:
    """Return True if `node` is a live kernel call that reads or returns data, as `is_data` defines it."""
    if not is_call(node):
        return False
    return is_data(node.meta.get("val")) or any(is_data(each.meta.get("val")) for each in node.all_input_nodes)


def is_bookkeeping(node: fx.Node) -> bool:
    """Return True if `node` is a live kernel call that reads and returns only tensors of positions, masks or counts."""
    return is_call(node) and not is_launch(node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_call(node: fx.Node) -> bool:
    """Return True if `node` is a live call that does more than view memory or compute a scalar."""
    views = is_view(node.target) and not is_reshaping_copy(node)
    if views or node.op not in ("call_function", "call_method", "call_module"):
        return False
    scalar = isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
    return bool(node.users or is_write(node)) and not scalar


def is_reshaping_copy(node: fx.Node) -> bool:
    """Return True if `node`, a `reshape` or `flatten` of the model, copies: its result does not share the input's
    memory.
    """
    if short_name(node.target) not in _VIEW_OR_COPY or "fusion" in node.meta:
        return False
    return not shares_memory(node.meta["val"], node.all_input_nodes[0].meta["val"])
