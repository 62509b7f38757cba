"""Stage reinplace: write in place into a cache that is written and then copied back over itself; drop the copy.

    y = write(cache, rows); copy_(cache, y)   →   y = write_(cache, rows)

For operators that the pass added, and for rows that the model writes, where the compiler launches calls as they come.
Only where nothing reads the old cache after the write, and only where the copy moves no element.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import getitem
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.fakes import fake_like, run_on_fakes
from fusion._torch.operators import OpOverload, given, schema_of
from fusion._torch.tensors import shares_memory
from fusion.graph import dims_of
from fusion.graph.aliasing import is_write, reserves
from fusion.graph.execution_scopes import is_parted
from fusion.graph.launches import is_view
from fusion.operators import HOST, LOWERINGS, OPERATORS, operator_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """A functional operator that has an in-place form.

    Attributes:
        functional: its overload.
        in_place: the overload of the in-place form.
        written: the arguments that the in-place form writes to.
        lowerings: the compilers that take the functional operator.
        in_place_lowerings: the compilers that take the in-place form.
        is_of_model: True if the calls are the model's own, and not those of the pass.
    """

    functional: OpOverload
    in_place: OpOverload
    written: Sequence[str]
    lowerings: Collection[str]
    in_place_lowerings: Collection[str]
    is_of_model: bool = False

    @property
    def count_before(self) -> int:
        """Number of results of the functional operator before its new caches."""
        return len(schema_of(self.functional).returns) - len(self.written)


_OF_MODEL = {
    each.functional: each
    for each in (
        Form(functional, in_place, ("self",), LOWERINGS, ("eager", "npugraph_ex"), is_of_model=True)
        for functional, in_place in (
            (aten.index_put.default, aten.index_put_.default),
            (aten.index_copy.default, aten.index_copy_.default),
        )
    )
}
"""Writes of rows in the model. GE makes them in place itself, and so does Inductor."""


@dataclass(frozen=True)
class Link:
    """Result number `item`, among the new caches, of the call `node`.

    The functional call writes this `result` into a copy of its argument `cache`.
    """

    node: fx.Node
    item: int
    cache: fx.Node
    result: fx.Node


@dataclass(frozen=True)
class Chain:
    """Writes into one cache, oldest first, and the `copy` of the last result over the input that the first one read."""

    copy: fx.Node
    links: tuple[Link, ...]


def reinplace(source: fx.Graph, lowering: str) -> tuple[str, ...]:
    """Replace functional calls of the pass by their in-place forms where this is safe.

    Where the compiler takes the in-place form alone, caches that the functional call would copy are cloned first.

    Args:
        source: the rewritten graph, changed in place.
        lowering: the compiler that the graph is meant for: one of `LOWERINGS`, or one that takes every operator. `HOST`
            does, and launches decompositions one by one.

    Returns:
        The names of the erased `copy_` nodes.
    """
    launched = "eager" if lowering == HOST else lowering
    for copy in _closing_copies(source):
        _shorten(copy)
    chains = [chain for copy in _closing_copies(source) if (chain := _chain(copy, lowering)) is not None]
    while (broken := next((each for each in chains if not _may_write(each, chains)), None)) is not None:
        chains.remove(broken)
    for node in dict.fromkeys(link.node for chain in chains for link in chain.links):
        _put_in_place(node)
    for chain in chains:
        _drop(chain.copy)
    for node in list(source.nodes):
        form = _functional(node)
        if form is None or form.is_of_model:
            continue
        is_fresh = all(_is_fresh(each, node) for each in _written(node))
        if is_fresh and _takes(form, lowering) and not _orders_by_results(form, lowering):
            _put_in_place(node)
        elif launched in LOWERINGS and launched not in form.lowerings:
            _put_in_place(node, _copies(node))
    return tuple(chain.copy.name for chain in chains)


def _closing_copies(source: fx.Graph) -> list[fx.Node]:
    """Return the `copy_` nodes over inputs at the end of the graph, the last one per input, in order."""
    last: dict[Any, fx.Node] = {}
    nodes = (node for node in reversed(source.nodes) if node.op != "output")
    for node in takewhile(lambda each: each.target is aten.copy_.default, nodes):
        last.setdefault(node.args[0], node)
    return [node for place, node in last.items() if isinstance(place, fx.Node) and place.op == "placeholder"][::-1]


def _functional(node: fx.Node) -> Form | None:
    """Return the form of `node` if it is a write of the pass or of the model that has an in-place form, else None."""
    if "fusion" not in node.meta:
        return _OF_MODEL.get(node.target) if isinstance(node.target, OpOverload) else None
    operator = operator_of(node.target)
    if operator is None or not operator.in_place:
        return None
    twin = OPERATORS[operator.in_place]
    return Form(operator.overload(), twin.overload(), tuple(twin.written), operator.lowerings, twin.lowerings)


def _takes(form: Form, lowering: str) -> bool:
    return lowering in form.in_place_lowerings or (lowering not in LOWERINGS and not form.is_of_model)


def _orders_by_results(form: Form, lowering: str) -> bool:
    """Return True if the graph compiler `lowering` takes the functional operator, and the in-place form does not return
    what it writes.

    GE orders calls by their operands: who reads memory of the graph behind a write must read a result of the write.
    """
    returned = len(schema_of(form.in_place).returns)
    return lowering == "torchair" and lowering in form.lowerings and returned == form.count_before


def _chain(copy: fx.Node, lowering: str) -> Chain | None:
    """Return the chain of writes whose last result `copy` brings back; None if it brings back anything else.

    Each call must have a form that the compiler `lowering` takes in place.
    """
    links: list[Link] = []
    place, value = copy.args[:2]
    steps: list[fx.Node] = []
    while value is not place:
        views, made = _peel_views(value)
        link = link_of(made, lowering)
        if link is None:
            return None
        links.append(link)
        steps = [*views, *steps]
        views, value = _peel_views(link.cache)
        steps = [*views, *steps]
        if _functional(_call(value)) is None:
            break
    return Chain(copy, tuple(reversed(links))) if links and value is place and puts_back(place, steps) else None


def _shorten(copy: fx.Node) -> None:
    """Replace a buffer that `slice_scatter` fills from end to end with a result of the pass by that result.

    Symbolic sizes leave such buffers in the graph.
    """
    value: Any = copy.args[1]
    fills: list[fx.Node] = []
    while isinstance(value, fx.Node) and fills_buffer(value):
        fills.append(value)
        value = value.args[1]
    for node in fills if isinstance(value, fx.Node) and _functional(_call(value)) else ():
        node.replace_all_uses_with(value)
        node.graph.erase_node(node)


def fills_buffer(node: fx.Node) -> bool:
    """Return True if the `slice_scatter` `node` overwrites all of its first argument with a source of the same strides.

    A source with the shape of the destination covers all of it, wherever the slice begins.
    """
    if node.target is not aten.slice_scatter.default or len(node.args) < 5:
        return False
    x, source = (each.meta["val"] for each in node.args[:2] if isinstance(each, fx.Node))
    is_full = dims_of(x.shape) == dims_of(source.shape) and node.args[5:] in ((), (1,))
    return is_full and dims_of(x.stride()) == dims_of(source.stride())


def _call(value: fx.Node) -> fx.Node:
    """Return the call that computes `value`: for a `getitem` the call with several results, else `value`."""
    source = value.args[0] if value.target is getitem else value
    return source if isinstance(source, fx.Node) else value


def link_of(result: fx.Node, lowering: str) -> Link | None:
    """Return `result` as a link if it is a new cache of a call that `lowering` takes in place, else None."""
    node = _call(result)
    form = _functional(node)
    if form is None or not _takes(form, lowering):
        return None
    number: Any = 0 if node is result else result.args[1]
    item = number - form.count_before
    if item < 0:
        return None
    cache = _written(node)[item]
    same = dims_of(result.meta["val"].stride()) == dims_of(cache.meta["val"].stride())
    return Link(node, item, cache, result) if same else None


def _is_fresh(cache: Any, reader: fx.Node) -> bool:
    """Return True if `cache` is a result of a functional call, or a view of one, that only `reader` reads.

    Such memory may be written to: no input has it, and no other node sees the write.
    """
    base = _peel_views(cache)[1]
    target: Any = base.target if isinstance(base, fx.Node) else None
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    return list(_readers(base)) == [reader]


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that the in-place form of the call `node` writes to."""
    form = _functional(node)
    assert form is not None
    arguments = given(form.functional, node.args, node.kwargs)
    return [arguments[name] for name in form.written]


