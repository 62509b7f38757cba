"""Results: what the caller holds of a rewritten graph lies, and shares memory, as it did.

A result is a chain of views of some memory. Where one is not as it was, its memory is laid out as it lay, and the views
are made again: for all results that share that memory, so that they still do.
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
    """A tensor of the user's graph as it came: memory, or a view of the link before.

    Attributes:
        node: what held it.
        val: how it lay.
        below: what it was a view of.
        call: the call that showed it, as target, arguments and keyword arguments.
        item: which of that call's results it was, None where there is one.
    """

    node: fx.Node
    val: Any
    below: fx.Node | None
    call: tuple[Any, Any, Any]
    item: int | None

    @property
    def is_begun(self) -> bool:
        """Whether a chain begins here at the latest: a write is made once."""
        return self.below is None or is_write(self.node)


class Results:
    """The results of a graph as it came, to be restored once it is rewritten.

    `eager` is how each of them lies when the model runs without a compiler, which will do as well.
    """

    def __init__(self, source: fx.Graph, eager: Sequence[Any] = ()) -> None:
        self._source, self._eager = source, dict(enumerate(eager))
        self._chains = [_chain(node) for node in outputs(source)]
        self._sharing = sharing(source)

    def restore(self, layouts: Layouts) -> list[fx.Node]:
        """Give each result the strides, and the memory, that it had: a fresh tensor stays fresh.

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
            if not all(now[each] == memory and self._lies_well(each, returned[each].meta["val"]) for each in group)
        }
        held = {memory_of(returned[number]) for memory in groups.keys() - wrong for number in groups[memory]}
        copies = [self._restored(groups[memory], layouts, held) for memory in groups if memory in wrong]
        return [node for node in copies if node is not None]

    def _lies_well(self, number: int, now: torch.Tensor) -> bool:
        """Whether a result lies as in the captured graph, or as when the model runs without a compiler."""
        return same_strides(now, self._chains[number][-1].val) or dims_of(now.stride()) == self._eager.get(number)

    def _restored(self, group: Sequence[int], layouts: Layouts, held: set[fx.Node]) -> fx.Node | None:
        """Restore results that share memory; the copy of it that this takes. `held`: memory that others return."""
        chains = [self._chains[number] for number in group]
        common = [links[0] for links in takewhile(_is_one, zip(*chains, strict=False))]
        begin = max((place for place, link in enumerate(common) if link.is_begun), default=0)
        alive = (place for place in range(begin, len(common)) if _is_there(layouts.standing_for(common[place].node)))
        place = next(alive, None)
        if place is None:
            return None  # the check of the graph refuses it
        there, link = layouts.standing_for(common[place].node), common[place]
        memory = memory_of(there)
        fresh = common[0].node.op != "placeholder"
        taken = fresh and (memory.op == "placeholder" or memory in held)
        with self._source.inserting_before(_behind(there)):
            kept = not taken and same_strides(there.meta["val"], link.val)
            new = there if kept else layouts.laid(there, link.val, copied=taken)
        views, returned = {link.node: new}, outputs(self._source)
        last = max(new, *(returned[number] for number in group))  # behind it, so that no write comes between
        with self._source.inserting_before(_behind(last)):
            for each in (each for chain in chains for each in chain[place + 1 :]):
                if each.node not in views:
                    views[each.node] = _seen(each, views, layouts)
        held.add(memory_of(new))
        for number, chain in zip(group, chains, strict=True):
            self._return(number, views[chain[-1].node])
        return None if memory_of(new) is memory else memory_of(new)

    def _return(self, number: int, node: fx.Node) -> None:
        """Return `node` as result `number`, and the other results as they are; what only that one was goes."""
        count = iter(range(len(self._chains)))
        output, gone = self._source.output_node(), outputs(self._source)[number]
        output.args = map_arg(output.args, lambda each: node if next(count) == number else each)
        while not gone.users and _only_shows(gone):
            below = gone.all_input_nodes[0]
            self._source.erase_node(gone)
            gone = below


def _only_shows(node: fx.Node) -> bool:
    """Whether a node is a view or a copy of another, no result of a rewrite, and changes nothing."""
    if node.target is operator.getitem or is_write(node):
        return False
    return shown(node) is not None or is_contiguous_copy(node.target, node.kwargs)


def _chain(node: fx.Node) -> tuple[_Link, ...]:
    """The views from memory to a result."""
    below = shown(node)
    call: Any = node.args[0] if node.target is operator.getitem else node
    item: Any = node.args[1] if node.target is operator.getitem else None
    link = _Link(node, node.meta.get("val"), below, (call.target, call.args, call.kwargs), item)
    return (*(() if below is None else _chain(below)), link)


def _is_one(links: Sequence[_Link]) -> bool:
    return all(each.node is links[0].node for each in links)


def _is_there(node: fx.Node) -> bool:
    return not node._erased


def _behind(node: fx.Node) -> fx.Node:
    """The first node behind another that is no input."""
    behind = node.next
    while behind.op == "placeholder":
        behind = behind.next
    return behind


def _seen(link: _Link, views: dict[fx.Node, fx.Node], layouts: Layouts) -> fx.Node:
    """The same view, of what its memory is now."""
    target, args, kwargs = link.call
    now = map_arg((args, kwargs), lambda each: views.get(each, layouts.standing_for(each)))
    parent = views[link.below] if link.below else link.node
    seen = layouts.call(target, *now, parent)
    return seen if link.item is None else layouts.call(operator.getitem, (seen, link.item), {}, parent)
