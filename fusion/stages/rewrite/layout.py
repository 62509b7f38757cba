"""Layout: how tensors lie in memory once some of them are replaced: a fused result lies otherwise, its users follow."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.tensors import hint, leaves
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
    """Which nodes of a graph that is being rewritten lie otherwise than what they stand for did in the user's graph."""

    def __init__(self, source: fx.Graph, fakes: Fakes, sizes: SizeNodes) -> None:
        self._source, self._fakes, self._sizes = source, fakes, sizes
        self._lay: dict[fx.Node, Any] = {}
        self._unplanned: set[fx.Node] = set()
        self._stands: dict[fx.Node, fx.Node] = {}

    def __contains__(self, node: fx.Node) -> bool:
        """Whether `node` lies otherwise than what it stands for, or than whoever reads it was planned for."""
        return node in self._lay or node in self._unplanned

    def planned(self, node: fx.Node, val: Any) -> None:
        """Remember that plans were made as if `node` lay like `val`."""
        if not same_strides(val, node.meta["val"]):
            self._unplanned.add(node)

    def _note(self, node: fx.Node, before: Any) -> None:
        """Remember how what `node` stands for lay."""
        if same_strides(before, node.meta["val"]):
            self._lay.pop(node, None)
        else:
            self._lay[node] = before

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let the users of `old` read `new`, and remember it."""
        old.replace_all_uses_with(new)
        self._stands[old] = new

    def standing_for(self, node: fx.Node) -> fx.Node:
        """What holds now what a node of the user's graph held."""
        while node in self._stands:
            node = self._stands[node]
        return node

    def hand_over(self, old: fx.Node, new: fx.Node, dying: Collection[fx.Node]) -> None:
        """Let the users of `old` read `new`, and follow its strides."""
        users = list(old.users)
        self.replace(old, new)
        self._note(new, old.meta["val"])
        if new in self._lay:
            self._follow(users, dying)
        by_address = [user for user in new.users if user.target in _BY_ADDRESS and user not in dying]
        if by_address and (new in self._lay or shown(new) is not None):
            with self._source.inserting_before(new.next):
                alike = self.laid(new, old.meta["val"], copied=True)
            for user in by_address:
                user.replace_input_with(new, alike)

    def _follow(self, waiting: list[fx.Node], dying: Collection[fx.Node]) -> None:
        """Bring the fakes of nodes up to date whose inputs now lie differently in memory.

        A view that the new strides do not allow gets a copy to look at: the one change outside a cover.
        """
        while waiting:
            node = waiting.pop()
            if node.op != "call_function" or node in dying:
                continue
            if _is_needless(node):
                waiting.extend(node.users)
                source = node.all_input_nodes[0]
                self._lay.setdefault(source, node.meta["val"])
                self.replace(node, source)
                self._source.erase_node(node)
                continue
            before = self._lay.get(node, node.meta["val"])
            with self._source.inserting_before(node):
                node.args, val = self.run(node.target, node.args, node.kwargs)
            if not same_strides(node.meta["val"], val):
                node.meta["val"] = self._fakes.like(val)
                self._note(node, before)
                waiting.extend(node.users)

    def _fake(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
        """What a call gives for its inputs as they lie now, and why it fails."""
        return self._fakes.run(target, *map_arg((args, kwargs), lambda each: each.meta["val"]))

    def run(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a call gives for its inputs as they lie now, and its arguments, with a copy where it needs one."""
        val, failed = self._fake(target, args, kwargs)
        if failed and target in _STRICT_VIEWS:
            args = (self._contiguous(args[0]), *args[1:])
            val, failed = self._fake(target, args, kwargs)
        if failed:
            raise VerificationError(f"following strides: {target}{args} does not accept its new inputs: {failed}")
        return args, val

    # new nodes ---------------------------------------------------------------------------------------------------

    def laid(self, node: fx.Node, before: torch.Tensor, copied: bool = False) -> fx.Node:
        """The elements of `node` in memory that lies like `before`.

        Without a copy where only dims of size 1 differ, unless `copied` asks for one.
        """
        sizes, strides = dims_of(before.shape), before.stride()
        order = sorted(range(before.dim()), key=lambda dim: (-hint(strides[dim]), sizes[dim] == 1))
        if not is_dense(before.permute(order)):
            return self._copied_into_gaps(node, before)
        back = [order.index(dim) for dim in range(len(order))]
        made = self._turned(node, order, node)
        made = self._spread(made, node) if is_dense(made.meta["val"]) and not copied else self._contiguous(made)
        return self._turned(made, back, node)

    def _copied_into_gaps(self, node: fx.Node, before: torch.Tensor) -> fx.Node:
        """A copy of `node` in memory of which nothing else reads the rest."""
        extent = ([self._size(each) for each in dims_of(dims)] for dims in (before.shape, before.stride()))
        empty = self.call(aten.new_empty_strided.default, (node, *extent), {}, node)
        return self.call(aten.copy.default, (empty, node), {}, node)

    def _turned(self, node: fx.Node, order: list[int], parent: fx.Node) -> fx.Node:
        return node if order == sorted(order) else self.call(aten.permute.default, (node, order), {}, parent)

    def _spread(self, node: fx.Node, parent: fx.Node) -> fx.Node:
        """A dense tensor whose dims of size 1 have the strides that a new one's would have."""
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
        """A call at the graph's insertion point, as a part of the rewrite that `parent` is of."""
        node = self._source.call_function(target, args, dict(kwargs))
        val, failed = self._fake(target, args, kwargs)
        if failed:
            raise VerificationError(f"laying {parent.name} out as it lay: {target}{args} fails: {failed}")
        node.meta["val"] = self._fakes.like(val)
        node.meta.update({"fusion": parent.meta["fusion"]} if "fusion" in parent.meta else {})
        inherit(node, parent)
        return node


def same_strides(old: Any, new: Any) -> bool:
    """Whether tensors, or those of a tuple, have equal strides."""
    pairs = zip(leaves(old), leaves(new), strict=True)
    return all(dims_of(a.stride()) == dims_of(b.stride()) for a, b in pairs if isinstance(a, torch.Tensor))


def _is_needless(copy: fx.Node) -> bool:
    """Whether a copy that makes a tensor contiguous is of one that is, and nobody can tell."""
    if not is_contiguous_copy(copy.target, copy.kwargs):
        return False
    source = copy.all_input_nodes[0]
    return source.meta["val"].is_contiguous() and is_copy_unseen(copy, source)