def _peel_views(value: Any) -> tuple[list[fx.Node], Any]:
    """Split `value` into its views, innermost first, and the node that they are views of."""
    views: list[fx.Node] = []
    while isinstance(value, fx.Node) and _is_alias(value) and _call(value) is value:
        views.insert(0, value)
        value = value.args[0]
    return views, value


def _is_alias(node: fx.Node) -> bool:
    shows = is_view(node.target) and not reserves(node.target)
    return node.op == "call_function" and shows and bool(node.all_input_nodes)


def puts_back(place: Any, steps: Sequence[fx.Node]) -> bool:
    """Return True if `steps`, views applied to `place` one after the other, give `place` back: shape, strides, offset,
    dtype.
    """
    start = place.meta["val"]
    value = start
    with torch.no_grad():
        for node in steps:
            target: Any = node.target
            args, kwargs = map_arg((node.args[1:], node.kwargs), lambda each: each.meta["val"])
            value = run_on_fakes(target, (value, *args), kwargs)
    layouts = [(dims_of(each.shape), dims_of(each.stride()), each.storage_offset()) for each in (start, value)]
    return layouts[0] == layouts[1] and start.dtype == value.dtype and shares_memory(start, value)


# the order of reads and writes -------------------------------------------------------------------------------------


def _may_write(chain: Chain, chains: Sequence[Chain]) -> bool:
    """Return True if every write of `chain` may be in place, given that the other `chains` are written in place.

    Arguments that a call writes to and that belong to no chain must be memory of its own. As a side effect, readers of
    an old cache are moved before the write where their operands allow it.
    """
    linked = {(link.node, link.item) for each in chains for link in each.links}
    olds = [chain.copy.args[0], *(link.result for link in chain.links[:-1])]
    for old, link in zip(olds, chain.links, strict=True):
        others = [place for item, place in enumerate(_written(link.node)) if (link.node, item) not in linked]
        if not all(_is_fresh(place, link.node) for place in others):
            return False
        if not all(_reads_before(reader, link) for reader in _readers(old) if reader is not chain.copy):
            return False
    return not any(reader.op == "output" for reader in _readers(chain.links[-1].result))


