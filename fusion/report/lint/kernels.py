"""Kernels of a fused graph as linters see them: their inputs and readers behind views, and casts between floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import leaves
from fusion._torch.operators import short_name
from fusion._torch.tensors import count
from fusion.graph.aliasing import is_write
from fusion.graph.launches import is_call, is_reshaping_copy, is_view
from fusion.operators import operator_of

NARROW = (torch.float16, torch.bfloat16)
_CASTS = frozenset({"_to_copy", "convert_element_type"})


def kernels(source: fx.Graph) -> Iterator[fx.Node]:
    """Yield the live calls of `source` that launch kernels."""
    return (node for node in source.nodes if is_call(node))


def is_fused(node: fx.Node) -> bool:
    """Return True if `node` calls a fused operator."""
    return operator_of(node.target) is not None


def is_of_model(node: fx.Node) -> bool:
    """Return True if `node` is a call of the model that no rewrite replaced."""
    return "fusion" not in node.meta and not is_fused(node) and not is_write(node)


def kernel_of(node: fx.Node) -> fx.Node:
    """Return the call, or the input of the graph, that has the memory which `node` views."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """List the calls and inputs of the graph whose tensors `node` reads, behind views, each once."""
    return list(dict.fromkeys(kernel_of(each) for each in node.all_input_nodes if dtype_of(each) is not None))


def readers_of(node: fx.Node) -> list[fx.Node]:
    """List the calls that read the tensors of `node` behind views, each once; the output of the graph is one."""
    readers: dict[fx.Node, None] = {}
    for user in node.users:
        if _is_view(user):
            readers.update(dict.fromkeys(readers_of(user)))
        elif user.op == "output" or is_call(user):
            readers[user] = None
    return list(readers)


def calls_before(node: fx.Node) -> set[fx.Node]:
    """Return `node` and the calls that it is computed from."""
    needed: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.op == "call_function" and each not in needed:
            needed.add(each)
            waiting += each.all_input_nodes
    return needed


def _is_view(node: fx.Node) -> bool:
    is_tensor = isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
    return node.op == "call_function" and is_tensor and is_view(node.target) and not is_reshaping_copy(node)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of the result of `node`, of the first one of several; None if it is no tensor."""
    val: Any = node.meta.get("val")
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return first.dtype if isinstance(first, torch.Tensor) else None


def elements_of(node: fx.Node) -> int:
    """Count the elements of the result of `node`, of the largest one of several."""
    tensors = (each for each in leaves(node.meta.get("val")) if isinstance(each, torch.Tensor))
    return max(map(count, tensors), default=0)


def is_float(node: fx.Node) -> bool:
    """Return True if the result of `node` is a floating-point tensor."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def is_cast(node: fx.Node, source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if `node` casts a tensor from `source` to `target`."""
    if short_name(node.target) not in _CASTS or dtype_of(node) != target:
        return False
    return dtype_of(node.all_input_nodes[0]) == source


def widened(node: fx.Node) -> torch.dtype | None:
    """Return the 16-bit dtype that `node` casts to float32; None if it is no such cast."""
    return next((each for each in NARROW if is_cast(node, each, torch.float32)), None)


def plain(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without its module."""
    return str(dtype).removeprefix("torch.")
