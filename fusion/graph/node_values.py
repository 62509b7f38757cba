"""The overlay: the canonical value of each node of a user's FX graph, and the nodes from which a value can be read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
import torch.fx as fx

from fusion.facts import Facts
from fusion.graph.algebra import Algebra
from fusion.graph.dependence import Dependence
from fusion.graph.dims import broadcast, but_ones, is_dense
from fusion.graph.readings import Readings
from fusion.graph.value import Value

NodeValue = Value | tuple["Value | None", ...]
Made = TypeVar("Made")


_VIEWS = ("reshape", "permute")
_SEEN = ("permute", "slice", "expand")  # views: rebuilt from their argument without a kernel
_RESHAPED_INSIDE = ("cat", "cast", "scale")


def _size(value: Value) -> Hashable:
    return value.op, value.dtype, prod(value.shape)


def unviewed(value: Value) -> Value:
    """Return the value below the reshapes and permutes of `value`."""
    return value.below(*_VIEWS)


@dataclass(frozen=True)
class Graph:
    """A read-only view of one FX graph.

    Attributes:
        source: the user's graph; nothing here changes it.
        algebra: the values of this graph.
        value_of: the value of each node that computes a tensor, or the tuple of values for several.
        places: for each value, every node with that value, in order; other values must be built by their recipes.
        fixed: the nodes that are computed from Parameters alone.
        facts: known facts about the inputs.
        written: the inputs that the closing writes of the graph mutate.
        regions: for each node the number of memory writes before it, not counting the closing writes.
        readings: the meanings of values that readers have added.
    """

    source: fx.Graph
    algebra: Algebra
    value_of: Mapping[fx.Node, NodeValue]
    places: Mapping[Value, tuple[fx.Node, ...]]
    fixed: Set[fx.Node] = frozenset()
    facts: Facts = field(default_factory=Facts)
    written: Set[Value] = frozenset()
    regions: Mapping[fx.Node, int] = field(default_factory=dict)
    readings: Readings = field(default_factory=Readings)
    _owners: dict[Value, fx.Node] = field(default_factory=dict, repr=False)
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def shared(self, make: Callable[[], Made]) -> Made:
        """Memoise the result of `make` for this graph, so that several readers share it."""
        if make not in self._shared:
            self._shared[make] = make()
        return self._shared[make]

    def is_fixed(self, *values: Value | None) -> bool:
        """Return True if `values` are read or built from nodes that are computed from Parameters alone."""
        nodes = [node for each in values if each is not None for node in self.reads(each)]
        return bool(nodes) and all(node in self.fixed for node in nodes)

    def node(self, value: Value) -> fx.Node | None:
        """Return the first node with `value`, None where only a recipe can build it."""
        places = self.places.get(value)
        return places[0] if places else None

    def operand(self, node: fx.Node, argument: fx.Node) -> Value | None:
        """Return the value of the `argument` of `node`; None for a tuple, or where memory was written in between."""
        value = self.value_of.get(argument)
        return value if isinstance(value, Value) and self.regions[argument] == self.regions[node] else None

    def makers(self, value: Value) -> tuple[fx.Node, ...]:
        """Return the nodes that compute `value`, without those that only pass it on, such as a no-op view.

        `copy(x, value)` is a maker: it moves every element.
        """
        places = self.places.get(value, ())
        return tuple(
            node
            for node in places
            if node.target is torch.ops.aten.copy.default or not self._is_passed_on(value, node, len(places))
        )

    def _is_passed_on(self, value: Value, node: fx.Node, places: int) -> bool:
        """Return True if an input of `node` has `value` already, directly or, if `places` nodes have it, through a
        chain of views.

        The views of a chain undo each other.
        """
        sources = node.all_input_nodes
        while places > 1 and len(sources) == 1 and self.value_of.get(sources[0]) is not value:
            sources = sources[0].all_input_nodes
        return any(self.value_of.get(source) is value for source in sources)

    def reads(self, value: Value) -> tuple[fx.Node, ...]:
        """Return the nodes whose results are read to obtain `value`: the first node with it, else those that its recipe
        reads.
        """
        node = self.node(value)
        return (node,) if node else tuple(each for arg in self.recipe(value).args for each in self.reads(arg))

    def recipe(self, value: Value) -> Value:
        """Return an equal value whose op builds `value`, which no node has; its arguments are read or built in turn.

        - A value that a node computes in another shape or order, or repeated along dims of size 1, is viewed from
          there, and not computed again.
        - A reshape of x is viewed from x; where all users of x read it through one reshape, from that, so that the
          producer of that reshape can be replaced.
        - A cat, cast or scale, which the algebra builds of reshaped arguments, is read from an equal value of another
          shape. If no node has one, it is built without dims of size 1, so that rows with and without heads share a
          table, unless its operands are available later.
        - A choice between numbers, or a number and a tensor, fills the number in.
        - A comparison of a choice between two numbers is built from its condition.
        """
        viewed = self._from_view.get(value)
        if value.op == "below":
            return self._by_condition(value) or viewed or value
        if value.op == "where":
            return viewed or _filled(self.algebra, value)
        if value.op in _RESHAPED_INSIDE:
            alike = (*self._by_size.get(_size(value), ()), self.algebra.reshape(value, but_ones(value.shape)))
            equal = [each for each in alike if each is not value and self.algebra.reshape(each, value.shape) is value]
            if viewed is not None and not any(map(self.node, equal)):
                return viewed
            read = next((each for each in equal if self.node(each) or self._is_available_before(each, value)), None)
        elif value.op == "reshape":
            read = self._read_through_reshape(value.arg)
        elif viewed is not None:
            return viewed
        else:
            read = None if value.op in _SEEN else self._first_reshape.get(value)
        return value if read is None else self.algebra.make("reshape", (read,), (), value.shape, value.dtype)

    def _by_condition(self, value: Value, *dtypes: torch.dtype | None) -> Value | None:
        """Build `value`, where(c, n, m) < bound, from c: as c or as not c; None unless a node has c.

        `dtypes` are those that the numbers are rounded to, one after the other, before the comparison.
        """
        a, x = self.algebra, value.arg
        if x.op in ("reshape", "permute", "cast"):
            within = a.make("below", (x.arg,), value.attrs, x.arg.shape, value.dtype)
            condition = self._by_condition(within, *((x.dtype,) if x.op == "cast" else ()), *dtypes)
            return condition if condition is None or x.op == "cast" else a.seen_as(condition, x)
        if x.op != "where" or any(each.op != "full" for each in x.args[1:]) or not self.node(x.arg):
            return None
        below = [_rounded(each.attrs[0], x.dtype, *dtypes) < value.attrs[0] for each in x.args[1:]]
        if below[0] == below[1] or x.arg.shape != x.shape or x.arg.dtype is not torch.bool:
            return None
        return a.make("reshape" if below[0] else "not", (x.arg,), (), x.shape, torch.bool)

    def _is_available_before(self, one: Value, other: Value) -> bool:
        """Return True if `one` is not built from `other`, and its operands are available no later."""
        return other not in one.args and self._last_read(one) <= self._last_read(other)

    def _last_read(self, value: Value) -> int:
        """Return the position of the last node among those that the arguments of `value` are read from; 0 for none."""
        return max((self.order[node] for arg in value.args for node in self.reads(arg)), default=0)

    @cached_property
    def _by_size(self) -> Mapping[Hashable, Sequence[Value]]:
        """Values of nodes that the algebra builds of reshaped arguments, by op, dtype and number of elements."""
        result: dict[Hashable, list[Value]] = {}
        for value in self.places:
            if value.op in _RESHAPED_INSIDE:
                result.setdefault(_size(value), []).append(value)
        return result

    @cached_property
    def _first_reshape(self) -> Mapping[Value, Value]:
        """For each value, the first reshape of it that a node has."""
        result: dict[Value, Value] = {}
        for value in self.places:
            if value.op == "reshape":
                result.setdefault(value.arg, value)
        return result

    @cached_property
    def _from_view(self) -> Mapping[Value, Value]:
        """Value without a node -> the first permuted or expanded node of the value, viewed back in its own shape."""
        result: dict[Value, Value] = {}
        for value in self.places:
            if value.op in ("permute", "expand") and value.arg.op not in _SEEN and value.arg not in self.places:
                result.setdefault(value.arg, self._undone(value))
        return result

    def _undone(self, view: Value) -> Value:
        """Build the argument of `view`, a permute or an expand, as a permute or as slices of `view`."""
        if view.op == "permute":
            back = tuple(view.attrs.index(axis) for axis in range(view.rank))
            return self.algebra.make("permute", (view,), back, view.arg.shape, view.dtype)
        result = view
        for axis, (size, repeated) in enumerate(zip(view.arg.shape, view.shape, strict=True)):
            if size != repeated:
                shape = (*result.shape[:axis], 1, *result.shape[axis + 1 :])
                result = self.algebra.make("slice", (result,), (axis, 0, 1, 1), shape, view.dtype)
        return result

    def _read_through_reshape(self, value: Value) -> Value | None:
        """Return the reshape that is the only user of `value`; None if there is none, or if it copies.

        Other nodes with `value`, such as a reshape back, do not count as users.
        """
        places = self.places.get(value, ())
        if not places or not is_dense(places[0].meta["val"]):
            return None
        users = [self.value_of.get(user) for user in places[0].users if user not in places]
        if len(users) != 1 or not isinstance(users[0], Value) or users[0].op != "reshape" or users[0].arg is not value:
            return None
        return users[0]

    @property
    def owners(self) -> Mapping[Value, fx.Node]:
        """For every value that a node has or is built from, the first such node: the line to report for it."""
        for value, nodes in self.places.items() if not self._owners else ():
            waiting = [value]
            while waiting:
                each = waiting.pop()
                self._owners.setdefault(each, nodes[0])
                waiting.extend(arg for arg in each.args if arg not in self.places and arg not in self._owners)
        return self._owners

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype | None]:
        """Dtypes of all values that nodes have or are built from: a rule that needs another one cannot match."""
        return frozenset(each.dtype for each in self.owners)

    @cached_property
    def overwritten(self) -> Mapping[Value, Value]:
        """For each write that a `copy_` puts back into the input it was written to: the value before the write.

        The keys are the value after the write and the views of it; a cache that is written twice has an entry for each.
        """
        result: dict[Value, Value] = {}
        for node in self.source.nodes:
            if node.target is torch.ops.aten.copy_.default and not self._is_cloned(node.args[1]):
                place, made = (self.value_of.get(each) for each in node.args[:2])
                result.update(self._writes_between(place, made))
        return result

    def _is_cloned(self, node: Any) -> bool:
        """Return True if `node` views a clone of a computed tensor, below which a write cannot be in place."""
        while isinstance(node, fx.Node) and node.target is not torch.ops.aten.clone.default:
            value, source = self.value_of.get(node), node.args[0] if node.args else None
            below = self.value_of.get(source) if isinstance(source, fx.Node) else None
            if not (isinstance(value, Value) and isinstance(below, Value)) or unviewed(value) is not unviewed(below):
                return False
            node = source
        return isinstance(node, fx.Node)

    def _writes_between(self, place: NodeValue | None, made: NodeValue | None) -> Mapping[Value, Value]:
        """Map each write, and its views, between `place` and `made` to the cache it overwrites.

        Empty unless `made` comes from `place` by writes and views alone.
        """
        result: dict[Value, Value] = {}
        while isinstance(made, Value) and unviewed(made) is not place:
            over = next((each.over for each in self.readings.of(unviewed(made)) if each.over is not None), None)
            if over is None:
                return {}
            cache = unviewed(over)
            while made.op in _VIEWS:
                result[made] = cache
                made = made.arg
            result[made] = cache
            made = cache
        return result if isinstance(made, Value) else {}

    @cached_property
    def order(self) -> Mapping[fx.Node, int]:
        """Position of each node in the graph."""
        return {node: position for position, node in enumerate(self.source.nodes)}

    @property
    def dependence(self) -> Dependence:
        """Reachability between nodes, computed once for all graphs that share the source."""
        if Dependence not in self._shared:
            self._shared[Dependence] = Dependence(self.source, self.order)
        return self._shared[Dependence]

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Return True if `node` is `on`, or is computed from `on` directly or indirectly."""
        return self.dependence.depends(node, on)


def _rounded(number: float, *dtypes: torch.dtype | None) -> float:
    """Round `number` to each of `dtypes` in turn."""
    x = torch.tensor(number, dtype=torch.float64)
    for dtype in dtypes:
        x = x if dtype is None else x.to(dtype)
    return x.item()


def _filled(a: Algebra, choice: Value) -> Value:
    """Return a `choice` with numbers on one or both sides as op "filled"; `choice` itself where neither is a number."""
    condition, yes, no = choice.args
    if yes.op != "full":
        condition, yes, no = a.make("not", (condition,), (), condition.shape, torch.bool), no, yes
    tensors = (condition,) if no.op == "full" else (condition, no)
    if yes.op != "full" or broadcast(*(each.shape for each in tensors)) != choice.shape:
        return choice
    numbers = (*yes.attrs, *no.attrs) if no.op == "full" else yes.attrs
    return a.make("filled", tensors, numbers, choice.shape, choice.dtype)
