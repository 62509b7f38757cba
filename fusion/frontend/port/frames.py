"""Frames: the share of a fused graph that the forward of each module holds, in an order in which it can run.

A module has a frame if more than one of its calls is left. Values that do not depend on a module but are first computed
there, and read elsewhere, move to the module that all readers have in common.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from fusion.frontend.port.lines import lines_in
from fusion.frontend.port.traced import Argument, Source, Traced, Weight
from fusion.graph.aliasing import memory_of, written_by
from fusion.graph.launches import is_call
from fusion.graph.origin import module_chain

Chain = tuple[str, ...]
"""Paths of the modules around a node that have frames, outermost first, without the root."""


@dataclass(eq=False)
class Frame:
    """Calls of one module.

    Attributes:
        path: dotted path of the module, "" for the root.
        kind: class of the module, or the function.
        items: its own calls, and the frames of the modules that it calls, in order.
    """

    path: str
    kind: Any
    items: list[fx.Node | Frame] = field(default_factory=list["fx.Node | Frame"])

    @property
    def children(self) -> list[Frame]:
        """The frames that it calls."""
        return [each for each in self.items if isinstance(each, Frame)]

    def nodes(self) -> Iterator[fx.Node]:
        """Yield all calls of the frame and of those inside, in order."""
        for each in self.items:
            if isinstance(each, Frame):
                yield from each.nodes()
            else:
                yield each

    def has(self, path: str) -> bool:
        """Return True if the tensor at `path` belongs to the module or to one inside."""
        return not self.path or path.startswith(self.path + ".")

    def local(self, path: str) -> str:
        """Return the `path` of a tensor or module inside relative to the module."""
        return path[len(self.path) + 1 :] if self.path else path


def frames_of(traced: Traced) -> Frame:
    """Return the frame of the root, with those of all modules inside.

    Results of a call stand where the call does, and a copy over an input where its value is computed: the graph has all
    copies at its end.
    """
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    kinds = _kinds(calls)
    owner = {node: _chain(node, kinds) for node in calls}
    copies = [node for node in calls if node.target is torch.ops.aten.copy_.default]
    items = [node for node in calls if is_item(node)]
    owner |= {node: owner.get(_made(node), owner[node]) for node in [*items, *copies]}
    _hoist(calls, owner, traced.sources)
    kind = type(traced.model) if isinstance(traced.model, nn.Module) else traced.model
    owner |= {node: owner[_made(node)] for node in items}
    return _ordered(_tree(calls, owner, kinds, kind), _orders(calls))


def homes(root: Frame, sources: Mapping[fx.Node, Source]) -> dict[fx.Node, Frame]:
    """Map each placeholder of a prepared tensor to the innermost frame that holds all its readers."""
    placed: dict[fx.Node, Frame] = {}

    def visit(frame: Frame) -> None:
        inside = set(frame.nodes())
        for node, source in sources.items():
            if not isinstance(source, (Weight, Argument)) and node.users and inside.issuperset(node.users):
                placed[node] = frame
        for each in frame.children:
            visit(each)

    visit(root)
    return placed


def _made(node: fx.Node) -> Any:
    """Return the call of which `node` takes a result, or that computes what it copies."""
    return node.args[0] if is_item(node) else node.args[1]


def is_item(node: fx.Node) -> bool:
    """Return True if `node` takes one result of a call that has several."""
    return node.target is operator.getitem


def _kinds(calls: Iterable[fx.Node]) -> dict[str, Any]:
    """Map the paths of the modules that have a frame to their classes.

    A module that is called several times has none, as each call may be fused differently; nor has a list of modules.
    """
    keys: dict[str, set[str]] = {}
    kinds: dict[str, Any] = {}
    size: dict[str, int] = {}
    for node in calls:
        for key, path, kind in module_chain(node):
            keys.setdefault(path, set()).add(key)
            kinds[path] = kind
            size[path] = size.get(path, 0) + is_call(node)
    lists = {path.rpartition(".")[0] for path in kinds if path.rpartition(".")[2].isdigit()}
    return {
        path: kinds[path] for path in kinds if path and len(keys[path]) == 1 and size[path] > 1 and path not in lists
    }


def _chain(node: fx.Node, kinds: Mapping[str, Any]) -> Chain:
    return tuple(path for _, path, _ in module_chain(node) if path in kinds)


def _common(chains: Iterable[Chain]) -> Chain:
    """Return the longest chain with which all of `chains` begin."""
    steps = takewhile(lambda several: len(set(several)) == 1, zip(*chains, strict=False))
    return tuple(several[0] for several in steps)


def _hoist(calls: Sequence[fx.Node], owner: dict[fx.Node, Chain], sources: Mapping[fx.Node, Source]) -> None:
    """Move calls to outer frames in `owner`, in place: those that read nothing of a frame and are read outside."""
    least: dict[fx.Node, Chain] = {}
    for node in calls:
        reads = [_read_at(each, owner[node], owner, least, sources) for each in node.all_input_nodes]
        least[node] = owner[node] if written_by(node) else max(reads, key=len, default=())
    wanted: dict[fx.Node, Chain] = {}
    for node in reversed(calls):
        readers = [wanted.get(user, ()) for user in node.users]
        moves = len(least[node]) < len(owner[node])
        wanted[node] = _common([owner[node], *readers]) if moves else owner[node]
    for node in calls:
        if len(wanted[node]) < len(owner[node]):
            owner[node] = max(least[node], wanted[node], key=len)


def _read_at(
    node: fx.Node,
    reader: Chain,
    owner: Mapping[fx.Node, Chain],
    least: Mapping[fx.Node, Chain],
    sources: Mapping[fx.Node, Source],
) -> Chain:
    """Return the outermost frame around `reader` in which the operand `node` can be read."""
    source = sources.get(node)
    if isinstance(source, Weight):
        depth = sum(source.path.startswith(each + ".") for each in reader)
        return reader[:depth]
    if node in least:
        return _common([reader, least[node] if len(least[node]) < len(owner[node]) else owner[node]])
    return reader if source is not None and not isinstance(source, Argument) and source.sources else ()


def _orders(calls: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Map each of `calls` to those that must run before: its operands; the last write to memory that the call reads or
    writes; and all reads of memory since then, if the call writes to the memory.
    """
    before: dict[fx.Node, set[fx.Node]] = {node: set(node.all_input_nodes) for node in calls}
    written = {memory_of(each) for node in calls for each in written_by(node)}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    for node in calls:
        writes = {memory_of(each) for each in written_by(node)}
        for memory in {memory_of(each) for each in node.all_input_nodes} & written:
            before[node].update([writer[memory]] if memory in writer else [])
            if memory in writes:
                before[node].update(readers.pop(memory, []))
                writer[memory] = node
            else:
                readers.setdefault(memory, []).append(node)
        before[node].discard(node)
    return before


