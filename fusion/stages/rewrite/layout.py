"""Layout: how tensors lie in memory once some of them are replaced, and what the caller sees of it.

a fused result lies otherwise  →  its users follow  →  what is returned gets the strides, and the memory, it had
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch import hint, tree_leaves
from fusion.cost import is_contiguous_copy
from fusion.errors import VerificationError
from fusion.graph import Dim, but_ones, dims_of, is_dense, lie_alike
from fusion.mutation import is_copy_unseen, is_written, memory_of, outputs, result, sharing, shown
from fusion.origin import inherit
from fusion.recording import Fakes, SizeNodes

aten = torch.ops.aten
_STRICT_VIEWS = (aten.view.default, aten._unsafe_view.default)
_BY_ADDRESS = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}


class Layouts:
    """Which nodes of a graph that is being rewritten lie otherwise than what they stand for did in the user's graph."""

    def __init__(self, source: fx.Graph, fakes: Fakes, sizes: SizeNodes, eager: Sequence[Any] = ()) -> None:
        self._source, self._fakes, self._sizes = source, fakes, sizes
        self._lay: dict[fx.Node, Any] = {}
        self._unplanned: set[fx.Node] = set()
        self._copies: list[fx.Node] = []
        self._copied: dict[fx.Node, Any] = {}  # views of a copy -> what they were views of
        self._read_as: dict[fx.Node, Any] = {}  # users of a copy that went -> how it lay
        self._uncopied: set[fx.Node] = set()  # what stands for a copy that went
        self._seen: dict[Any, fx.Node] = {}
        self._returned = [node.meta.get("val") for node in outputs(source)]
        self._eager = dict(enumerate(eager))
        self._sharing = sharing(source)

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

    def hand_over(self, old: fx.Node, new: fx.Node, dying: Collection[fx.Node]) -> None:
        """Let the users of `old` read `new`, and follow its strides."""
        users = list(old.users)
        old.replace_all_uses_with(new)
        self._note(new, old.meta["val"])
        if new in self._lay:
            self._follow(users, dying)
        by_address = [user for user in new.users if user.target in _BY_ADDRESS and user not in dying]
        if by_address and (new in self._lay or shown(new) is not None):
            with self._source.inserting_before(new.next):
                alike = self._laid(new, old.meta["val"], copied=True)
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
                self._uncopied.add(source)
                self._read_as.update(dict.fromkeys(node.users, node.meta["val"]))
                node.replace_all_uses_with(source)
                self._source.erase_node(node)
                continue
            before = self._lay.get(node, node.meta["val"])
            with self._source.inserting_before(node):
                args, val = self.run(node.target, node.args, node.kwargs)
            if args is not node.args:
                self._copied[node], node.args = node.args[0], args
            if not same_strides(node.meta["val"], val):
                node.meta["val"] = self._fakes.like(val)
                self._note(node, before)
                waiting.extend(node.users)

    def _fake(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
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

    # what is returned --------------------------------------------------------------------------------------------

    def restore(self) -> list[fx.Node]:
        """Give each result of the graph the strides, and the memory, that it had: a fresh tensor stays fresh.

        Returns:
            The copies that this takes.
        """
        now, before_it = sharing(self._source), len(self._copies)
        fresh: dict[str, tuple[fx.Node, fx.Node]] = {}
        moved: dict[str, tuple[fx.Node, fx.Node]] = {}
        for number, (before, memory) in enumerate(zip(self._returned, self._sharing, strict=True)):
            node = outputs(self._source)[number]
            if not isinstance(before, torch.Tensor):
                continue
            if memory == result(number) != now[number]:
                with self._source.inserting_before(node.next):
                    fresh[memory] = node, self._laid(node, before, copied=True)
                    self._return(number, fresh[memory][1])
            elif memory in fresh:
                self._return(number, self._over(node, *fresh[memory]))
            elif memory in moved and _is_seen_in(node, moved[memory][0]):
                self._return(number, self._over(node, *moved[memory]))
            elif memory != now[number] or not self._lies_well(number, node.meta["val"], before):
                moved[memory] = node, self._as_it_lay(node, before)
                self._return(number, moved[memory][1])
        return self._copies[before_it:]

    def _over(self, view: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
        """What `view` shows of `old`, of its copy `new`: for a result that shares the memory of one made fresh."""
        below = shown(view)
        if view is old or below is None:
            return new if view is old else view
        over = self._over(below, old, new)
        with self._source.inserting_before(view.next):
            return self._replayed(view, over)

    def _lies_well(self, number: int, now: torch.Tensor, before: torch.Tensor) -> bool:
        """Whether a result lies as in the captured graph, or as when the model runs without a compiler."""
        return same_strides(now, before) or dims_of(now.stride()) == self._eager.get(number)

    def _return(self, number: int, node: fx.Node) -> None:
        """Return `node` as result `number`, and the other results as they are; views that only that one was go."""
        count = iter(range(len(self._returned)))
        output, gone = self._source.output_node(), outputs(self._source)[number]
        output.args = map_arg(output.args, lambda each: node if next(count) == number else each)
        while not gone.users and (below := shown(gone)) is not None and gone.target is not operator.getitem:
            self._source.erase_node(gone)
            gone = below

    def _as_it_lay(self, node: fx.Node, before: torch.Tensor) -> fx.Node:
        """What `node` shows in a copy of its memory that lies as it did: for all results that share it, the same."""
        key = node, dims_of(before.stride())
        if key not in self._seen:
            below = self._moved_below(node)
            self._seen[key] = self._placed(node, before) if below is None else self._through(node, below)
        return self._seen[key]

    def _moved_below(self, node: fx.Node) -> fx.Node | None:
        """What `node` was a view of, if that, or what that was a view of, lies otherwise now."""
        below: Any = self._copied.get(node, shown(node))
        if node in self._uncopied or not isinstance(below, fx.Node):
            return None
        return below if below in self._lay or self._moved_below(below) else None

    def _through(self, view: fx.Node, below: fx.Node) -> fx.Node:
        """The same view of `below` as it lay."""
        read, lay = self._read_as.get(view), self._lay.get(below, below.meta["val"])
        restored = self._as_it_lay(below, lay) if read is None else self._placed(below, read)
        with self._source.inserting_before(view.next):
            return self._replayed(view, restored)

    def _replayed(self, view: fx.Node, below: fx.Node) -> fx.Node:
        """The same view of `below`, one of several where a call gives more."""
        call = view.args[0] if view.target is operator.getitem else view
        assert isinstance(call, fx.Node)
        seen = self._call(call.target, (below, *call.args[1:]), call.kwargs, view)
        return seen if call is view else self._call(operator.getitem, (seen, view.args[1]), {}, view)

    def _placed(self, node: fx.Node, before: torch.Tensor) -> fx.Node:
        """`node` in memory that lies as `before` does; as it is where a copy would miss what is written to it later."""
        if not lie_alike(node.meta["val"], before) and is_written(memory_of(node)):
            return node
        with self._source.inserting_before(node.next):
            return self._laid(node, before)

    # new nodes ---------------------------------------------------------------------------------------------------

    def _laid(self, node: fx.Node, before: torch.Tensor, copied: bool = False) -> fx.Node:
        """The elements of `node` in memory that lies like `before`.

        Without a copy where only dims of size 1 differ, unless `copied` asks for one. What `before` repeats is
        repeated here, too.
        """
        sizes, strides = dims_of(before.shape), before.stride()
        repeated = [dim for dim, stride in enumerate(dims_of(strides)) if stride == 0 and sizes[dim] not in (0, 1)]
        if repeated:
            return self._repeated(node, before, repeated, copied)
        order = sorted(range(before.dim()), key=lambda dim: (-hint(strides[dim]), sizes[dim] == 1))
        if not is_dense(before.permute(order)):
            return self._copied_into_gaps(node, before)
        back = [order.index(dim) for dim in range(len(order))]
        made = self._turned(node, order, node)
        made = self._spread(made, node) if is_dense(made.meta["val"]) and not copied else self._contiguous(made)
        return self._turned(made, back, node)

    def _repeated(self, node: fx.Node, before: torch.Tensor, dims: Sequence[int], copied: bool) -> fx.Node:
        """The first of the entries along each of these dims, which are all the same, laid out and repeated."""
        one, lies = node, before
        for dim in dims:
            one, lies = self._call(aten.slice.Tensor, (one, dim, 0, 1), {}, node), lies.narrow(dim, 0, 1)
        sizes = [self._size(each) for each in dims_of(before.shape)]
        return self._call(aten.expand.default, (self._laid(one, lies, copied), sizes), {}, node)

    def _copied_into_gaps(self, node: fx.Node, before: torch.Tensor) -> fx.Node:
        """A copy of `node` in memory of which nothing else reads the rest."""
        extent = ([self._size(each) for each in dims_of(dims)] for dims in (before.shape, before.stride()))
        empty = self._call(aten.new_empty_strided.default, (node, *extent), {}, node)
        return self._copied_by(aten.copy.default, (empty, node), {}, node)

    def _turned(self, node: fx.Node, order: list[int], parent: fx.Node) -> fx.Node:
        return node if order == sorted(order) else self._call(aten.permute.default, (node, order), {}, parent)

    def _spread(self, node: fx.Node, parent: fx.Node) -> fx.Node:
        """A dense tensor whose dims of size 1 have the strides that a new one's would have."""
        shape = dims_of(node.meta["val"].shape)
        for sizes in (but_ones(shape), shape) if 1 in shape else ():
            given = [self._size(each) for each in sizes]
            node = self._call(aten.view.default, (node, given), {}, parent)
        return node

    def _size(self, dim: Dim) -> Any:
        size = self._fakes.size(dim)
        return size if isinstance(size, int) else self._sizes.node(size)

    def _contiguous(self, node: fx.Node) -> fx.Node:
        return self._copied_by(aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, node)

    def _copied_by(self, target: Any, args: tuple[Any, ...], kwargs: Any, node: fx.Node) -> fx.Node:
        self._copies.append(self._call(target, args, kwargs, node))
        return self._copies[-1]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Any, parent: fx.Node) -> fx.Node:
        """A call at the graph's insertion point, as a part of the rewrite that `parent` is of."""
        node = self._source.call_function(target, args, dict(kwargs))
        val, failed = self._fake(target, args, kwargs)
        if failed:
            raise VerificationError(f"laying {parent.name} out as it lay: {target}{args} fails: {failed}")
        node.meta["val"] = self._fakes.like(val)
        node.meta.update({"fusion": parent.meta["fusion"]} if "fusion" in parent.meta else {})
        inherit(node, parent)
        return node


def _is_seen_in(view: fx.Node, node: fx.Node) -> bool:
    """Whether a tensor is another, or a view of it."""
    below = shown(view)
    return view is node or (below is not None and _is_seen_in(below, node))


def same_strides(old: Any, new: Any) -> bool:
    """Whether tensors, or those of a tuple, have equal strides."""
    pairs = zip(tree_leaves(old), tree_leaves(new), strict=True)
    return all(dims_of(a.stride()) == dims_of(b.stride()) for a, b in pairs if isinstance(a, torch.Tensor))


def _is_needless(copy: fx.Node) -> bool:
    """Whether a copy that makes a tensor contiguous is of one that is, and nobody can tell."""
    if not is_contiguous_copy(copy.target, copy.kwargs):
        return False
    source = copy.all_input_nodes[0]
    return source.meta["val"].is_contiguous() and is_copy_unseen(copy, source)
