"""Nodes that are computed from Parameters alone: equal at every call, so that they can be prepared once."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import leaves
from fusion._torch.operators import OpOverload, is_random
from fusion._torch.tensors import is_traceable_wrapper_subclass
from fusion._torch.tracing import dynamo_position
from fusion.graph import dims_of
from fusion.graph.aliasing import is_write, is_written
from fusion.graph.launches import is_view

Mark = tuple[tuple[Any, ...], torch.dtype]
_PURE = ("aten", "prims")  # operators of other libraries may communicate between processes


def is_wrapper(tensor: Any) -> bool:
    """Return True if `tensor` is a Parameter that wraps other tensors, as DTensor does: AOT autograd unwraps it."""
    return isinstance(tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor)


def marks(inputs: Sequence[Any]) -> tuple[Mark | None, ...]:
    """Return shape and dtype of each of Dynamo's `inputs` that is a Parameter; None for wrappers and all others."""
    parameters = [isinstance(each, torch.nn.Parameter) and not is_wrapper(each) for each in inputs]
    return tuple(_mark(each) if is_one else None for each, is_one in zip(inputs, parameters, strict=True))


def parameter_inputs(source: fx.Graph, marked: Sequence[Mark | None]) -> frozenset[str]:
    """Name the inputs that hold Parameters and that the graph does not write to.

    `marked` has the `marks` of Dynamo's inputs. AOT autograd records the position in Dynamo's inputs of each input,
    but not of the common base of several aliased inputs: shape and dtype must match as well.
    """
    positions = {node: dynamo_position(node) for node in source.find_nodes(op="placeholder")}
    at_position = {node: marked[at] for node, at in positions.items() if at is not None and at < len(marked)}
    pairs = [(node, mark) for node, mark in at_position.items() if mark is not None]
    return frozenset(node.name for node, mark in pairs if mark == _mark(node.meta["val"]) and not is_written(node))


def derived(source: fx.Graph, parameters: Collection[str], constants: bool = False) -> set[fx.Node]:
    """Return the `parameters`, and every node that pure, deterministic calls compute from them and constants alone.

    With `constants`, nodes that are computed from constants alone are returned as well.
    """
    result: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    for node in source.nodes:
        if node.op == "placeholder" and node.name in parameters and not is_written(node):
            result.add(node)
        read = node.all_input_nodes
        known = node.op == "call_function" and all(each in result or each in constant for each in read)
        if known and _is_repeatable(node):
            (constant if result.isdisjoint(read) else result).add(node)
    return result | constant if constants else result


def _mark(tensor: torch.Tensor) -> Mark:
    return tuple(tensor.shape), tensor.dtype


def _is_repeatable(node: fx.Node) -> bool:
    """Return True if `node` is a pure, deterministic call whose results are tensors of fixed shapes."""
    results = leaves(node.meta.get("val"))
    if not results or not all(isinstance(each, torch.Tensor) and _has_fixed_shape(each) for each in results):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or is_write(node):
        return False
    if is_random(node.target) or (is_view(node.target) and not node.all_input_nodes):
        return False  # random numbers, or memory without defined contents
    return node.target.namespace in _PURE or "fusion" in node.meta


def _has_fixed_shape(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in dims_of(tensor.shape))