def _tree(calls: Sequence[fx.Node], owner: Mapping[fx.Node, Chain], kinds: Mapping[str, Any], kind: Any) -> Frame:
    frames: dict[Chain, Frame] = {(): Frame("", kind)}

    def frame_at(chain: Chain) -> Frame:
        if chain not in frames:
            frames[chain] = Frame(chain[-1], kinds[chain[-1]])
            frame_at(chain[:-1]).items.append(frames[chain])
        return frames[chain]

    for node in calls:
        frame_at(owner[node]).items.append(node)
    return frames[()]


def _ordered(frame: Frame, before: Mapping[fx.Node, set[fx.Node]]) -> Frame:
    """Sort the items of `frame` and of those inside, in place; a module whose calls cannot run at once is dissolved."""
    import networkx as nx

    place = {node: position for position, node in enumerate(before)}
    while True:
        holder = {node: item for item in frame.items for node in (item.nodes() if isinstance(item, Frame) else [item])}
        graph: Any = nx.DiGraph()
        graph.add_nodes_from(frame.items)
        for node, item in holder.items():
            graph.add_edges_from((holder[each], item) for each in before[node] if holder.get(each, item) is not item)
        rings = [ring for ring in nx.strongly_connected_components(graph) if len(ring) > 1]
        if not rings:
            break
        tangled = set[Any]().union(*rings)
        frame.items = [
            each
            for item in frame.items
            for each in (item.items if isinstance(item, Frame) and item in tangled else [item])
        ]
    first: dict[Any, fx.Node] = {}
    for node in sorted(holder, key=place.__getitem__):
        first.setdefault(holder[node], node)
    # by lines of the model, which equal layers have in common: rewrites may leave their calls in other orders
    keys = {item: (lines_in(node, frame.kind), str(node.target), place[node]) for item, node in first.items()}
    frame.items = list(nx.lexicographical_topological_sort(graph, keys.__getitem__))
    for each in frame.children:
        _ordered(each, before)
    return frame
