"""Let calls read Parameters as these are stored, instead of copies in another order or storage format.

    op(format_cast(clone(t(w))))   →   op(t(w)): nothing is prepared
    op(stack(t(v), t(w)))          →   op(mT(clone(mT(stack(t(v), t(w)))))): the clone has v and w as they are stored

A host has no storage formats, and decompositions accept any strides; on a chip an operator must declare that it reads
an argument in either format (`Operator.either`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.fakes import run_on_fakes
from fusion._torch.nested import leaves
from fusion._torch.operators import OpOverload, short_name
from fusion._torch.tensors import shares_memory
from fusion.facts import Facts
from fusion.graph.aliasing import is_returned, is_written
from fusion.graph.launches import is_view
from fusion.graph.origin import inherit
from fusion.graph.parameter_only import derived
from fusion.operators import operator_of
from fusion.stages.prepare.adjacent_parameters import JOINS, order_of, parts

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default})


def read_as_stored(source: fx.Graph, facts: Facts, on_chip: bool) -> None:
    """Rewrite `source` in place so that as little as possible of what it computes from Parameters is a copy.

    `on_chip` is True for an NPU, where operators decide about storage formats and strides; False for a host.
    """
    if not facts.parameters:
        return
    fixed = derived(source, facts.parameters)
    for node in reversed(source.nodes):
        if node not in fixed or "fusion" not in node.meta or is_written(node) or is_returned(node):
            continue
        if node.target is aten.clone.default or short_name(node.target) == "npu_format_cast":
            _read_through(source, node, on_chip)
        elif node.target in JOINS and parts(node) is None:
            _join_in_memory_order(source, node, on_chip)


def _read_through(source: fx.Graph, copied: fx.Node, on_chip: bool) -> None:
    """Erase the copy `copied`, if all its readers accept the strides and the format of its input."""
    stored = copied.all_input_nodes[0]
    vals = _seen_through(copied, stored.meta["val"], on_chip)
    if vals is None:
        return
    for view, val in vals.items():
        view.meta["val"] = val
    copied.replace_all_uses_with(stored)
    source.erase_node(copied)


def _join_in_memory_order(source: fx.Graph, join: fx.Node, on_chip: bool) -> None:
    """Join Parameters in the order of their own memory, if they then follow each other in the result.

    join [E, H, I]   →   clone(permute(join)) [E, I, H], permuted back
    """
    order = order_of(join)
    back = [order.index(dim) for dim in range(len(order))]
    outer = join.meta["val"].permute(order)
    inner = outer.contiguous()
    vals = None if order == sorted(order) else _seen_through(join, inner.permute(back), on_chip)
    if vals is None:
        return
    readers = list(join.users)
    permuted = _added(source, join, aten.permute.default, (join, order), outer)
    stored = _added(source, permuted, aten.clone.default, (permuted,), inner, memory_format=torch.contiguous_format)
    if parts(stored) is None:
        source.erase_node(stored)
        source.erase_node(permuted)
        return
    restored = _added(source, stored, aten.permute.default, (stored, back), inner.permute(back))
    for reader in readers:
        reader.replace_input_with(join, restored)
    for view, val in vals.items():
        view.meta["val"] = val


def _added(
    source: fx.Graph, behind: fx.Node, target: OpOverload, args: tuple[Any, ...], val: torch.Tensor, **kwargs: Any
) -> fx.Node:
    """Insert a call behind the node `behind`, attributed to the same rewrite, with the fake tensor `val`."""
    with source.inserting_after(behind):
        node = source.call_function(target, args, kwargs)
    inherit(node, behind)
    node.meta |= {"val": val, "fusion": behind.meta["fusion"]}
    return node


def _seen_through(node: fx.Node, val: torch.Tensor, on_chip: bool) -> dict[fx.Node, torch.Tensor] | None:
    """Return the fakes that the views of `node` get once it has the strides of `val`; None if a reader rejects them.

    `on_chip` is as in `read_as_stored`.
    """
    vals: dict[fx.Node, torch.Tensor] = {}
    for reader in node.users:
        if "fusion" not in reader.meta:
            return None
        if reader.op == "call_function" and is_view(reader.target) and reader.target is not operator.getitem:
            inner = _view_of(reader, node, val)
            below = None if inner is None else _seen_through(reader, inner, on_chip)
            if inner is None or below is None:
                return None
            vals |= {reader: inner, **below}
        elif not _reads_as_stored(reader, node, val, on_chip):
            return None
    return vals


def _view_of(view: fx.Node, node: fx.Node, val: torch.Tensor) -> torch.Tensor | None:
    """Return the fake of `view` once its operand `node` is `val`; None where it would be a copy."""
    target: Any = view.target
    args, kwargs = map_arg((view.args, view.kwargs), lambda each: val if each is node else each.meta["val"])
    try:
        result = run_on_fakes(target, args, kwargs)
    except (RuntimeError, ValueError):  # no view has such strides
        return None
    return result if isinstance(result, torch.Tensor) and shares_memory(result, val) else None


def _reads_as_stored(reader: fx.Node, node: fx.Node, val: torch.Tensor, on_chip: bool) -> bool:
    """Return True if the call `reader` can read `node` in ND with the strides of `val` at no great cost.

    On an NPU (`on_chip`) the operator must declare each of its arguments that contains `node` as `either`. On a host
    any known operator or matrix product will do too, if `val` has at most 2 dims or a last stride of 1.
    """
    called = operator_of(reader.target)
    given = called.bind(reader.args, reader.kwargs) if called else {}
    if called and all(name in called.either for name, each in given.items() if node in leaves(each)):
        return True
    # a CPU was measured to multiply 14 times slower by a batch of transposed matrices in 16 bits
    is_in_rows = val.dim() <= 2 or val.stride(-1) == 1
    return not on_chip and is_in_rows and (called is not None or reader.target in _PRODUCTS)
