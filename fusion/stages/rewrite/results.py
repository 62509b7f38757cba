"""Results: give the outputs of a rewritten graph the strides, and the shared memory, that they had.

An output is a chain of views of some memory. If it has changed, its memory is copied into the original layout and the
views are made again, jointly for all outputs that share the memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion.graph import dims_of
from fusion.graph.aliasing import is_write, memory_of, outputs, sharing, shown
from fusion.graph.launches import is_contiguous_copy
from fusion.stages.rewrite.layout import Layouts, same_strides


@dataclass(frozen=True)
class _Link:
    """A tensor of the original graph: memory, or a view of the previous link.

    Attributes:
        node: the node that computed it.
        val: its fake tensor, with the original strides.
        below: the node that it was a view of, None for memory.
        call: the call of the view, as target, arguments and keyword arguments.
        item: index among the results of that call, None where it has one.
    """

    node: fx.Node
    val: Any
    below: fx.Node | None
    call: tuple[Any, Any, Any]
    item: int | None

    @property
    def is_begun(self) -> bool:
        """Return True if nothing below this link may be repeated: it is memory, or a write, which is made once."""
        return self.below is None or is_write(self.node)


class Results:
    """The outputs of the original graph `source`, to be restored once it is rewritten.

    `eager` has for each output the strides that it has when the model runs uncompiled, which are accepted as well.
    """

    def __init__(self, source: fx.Graph, eager: Sequence[Any] = ()) -> None:
        self._source, self._eager = source, dict(enumerate(eager))
        self._chains = [_chain(node) for node in outputs(source)]
        self._sharing = sharing(source)

    def restore(self, layouts: Layouts) -> list[fx.Node]:
        """Restore the strides of each output, and which outputs share memory with each other or with an input.

        Returns:
            The copies that this takes.
        """
        groups: dict[str, list[int]] = {}
        for number, memory in enumerate(self._sharing):
            if isinstance(self._chains[number][-1].val, torch.Tensor):
                groups.setdefault(memory, []).append(number)
        now, returned = sharing(self._source), outputs(self._source)
        wrong = {
            memory
            for memory, group in groups.items()
            if not all(now[each] == memory and self._has_layout(each, returned[each].meta["val"]) for each in group)
        }
        returned_memory = {memory_of(returned[number]) for memory in groups.keys() - wrong for number in groups[memory]}
        copies = [self._restored(groups[memory], layouts, returned_memory) for memory in groups if memory in wrong]
        return [node for node in copies if node is not None]

    def _has_layout(self, number: int, now: torch.Tensor) -> bool:
        """Return True if `now` has the strides of output `number` in the original graph, or in the uncompiled model."""
        return same_strides(now, self._chains[number][-1].val) or dims_of(now.stride()) == self._eager.get(number)

    def _restored(self, group: Sequence[int], layouts: Layouts, returned_memory: set[fx.Node]) -> fx.Node | None:
        """Restore the outputs `group`, which share memory; return the copy of the memory, None where none is needed.

        `returned_memory` collects the memory that other outputs return, which the group must not share.
        """
        chains = [self._chains[number] for number in group]
        common = [links[0] for links in takewhile(_is_one, zip(*chains, strict=False))]
        begin = max((place for place, link in enumerate(common) if link.is_begun), default=0)
        alive = (place for place in range(begin, len(common)) if not layouts.current(common[place].node)._erased)
        place = next(alive, None)
        if place is None:
            return None  # the verify stage reports it
        there, link = layouts.current(common[place].node), common[place]
        memory = memory_of(there)
        fresh = common[0].node.op != "placeholder"
        taken = fresh and (memory.op == "placeholder" or memory in returned_memory)
        with self._source.inserting_before(_behind(there)):
            is_reused = not taken and same_strides(there.meta["val"], link.val)
            new = there if is_reused else layouts.with_strides_of(there, link.val, copied=taken)
        views, returned = {link.node: new}, outputs(self._source)
        last = max(new, *(returned[number] for number in group))  # views go behind it, so that no write comes between
        with self._source.inserting_before(_behind(last)):
            for each in (each for chain in chains for each in chain[place + 1 :]):
                if each.node not in views:
                    views[each.node] = _repeated_view(each, views, layouts)
        returned_memory.add(memory_of(new))
        for number, chain in zip(group, chains, strict=True):
            self._return(number, views[chain[-1].node])
        return None if memory_of(new) is memory else memory_of(new)

    def _return(self, number: int, node: fx.Node) -> None:
        """Let the graph return `node` as output `number`; erase views and copies that only the old output needed."""
        count = iter(range(len(self._chains)))
        output, gone = self._source.output_node(), outputs(self._source)[number]
        output.args = map_arg(output.args, lambda each: node if next(count) == number else each)
        while not gone.users and _only_shows(gone):
            below = gone.all_input_nodes[0]
            self._source.erase_node(gone)
            gone = below


def _only_shows(node: fx.Node) -> bool:
    """Return True if `node` is a view or a contiguous copy of one tensor: no item of a call and no write."""
    if node.target is operator.getitem or is_write(node):
        return False
    return shown(node) is not None or is_contiguous_copy(node.target, node.kwargs)


def _chain(node: fx.Node) -> tuple[_Link, ...]:
    """Return the links from the memory of `node` to `node` itself."""
    below = shown(node)
    call: Any = node.args[0] if node.target is operator.getitem else node
    item: Any = node.args[1] if node.target is operator.getitem else None
    link = _Link(node, node.meta.get("val"), below, (call.target, call.args, call.kwargs), item)
    return (*(() if below is None else _chain(below)), link)


def _is_one(links: Sequence[_Link]) -> bool:
    return all(each.node is links[0].node for each in links)


def _behind(node: fx.Node) -> fx.Node:
    """Return the first node behind `node` that is no placeholder."""
    behind = node.next
    while behind.op == "placeholder":
        behind = behind.next
    return behind


def _repeated_view(link: _Link, views: dict[fx.Node, fx.Node], layouts: Layouts) -> fx.Node:
    """Repeat the view `link` on the memory that its base has now, and return the new node.

    `views` maps original nodes to repeated views; `layouts` gives what has replaced any other.
    """
    target, args, kwargs = link.call
    now = map_arg((args, kwargs), lambda each: views.get(each, layouts.current(each)))
    parent = views[link.below] if link.below else link.node
    view = layouts.call(target, *now, parent)
    return view if link.item is None else layouts.call(operator.getitem, (view, link.item), {}, parent)
