"""Nodes of a graph that compute symbolic sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion.graph import dim_of
from fusion.language import Refused


class SizeNodes:
    """Nodes of `source` that compute symbolic sizes, existing or inserted.

    Sizes that follow from the inputs are computed before all other nodes: a node of the graph that computes the same
    size may be too late for a reader, and is used only for sizes that the inputs do not determine.
    """

    def __init__(self, source: fx.Graph) -> None:
        self._source = source
        self._nodes: dict[Any, fx.Node] = {}
        self._computed: dict[Any, fx.Node] = {}
        self._tensors: dict[Any, tuple[fx.Node, int]] = {}
        self._last: fx.Node | None = None  # the last of the inputs and of the nodes inserted behind them
        for node in source.nodes:
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                (self._nodes if node.op == "placeholder" else self._computed).setdefault(dim_of(val), node)
            elif isinstance(val, torch.Tensor) and node.op == "placeholder":
                for axis, size in enumerate(val.shape):
                    self._tensors.setdefault(dim_of(size), (node, axis))
            if node.op == "placeholder":
                self._last = node
        self._given = frozenset((*self._nodes, *self._tensors))

    def node(self, size: torch.SymInt) -> fx.Node | int:
        """Return the node that computes `size`, inserted where there is none, or the int that it is."""
        dim = dim_of(size)
        if isinstance(dim, int):
            return dim
        if dim not in self._nodes:
            self._nodes[dim] = self._make(dim)
        return self._nodes[dim]

    def can_make(self, dim: Any) -> bool:
        """Return True if the size `dim` is a number, is computed already, or is built from sizes that are."""
        known = isinstance(dim, int) or dim.is_Integer or dim in self._computed or self._is_given(dim)
        joined = None if known else _joined(dim)
        return known or (joined is not None and all(map(self.can_make, joined[1])))

    def _is_given(self, dim: Any) -> bool:
        """Return True if `dim` is a size of an input, an int, or a sum or product of such sizes."""
        if dim in self._given or getattr(dim, "is_Integer", False):
            return True
        joined = _joined(dim)
        return joined is not None and all(map(self._is_given, joined[1]))

    def _make(self, dim: Any) -> fx.Node:
        given = self._is_given(dim)
        if dim in self._tensors:
            return self._call(torch.ops.aten.sym_size.int, self._tensors[dim], given)
        if not given and dim in self._computed:
            return self._computed[dim]
        joined = _joined(dim)
        if joined is None:
            raise Refused("the symbolic size {dim} is not among the sizes of the graph", {"dim": dim})
        join, sizes = joined
        parts: Any = [int(part) if part.is_number else self._nodes.get(part) or self._make(part) for part in sizes]
        return reduce(lambda left, right: self._call(join, (left, right), given), parts)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], given: bool) -> fx.Node:
        """Insert a call with its size: behind the inputs if `given`, else at the insertion point of the graph."""
        if not given or self._last is None:
            made = self._source.call_function(target, args)
        else:
            with self._source.inserting_after(self._last):
                made = self._last = self._source.call_function(target, args)
        made.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
        return made


def _joined(dim: Any) -> tuple[Callable[..., Any], Sequence[Any]] | None:
    """Split `dim` into the operator and the operands of a sum, a product or an integer power; None for others."""
    import sympy

    if dim.func is sympy.Pow and dim.exp.is_Integer and dim.exp > 0:
        return operator.mul, (dim.base,) * int(dim.exp)
    if dim.func not in (sympy.Mul, sympy.Add):
        return None
    return operator.mul if dim.func is sympy.Mul else operator.add, dim.args
