"""Layout: propagate the strides of fused results to their users, and copy where a user depends on the old strides."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.nested import leaves
from fusion._torch.tensors import hint
from fusion.errors import VerificationError
from fusion.graph import Dim, but_ones, dims_of, is_dense
from fusion.graph.aliasing import is_copy_unseen, shown
from fusion.graph.launches import is_contiguous_copy
from fusion.graph.origin import inherit
from fusion.planning.fake_execution import Fakes
from fusion.planning.symbolic_sizes import SizeNodes

aten = torch.ops.aten
_STRICT_VIEWS = (aten.view.default, aten._unsafe_view.default)
_BY_ADDRESS = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}


class Layouts:
    """The nodes of a graph under rewrite whose strides differ from those of the original nodes that they replace."""

    def __init__(self, source: fx.Graph, fakes: Fakes, sizes: SizeNodes) -> None:
        self._source, self._fakes, self._sizes = source, fakes, sizes
        self._originals: dict[fx.Node, Any] = {}
        self._unplanned: set[fx.Node] = set()
        self._replacements: dict[fx.Node, fx.Node] = {}

    def __contains__(self, node: fx.Node) -> bool:
        """Return True if `node` has other strides than the node that it replaces, or than plans assumed."""
        return node in self._originals or node in self._unplanned

    def planned(self, node: fx.Node, val: Any) -> None:
        """Mark `node` if its strides are not those of `val`, with which plans were made."""
        if not same_strides(val, node.meta["val"]):
            self._unplanned.add(node)

    def _note(self, node: fx.Node, before: Any) -> None:
        """Record `before`, the fake of the node that `node` replaces, if it has other strides than `node`."""
        if same_strides(before, node.meta["val"]):
            self._originals.pop(node, None)
        else:
            self._originals[node] = before

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let the users of `old` read `new`, and record the replacement for `current`."""
        old.replace_all_uses_with(new)
        self._replacements[old] = new

    def current(self, node: fx.Node) -> fx.Node:
        """Return the node that has replaced `node` of the original graph, `node` itself if none has."""
        while node in self._replacements:
            node = self._replacements[node]
        return node

    def hand_over(self, old: fx.Node, new: fx.Node, dying: Collection[fx.Node]) -> None:
        """Let the users of `old` read `new`, and propagate its strides to users that are not `dying`.

        Users that address memory, such as `as_strided`, read a copy with the old strides.
        """
        users = list(old.users)
        self.replace(old, new)
        self._note(new, old.meta["val"])
        if new in self._originals:
            self._follow(users, dying)
        by_address = [user for user in new.users if user.target in _BY_ADDRESS and user not in dying]
        if by_address and (new in self._originals or shown(new) is not None):
            with self._source.inserting_before(new.next):
                alike = self.with_strides_of(new, old.meta["val"], copied=True)
            for user in by_address:
                user.replace_input_with(new, alike)

    def _follow(self, waiting: list[fx.Node], dying: Collection[fx.Node]) -> None:
        """Update the fakes of the nodes `waiting`, whose inputs have new strides, and those of their users in turn.

        A view that the new strides do not allow reads a contiguous copy: the one change outside of a cover.
        """
        while waiting:
            node = waiting.pop()
            if node.op != "call_function" or node in dying:
                continue
            if is_redundant(node):
                waiting.extend(node.users)
                source = node.all_input_nodes[0]
                self._originals.setdefault(source, node.meta["val"])
                self.replace(node, source)
                self._source.erase_node(node)
                continue
            before = self._originals.get(node, node.meta["val"])
            with self._source.inserting_before(node):
                node.args, val = self.run(node.target, node.args, node.kwargs)
            if not same_strides(node.meta["val"], val):
                node.meta["val"] = self._fakes.like(val)
                self._note(node, before)
                waiting.extend(node.users)

    def _fake(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
        return self._fakes.run(target, *map_arg((args, kwargs), lambda each: each.meta["val"]))

    def run(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run a call on the current fakes of its inputs; return its arguments and its result.

        An input of a view that does not accept its strides is replaced by a contiguous copy among the arguments.

        Raises:
            VerificationError: the call does not accept the new strides.
        """
        val, failed = self._fake(target, args, kwargs)
        if failed and target in _STRICT_VIEWS:
            args = (self._contiguous(args[0]), *args[1:])
            val, failed = self._fake(target, args, kwargs)
        if failed:
            raise VerificationError(f"following strides: {target}{args} does not accept its new inputs: {failed}")
        return args, val

    # new nodes ---------------------------------------------------------------------------------------------------

    def with_strides_of(self, node: fx.Node, before: torch.Tensor, copied: bool = False) -> fx.Node:
        """Insert calls that give the elements of `node` the strides of `before`; return the last of them.

        Where only dims of size 1 differ this takes views alone, unless `copied` asks for new memory.
        """
        sizes, strides = dims_of(before.shape), before.stride()
        order = sorted(range(before.dim()), key=lambda dim: (-hint(strides[dim]), sizes[dim] == 1))
        if not is_dense(before.permute(order)):
            return self._copied_into_gaps(node, before)
        back = [order.index(dim) for dim in range(len(order))]
        made = self._permuted(node, order, node)
        made = self._spread(made, node) if is_dense(made.meta["val"]) and not copied else self._contiguous(made)
        return self._permuted(made, back, node)

    def _copied_into_gaps(self, node: fx.Node, before: torch.Tensor) -> fx.Node:
        """Copy `node` into new memory with the strides of `before`, which leave gaps."""
        extent = ([self._size(each) for each in dims_of(dims)] for dims in (before.shape, before.stride()))
        empty = self.call(aten.new_empty_strided.default, (node, *extent), {}, node)
        return self.call(aten.copy.default, (empty, node), {}, node)

    def _permuted(self, node: fx.Node, order: list[int], parent: fx.Node) -> fx.Node:
        return node if order == sorted(order) else self.call(aten.permute.default, (node, order), {}, parent)

    def _spread(self, node: fx.Node, parent: fx.Node) -> fx.Node:
        """Insert two views of the row-major tensor `node` that give its dims of size 1 the strides that a new tensor
        has.

        `parent` is the node of the rewrite to which the views are attributed.
        """
        shape = dims_of(node.meta["val"].shape)
        for sizes in (but_ones(shape), shape) if 1 in shape else ():
            given = [self._size(each) for each in sizes]
            node = self.call(aten.view.default, (node, given), {}, parent)
        return node

    def _size(self, dim: Dim) -> Any:
        size = self._fakes.size(dim)
        return size if isinstance(size, int) else self._sizes.node(size)

    def _contiguous(self, node: fx.Node) -> fx.Node:
        return self.call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, node)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Any, parent: fx.Node) -> fx.Node:
        """Insert a call at the graph's insertion point, attributed to the rewrite of `parent`.

        Raises:
            VerificationError: the call fails on the fakes of its arguments.
        """
        node = self._source.call_function(target, args, dict(kwargs))
        val, failed = self._fake(target, args, kwargs)
        if failed:
            raise VerificationError(f"laying {parent.name} out as it lay: {target}{args} fails: {failed}")
        node.meta["val"] = self._fakes.like(val)
        node.meta.update({"fusion": parent.meta["fusion"]} if "fusion" in parent.meta else {})
        inherit(node, parent)
        return node


def same_strides(old: Any, new: Any) -> bool:
    """Return True if the tensors `old` and `new`, or those of two tuples, have equal strides."""
    pairs = zip(leaves(old), leaves(new), strict=True)
    return all(dims_of(a.stride()) == dims_of(b.stride()) for a, b in pairs if isinstance(a, torch.Tensor))


def is_redundant(copy: fx.Node) -> bool:
    """Return True if `copy` copies a contiguous tensor, and no write and no caller can tell the copy from its
    source.
    """
    if not is_contiguous_copy(copy.target, copy.kwargs):
        return False
    source = copy.all_input_nodes[0]
    return source.meta["val"].is_contiguous() and is_copy_unseen(copy, source)
