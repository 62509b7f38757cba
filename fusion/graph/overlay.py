"""The overlay: which canonical value each node of a user's FX graph holds, and where each value can be read."""

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

Held = Value | tuple["Value | None", ...]
Made = TypeVar("Made")


_VIEWS = ("reshape", "permute")
_SEEN = ("permute", "slice", "expand")  # built from what they see, without computing anything
_RESHAPED_INSIDE = ("cat", "cast", "scale")


def _size(value: Value) -> Hashable:
    return value.op, value.dtype, prod(value.shape)


def unviewed(value: Value) -> Value:
    """What `value` is seen from through reshapes and permutes."""
    return value.below(*_VIEWS)


@dataclass(frozen=True)
class Graph:
    """A read-only view of one FX graph.

    Attributes:
        source: the user's graph; nothing here changes it.
        algebra: the values of this graph.
        held: the value (or tuple of values) of each node that computes tensors.
        places: every node that holds a value, in order; a value that no node holds must be built by its recipe.
        fixed: the nodes that are computed from Parameters alone.
        facts: what is known of the inputs.
        written: the inputs that the closing writes of the graph change.
        regions: how many writes to memory stand before each node, the closing ones not counted.
        readings: what values mean, as far as it was read.
    """

    source: fx.Graph
    algebra: Algebra
    held: Mapping[fx.Node, Held]
    places: Mapping[Value, tuple[fx.Node, ...]]
    fixed: Set[fx.Node] = frozenset()
    facts: Facts = field(default_factory=Facts)
    written: Set[Value] = frozenset()
    regions: Mapping[fx.Node, int] = field(default_factory=dict)
    readings: Readings = field(default_factory=Readings)
    _owners: dict[Value, fx.Node] = field(default_factory=dict, repr=False)
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def shared(self, make: Callable[[], Made]) -> Made:
        """What `make` gives, made once for this graph: what several readers remember together."""
        if make not in self._shared:
            self._shared[make] = make()
        return self._shared[make]

    def is_fixed(self, *values: Value | None) -> bool:
        """Whether values are, or are built from, Parameters alone."""
        nodes = [node for each in values if each is not None for node in self.reads(each)]
        return bool(nodes) and all(node in self.fixed for node in nodes)

    def node(self, value: Value) -> fx.Node | None:
        """The first node that holds `value`, None where only a recipe can build it."""
        places = self.places.get(value)
        return places[0] if places else None

    def operand(self, node: fx.Node, argument: fx.Node) -> Value | None:
        """The value of a tensor that `node` is given; None where memory was written to since it was computed."""
        held = self.held.get(argument)
        return held if isinstance(held, Value) and self.regions[argument] == self.regions[node] else None

    def makers(self, value: Value) -> tuple[fx.Node, ...]:
        """The nodes that compute `value` from something else (not those that only pass it on, like a no-op view).

        `copy(x, value)` passes nothing on: it moves every element.
        """
        places = self.places.get(value, ())
        return tuple(
            node
            for node in places
            if node.target is torch.ops.aten.copy.default or not self._is_passed_on(value, node, len(places))
        )

    def _is_passed_on(self, value: Value, node: fx.Node, places: int) -> bool:
        """Whether `node` reads a node that holds `value` already, or does through steps that undo each other."""
        sources = node.all_input_nodes
        while places > 1 and len(sources) == 1 and self.held.get(sources[0]) is not value:
            sources = sources[0].all_input_nodes
        return any(self.held.get(source) is value for source in sources)

    def reads(self, value: Value) -> tuple[fx.Node, ...]:
        """The nodes from which `value` is read or built."""
        node = self.node(value)
        return (node,) if node else tuple(each for arg in self.recipe(value).args for each in self.reads(arg))

    def recipe(self, value: Value) -> Value:
        """What builds `value`, which no node holds: an equal value, whose args are held or have a recipe.

        Every reshape of x is a value of x alone; where all users of x read it through one other reshape, x is read
        there too, so that what makes that reshape can be replaced. A reshape of what is joined, cast or scaled is made
        of reshapes: where a node holds it in another shape, it is not made again. Nor is what must be computed, where a
        node holds it in another shape or order. Where none does, it is made without dims of size 1, so that rows with
        and without heads share a table, unless that can be made only later. A choice between numbers, or a number and
        something else, fills the number in. Which of two numbers was chosen is told by the condition that a node holds.
        """
        if value.op == "below":
            return self._by_condition(value) or value
        if value.op == "where":
            return _filled(self.algebra, value)
        if value.op in _RESHAPED_INSIDE:
            alike = (*self._made_of_reshapes.get(_size(value), ()), self.algebra.reshape(value, but_ones(value.shape)))
            found = (each for each in alike if each is not value and self.algebra.reshape(each, value.shape) is value)
            read = next((each for each in found if self.node(each) or self._is_made_before(each, value)), None)
        elif value.op == "reshape":
            read = self._passed_on(value.arg)
        elif value in self._turned:
            return self._turned[value]
        else:
            read = None if value.op in _SEEN else self._reshaped.get(value)
        return value if read is None else self.algebra.make("reshape", (read,), (), value.shape, value.dtype)

    def _by_condition(self, value: Value, *dtypes: torch.dtype | None) -> Value | None:
        """Where a number chosen of two is below a bound, made of the condition; None where no node holds that.

        `dtypes` are those to which it is rounded before it is compared.
        """
        a, x = self.algebra, value.arg
        if x.op in ("reshape", "permute", "cast"):
            within = a.make("below", (x.arg,), value.attrs, x.arg.shape, value.dtype)
            found = self._by_condition(within, *((x.dtype,) if x.op == "cast" else ()), *dtypes)
            return found if found is None or x.op == "cast" else a.seen_as(found, x)
        if x.op != "where" or any(each.op != "full" for each in x.args[1:]) or not self.node(x.arg):
            return None
        below = [_rounded(each.attrs[0], x.dtype, *dtypes) < value.attrs[0] for each in x.args[1:]]
        if below[0] == below[1] or x.arg.shape != x.shape or x.arg.dtype is not torch.bool:
            return None
        return a.make("reshape" if below[0] else "not", (x.arg,), (), x.shape, torch.bool)

    def _is_made_before(self, one: Value, other: Value) -> bool:
        """Whether one value can be made no later than another, and not of it."""
        return other not in one.args and self._last_read(one) <= self._last_read(other)

    def _last_read(self, value: Value) -> int:
        """Position of the last node from which `value` is made of its own args."""
        return max((self.order[node] for arg in value.args for node in self.reads(arg)), default=0)

    @cached_property
    def _made_of_reshapes(self) -> Mapping[Hashable, Sequence[Value]]:
        """Held values that a reshape changes inside, by op, dtype and number of elements."""
        found: dict[Hashable, list[Value]] = {}
        for value in self.places:
            if value.op in _RESHAPED_INSIDE:
                found.setdefault(_size(value), []).append(value)
        return found

    @cached_property
    def _reshaped(self) -> Mapping[Value, Value]:
        """What nodes hold in another shape only, and the first that does."""
        found: dict[Value, Value] = {}
        for value in self.places:
            if value.op == "reshape":
                found.setdefault(value.arg, value)
        return found

    @cached_property
    def _turned(self) -> Mapping[Value, Value]:
        """What must be computed, and nodes hold in another order only, as it is seen from the first that does."""
        found: dict[Value, Value] = {}
        for value in self.places:
            if value.op == "permute" and value.arg.op not in _SEEN and value.arg not in self.places:
                back = tuple(value.attrs.index(axis) for axis in range(value.rank))
                of = value.arg
                found.setdefault(of, self.algebra.make("permute", (value,), back, of.shape, of.dtype))
        return found

    def _passed_on(self, value: Value) -> Value | None:
        """The reshape through which all read `value` where it is made; None where there is none, or it copies.

        It may be reshaped back behind that, by nodes that hold it too.
        """
        places = self.places.get(value, ())
        if not places or not is_dense(places[0].meta["val"]):
            return None
        users = [self.held.get(user) for user in places[0].users if user not in places]
        if len(users) != 1 or not isinstance(users[0], Value) or users[0].op != "reshape" or users[0].arg is not value:
            return None
        return users[0]

    @property
    def owners(self) -> Mapping[Value, fx.Node]:
        """For every value that a node holds or is built from, the first such node: where to point a user to."""
        for value, nodes in self.places.items() if not self._owners else ():
            waiting = [value]
            while waiting:
                each = waiting.pop()
                self._owners.setdefault(each, nodes[0])
                waiting.extend(arg for arg in each.args if arg not in self.places and arg not in self._owners)
        return self._owners

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype | None]:
        """Those of all values that nodes hold or are built from: what needs another is nowhere."""
        return frozenset(each.dtype for each in self.owners)

    @cached_property
    def overwritten(self) -> Mapping[Value, Value]:
        """For every write that a `copy_` brings back over the input it was written to: what it writes over.

        A write is there by the value it makes and by the views of that value; a cache written twice is there twice.
        """
        found: dict[Value, Value] = {}
        for node in self.source.nodes:
            if node.target is torch.ops.aten.copy_.default and not self._is_cloned(node.args[1]):
                place, made = (self.held.get(each) for each in node.args[:2])
                found.update(self._writes_between(place, made))
        return found

    def _is_cloned(self, node: Any) -> bool:
        """Whether a node passes on a copy of what was computed: then a write below it cannot be in place."""
        while isinstance(node, fx.Node) and node.target is not torch.ops.aten.clone.default:
            value, source = self.held.get(node), node.args[0] if node.args else None
            below = self.held.get(source) if isinstance(source, fx.Node) else None
            if not (isinstance(value, Value) and isinstance(below, Value)) or unviewed(value) is not unviewed(below):
                return False
            node = source
        return isinstance(node, fx.Node)

    def _writes_between(self, place: Held | None, made: Held | None) -> Mapping[Value, Value]:
        """The writes by which `made` came from `place`; none where anything else did it."""
        found: dict[Value, Value] = {}
        while isinstance(made, Value) and unviewed(made) is not place:
            over = next((each.over for each in self.readings.of(unviewed(made)) if each.over is not None), None)
            if over is None:
                return {}
            cache = unviewed(over)
            while made.op in _VIEWS:
                found[made] = cache
                made = made.arg
            found[made] = cache
            made = cache
        return found if isinstance(made, Value) else {}

    @cached_property
    def order(self) -> Mapping[fx.Node, int]:
        """Position of each node."""
        return {node: position for position, node in enumerate(self.source.nodes)}

    @property
    def dependence(self) -> Dependence:
        """Which nodes are computed from which; made once, however many readings are added."""
        if Dependence not in self._shared:
            self._shared[Dependence] = Dependence(self.source, self.order)
        return self._shared[Dependence]

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """True if `node` is computed, directly or not, from `on`, or is it."""
        return self.dependence.depends(node, on)


def _rounded(number: float, *dtypes: torch.dtype | None) -> float:
    """A number in one dtype after the other."""
    x = torch.tensor(number, dtype=torch.float64)
    for dtype in dtypes:
        x = x if dtype is None else x.to(dtype)
    return x.item()


def _filled(a: Algebra, choice: Value) -> Value:
    """A choice in which one side is a number as that number filled in; itself where neither is one."""
    condition, yes, no = choice.args
    if yes.op != "full":
        condition, yes, no = a.make("not", (condition,), (), condition.shape, torch.bool), no, yes
    tensors = (condition,) if no.op == "full" else (condition, no)
    if yes.op != "full" or broadcast(*(each.shape for each in tensors)) != choice.shape:
        return choice
    numbers = (*yes.attrs, *no.attrs) if no.op == "full" else yes.attrs
    return a.make("filled", tensors, numbers, choice.shape, choice.dtype)