def _readers(value: Any) -> Iterator[fx.Node]:
    """Yield the nodes that read `value`, directly or through views, views themselves left out."""
    for user in list(value.users):
        yield from _readers(user) if _is_alias(user) else (user,)


def _reads_before(reader: fx.Node, link: Link) -> bool:
    """Return True if `reader` reads the cache before `link` writes to it.

    A reader behind the write is moved before it, if its operands allow that. The write itself may read the cache in no
    other argument.
    """
    if reader is link.node:
        cache = _peel_views(link.cache)[1]
        return sum(_peel_views(each)[1] is cache for each in reader.all_input_nodes) == 1
    if reader < link.node:
        return True
    movable = reader.op == "call_function" and not is_write(reader)
    if not movable or not all(each < link.node for each in reader.all_input_nodes) or is_parted(link.node, reader):
        return False
    link.node.prepend(reader)
    return True


# changes -----------------------------------------------------------------------------------------------------------


def _put_in_place(node: fx.Node, caches: Sequence[fx.Node] = ()) -> None:
    """Replace `node` by its in-place form.

    Users of the new caches read the written arguments instead: those of `node`, or `caches` where given.
    """
    form = _functional(node)
    assert form is not None
    places = _written(node)
    changed = dict(zip(places, caches or places, strict=True))
    with node.graph.inserting_before(node):
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: changed.get(each, each))
        new = node.graph.call_function(form.in_place, args, kwargs)
    new.meta = {"fusion": {"rule": "write in place", "lowering": "", "form": ""}, **node.meta}
    returned = len(schema_of(form.in_place).returns)
    if isinstance(node.meta["val"], torch.Tensor):
        new.meta["val"] = fake_like(node.meta["val"]) if returned else None
        node.replace_all_uses_with(new if returned else changed[places[0]])
    else:
        before = form.count_before
        vals = tuple(node.meta["val"][:returned])
        new.meta["val"] = vals[0] if returned == 1 else vals or None
        for item in list(node.users):
            number: Any = item.args[1]
            if number < before and returned > 1:
                item.replace_input_with(node, new)
                continue
            # a form with one result returns no tuple
            item.replace_all_uses_with(new if number < before else changed[places[number - before]])
            node.graph.erase_node(item)
    node.graph.erase_node(node)


def _copies(node: fx.Node) -> list[fx.Node]:
    """Copy, before `node`, each cache that its in-place form writes to; memory that only `node` reads needs no copy."""
    copies: list[fx.Node] = []
    with node.graph.inserting_before(node):
        for cache in _written(node):
            fresh = _is_fresh(cache, node)
            copies.append(cache if fresh else node.graph.call_function(aten.clone.default, (cache,)))
            if not fresh:
                copies[-1].meta = {**node.meta, "val": fake_like(cache.meta["val"])}
    return copies


def _drop(copy: fx.Node) -> None:
    """Erase `copy`, and the views that only it read."""
    place, value = copy.args[:2]
    assert isinstance(place, fx.Node)
    copy.replace_all_uses_with(place)
    copy.graph.erase_node(copy)
    while isinstance(value, fx.Node) and not value.users and _is_alias(value):
        source = value.args[0]
        value.graph.erase_node(value)
        value = source
