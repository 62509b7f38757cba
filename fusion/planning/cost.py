"""cost = launch + max(bytes / bandwidth, flops / compute) per kernel: static figures of the target, no measurement."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.nested import leaves
from fusion._torch.operators import OpOverload, schema_of, short_name
from fusion._torch.tensors import byte_count, count, hint
from fusion.graph.launches import is_data_dtype, is_reshaping_copy, is_view
from fusion.operators import operator_of
from fusion.planning.target import Target

# Kernels that the decomposition of a composite operator launches on an NPU.
_COMPOSITES = {
    "aten::rms_norm": 6, "aten::_fused_rms_norm": 6, "aten::einsum": 2, "aten::linear": 1,
    "aten::scaled_dot_product_attention": 5, "aten::_scaled_dot_product_flash_attention_for_cpu": 5,
}  # fmt: skip
_BEHIND = 1e-3  # tie-break: of two calls that move equal bytes, the one with fewer flops is cheaper
_COMPLEX = 6  # kernels of a complex product: the vector unit needs four products and two sums


def call_cost(
    target: Any, inputs: Iterable[Any], result: Any, machine: Target, flops: float = 0.0, between: float = 0
) -> float:
    """Predict the microseconds of one call on `machine`: launches, the longer of moving and computing, a part of the
    shorter.

    Args:
        target: the operator.
        inputs: the tensors that it reads.
        result: its result.
        machine: the target.
        flops: its multiplications and additions.
        between: bytes that it moves between its kernels; negative for bytes of its inputs that it does not read.
    """
    if is_view(target):
        return 0.0
    kernels = _kernels(target, result)
    moved = between + sum(_bytes(each) for each in leaves(*inputs, result))
    moving, computing = moved / machine.bandwidth, flops / machine.compute
    return kernels * machine.launch + max(moving, computing) + _BEHIND * min(moving, computing)


def _kernels(target: Any, result: Any) -> int:
    """Predict the number of kernels that a call of `target` with this `result` launches on an NPU."""
    kernels = _COMPOSITES.get(schema_of(target).name, 1) if isinstance(target, OpOverload) else 1
    return kernels * _COMPLEX if isinstance(result, torch.Tensor) and result.is_complex() else kernels


def node_surplus(node: fx.Node, machine: Target) -> float:
    """Predict the microseconds of launches by which `node_cost` is too high if `machine` runs the call as one kernel.

    Greater than 0 for products, attention and complex arithmetic; 0 for norms, which stay one call when fused.
    """
    target, result = node.target, node.meta.get("val")
    if not has_flops(target) and not (isinstance(result, torch.Tensor) and result.is_complex()):
        return 0.0
    return 0.0 if is_view(target) else (_kernels(target, result) - 1) * machine.launch


def node_cost(node: fx.Node, machine: Target) -> float:
    """Predict the microseconds that the call `node` of the model takes on `machine`, see `call_cost`."""
    inputs, result = _operands(node)
    if not has_flops(node.target):
        target = torch.ops.aten.clone.default if is_reshaping_copy(node) else node.target
        return call_cost(target, inputs, result, machine)
    args = _vals(node.args)
    between = _scores_moved(node.target, args)
    return call_cost(node.target, inputs, result, machine, aten_flops(node.target, args, result), between)


@dataclass(frozen=True)
class Price:
    """Predicted microseconds of a call, and the bytes that it moves."""

    us: float
    bytes: float


def price(node: fx.Node, machine: Target) -> Price:
    """Predict time and traffic of the call `node` on `machine`: a call of the model, or a fused operator."""
    inputs, result = _operands(node)
    moved = sum(_bytes(each) for each in leaves(*inputs, result))
    operator = operator_of(node.target)
    if operator is None:
        between = _scores_moved(node.target, _vals(node.args)) - _omitted(node)
        return Price(node_cost(node, machine) - _omitted(node) / machine.bandwidth, moved + between)
    args, kwargs = _vals((node.args, node.kwargs))
    skipped = operator.skipped(args, kwargs)
    us = call_cost(node.target, inputs, result, machine, operator.work(args, kwargs), -skipped)
    return Price(us, moved - skipped)


_GATHERS = frozenset({"embedding", "index_select", "gather", "index"})


def _omitted(node: fx.Node) -> int:
    """Count the bytes of its first operand that `node` does not read, if it gathers some of its elements."""
    if short_name(node.target) not in _GATHERS:
        return 0
    return max(0, _bytes(node.all_input_nodes[0].meta.get("val")) - _bytes(node.meta.get("val")))


def joint_cost(nodes: Collection[fx.Node], machine: Target) -> float:
    """Predict the least microseconds of the calls `nodes` as one kernel on `machine`: one launch, operands from outside
    read once, results for outside written once, the same flops.
    """
    inside = set(nodes)
    read = {each: None for node in nodes for each in node.all_input_nodes if each not in inside}
    written = [node for node in nodes if not inside.issuperset(node.users)]
    moved = sum(_bytes(each) for each in leaves(*(each.meta.get("val") for each in (*read, *written))))
    flops = sum(aten_flops(each.target, _vals(each.args), each.meta.get("val")) for each in nodes)
    return machine.launch + max(moved / machine.bandwidth, flops / machine.compute)


def _operands(node: fx.Node) -> tuple[list[Any], Any]:
    """Return the fake results of the nodes that `node` reads, and that of `node`."""
    return [each.meta.get("val") for each in node.all_input_nodes], node.meta.get("val")


def _vals(args: Any) -> Any:
    """Replace the nodes in `args` by their fake results."""
    return map_arg(args, lambda each: each.meta.get("val"))


_LEFT = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "mv": 0, "_int_mm": 0, "addmm": 1, "baddbmm": 1}
"""Products, with the position of the left operand, over whose last dim they sum."""


@cache
def has_flops(target: Any) -> bool:
    """Return True if `target` is a product or an attention of PyTorch, whose flops count."""
    name = short_name(target)
    return name in _LEFT or name == "einsum" or "scaled_dot_product" in name


def aten_flops(target: Any, args: Sequence[Any], result: Any) -> float:
    """Count the multiplications and additions of a product or attention of PyTorch; 0 for all other calls."""
    result = result[0] if isinstance(result, (tuple, list)) and result else result
    if not has_flops(target) or not isinstance(result, torch.Tensor):
        return 0.0
    name = short_name(target)
    if name in _LEFT:
        left = args[_LEFT[name]]
        work = 2.0 * count(result) * hint(left.shape[-1])
        return work / 2 if left.dtype == torch.int8 else work  # int8 products run at twice the rate
    if name == "einsum" and len(args[1]) == 2:
        return 2.0 * _labelled(args[0], args[1])
    if "scaled_dot_product" in name:
        query, key = args[:2]
        return 2.0 * hint(key.shape[-2]) * (count(query) + count(result))
    return 0.0


def _scores_moved(target: Any, args: Sequence[Any]) -> int:
    """Count the bytes of scores that PyTorch's attention moves: two products, a mask and a softmax in memory."""
    if "scaled_dot_product" not in short_name(target):
        return 0
    query, key = args[:2]
    return 6 * count(query) // hint(query.shape[-1]) * hint(key.shape[-2]) * query.element_size()


def _labelled(equation: str, operands: Sequence[torch.Tensor]) -> int:
    """Multiply the sizes of all labels of an einsum `equation` over `operands`, without the dims of "..."."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        shape = operand.shape[-len(term.replace("...", "")) :] if "..." in term else operand.shape
        sizes |= {label: hint(size) for label, size in zip(term.replace("...", ""), shape, strict=False)}
    return math.prod(sizes.values())


def _bytes(val: Any) -> int:
    if not isinstance(val, torch.Tensor) or not is_data_dtype(val.dtype):
        return 0
    return byte_count(val)
