"""Stage canonicalise: translate an FX graph to canonical values, without changing the graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.operators import OpOverload, is_random
from fusion._torch.tensors import constant_numbers
from fusion.errors import FusionError
from fusion.facts import Facts
from fusion.graph import Algebra, Graph, Value, dims_of
from fusion.graph.aliasing import closing_writes, is_write, reserves, written_by
from fusion.graph.dims import dim_of
from fusion.graph.node_values import NodeValue
from fusion.graph.parameter_only import derived
from fusion.graph.proof_steps import proof, proven
from fusion.stages.canonicalise import arithmetic, comparisons, complex_numbers
from fusion.stages.canonicalise.band_buffers import banded
from fusion.stages.canonicalise.composites import Composites
from fusion.stages.canonicalise.translators import COMPLEX_MODES, Out, Translated, translator_of

__all__ = ["canonicalise"]

# importing a family registers its translators
for _family in (
    "buffers",
    "contractions",
    "grouped_rows",
    "listed_positions",
    "reductions",
    "sdpa",
    "shapes",
    "writes",
):
    import_module(f"{__name__}.{_family}")


def canonicalise(source: fx.Graph, facts: Facts = Facts()) -> Graph:
    """Return the canonical view of `source`, whose nodes must carry fake tensors in `meta["val"]`."""
    walk = _Walk(source, facts)
    for node in source.nodes:
        walk.visit(node)
    places = {value: tuple(nodes) for value, nodes in walk.places.items()}
    fixed = derived(source, facts.parameters)
    return Graph(source, walk.algebra, walk.values, places, fixed, facts, walk.written(), walk.regions)


class _Walk:
    """One pass over the nodes of a graph.

    Attributes:
        values: for each node its canonical value, or a tuple of them for several results.
        places: for each value the nodes that have it.
        regions: for each node the number of writes to memory before it, closing ones aside.
    """

    def __init__(self, source: fx.Graph, facts: Facts) -> None:
        self.source = source
        self.facts = facts
        self.algebra = Algebra()
        self.values: dict[fx.Node, NodeValue] = {}
        self.places: dict[Value, list[fx.Node]] = {}
        self.regions: dict[fx.Node, int] = {}
        self._region = 0
        self._closing = closing_writes(source)
        self._composites = Composites()
        vals = [node.meta.get("val") for node in source.nodes]
        self._devices = {each.device for each in vals if isinstance(each, torch.Tensor)}

    def visit(self, node: fx.Node) -> None:
        """Record the value of `node`, and its region: the number of writes before it, except the closing ones."""
        self.regions[node] = self._region
        if node.op in ("placeholder", "get_attr"):
            self._record(node, self._leaf(node))
        elif node.op == "call_function":
            self._record(node, self._call(node))
            if is_write(node) and node not in self._closing:
                self._region += 1

    def written(self) -> frozenset[Value]:
        """Return the inputs that the closing writes change."""
        places = [self.values.get(each) for node in self._closing for each in written_by(node)]
        return frozenset(each for each in places if isinstance(each, Value) and each.op == "input")

    def _record(self, node: fx.Node, value: NodeValue | None) -> None:
        if value is None:
            return
        self.values[node] = value
        if isinstance(value, Value):
            self.places.setdefault(value, []).append(node)

    def _leaf(self, node: fx.Node) -> Value | None:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            place = (node.name, self._region)
            return self._known(node, val) or self.algebra.make("input", (), place, dims_of(val.shape), val.dtype)
        if val is None and node.op == "placeholder" and node.users:
            raise FusionError(
                f"reading the graph: node {node.name} has no shape in meta['val']; "
                "trace the graph under fake tensors (or run torch.fx.passes.fake_tensor_prop) before the pass"
            )
        return None

    def _known(self, node: fx.Node, val: torch.Tensor) -> Value | None:
        """Return the value of an input or attribute with known elements: a small constant or a band; else None."""
        if node.op == "get_attr":
            return self._constant(val, constant_numbers(node))
        band = self.facts.bands.get(node.name)
        return None if band is None else banded(self.algebra, band, dims_of(val.shape), val.dtype)

    def _constant(self, val: torch.Tensor, numbers: tuple[float, ...] | None) -> Value | None:
        """Return the value of a constant with the elements `numbers`; None if these are unknown or one is NaN."""
        if not numbers or any(map(math.isnan, numbers)):  # NaN is not equal to itself
            return None
        shape = dims_of(val.shape)
        if len(numbers) == 1 and (val.is_floating_point() or not shape):
            return comparisons.constant(self.algebra, numbers[0], shape, val.dtype)
        return self.algebra.make("constant", (), (numbers,), shape, val.dtype)

    def _operand(self, argument: Any) -> Any:
        """Translate an argument of a call: a tensor to its value, a symbolic number to a dim, others to themselves.

        A tensor that may have been written to since it was computed becomes a new input.
        """
        if not isinstance(argument, fx.Node):
            return argument
        val = argument.meta.get("val")
        if isinstance(val, torch.SymInt):
            return dim_of(val)
        value = self.values.get(argument)
        stale = self.regions[argument] != self._region or (is_write(argument) and argument not in self._closing)
        stale = stale and argument.name not in self.facts.bands
        if stale and isinstance(val, torch.Tensor):
            leaf = self.algebra.make("input", (), (argument.name, self._region), dims_of(val.shape), val.dtype)
            self.places.setdefault(leaf, [argument])
            return leaf
        return value if value is not None else argument

    def _call(self, node: fx.Node) -> NodeValue | None:
        val = node.meta.get("val")
        if node.target is operator.getitem:
            results = self.values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
            known = results[node.args[1]] if isinstance(results, tuple) and isinstance(node.args[1], int) else None
            return known if known is not None else self._opaque(node, val)
        if not isinstance(node.target, OpOverload):
            return self._opaque(node, val) if isinstance(val, torch.Tensor) else None
        return self._canonical(node, self._operand) or self._by_parts(node) or self._opaque(node, val)

    def _canonical(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> NodeValue | None:
        """Return the value of the call `node` by the translator of its operator; None where none applies.

        `operand` gives the value, or the number, of each argument that is a node.
        """
        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), operand)
        translator = translator_of(target, args)
        if translator is None or (len(self._devices) > 1 and _moves(node)):
            return None
        return self._translate(translator, node.meta.get("val"), args, kwargs)

    def _by_parts(self, node: fx.Node) -> NodeValue | None:
        """Return the value of a composite call by the translators of its parts; None if a part but the last has none.

        Any other opaque part would be an intermediate that nothing can build.
        """
        parts = self._composites.parts(node)
        if parts is None:
            return None
        inside = dict(zip(parts.find_nodes(op="placeholder"), map(self._operand, node.all_input_nodes), strict=True))

        def operand(part: fx.Node) -> Any:
            val = part.meta.get("val")
            return dim_of(val) if isinstance(val, torch.SymInt) else inside[part]

        result: Any = parts.output_node().args[0]
        for part in parts.nodes:
            if part.op != "call_function" or isinstance(part.meta.get("val"), torch.SymInt):
                continue
            if part.target is operator.getitem:
                inside[part] = inside[part.all_input_nodes[0]][part.args[1]]
            else:
                value = self._canonical(part, operand)
                inside[part] = self._opaque(part, part.meta["val"], operand) if part is result and not value else value
            if inside[part] is None:
                return None
        results: Any = map_arg(result, operand)
        return tuple(results) if isinstance(results, list) else results

    @proof
    def _translate(
        self, translator: Callable[..., Translated], val: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NodeValue | None:
        if not isinstance(val, torch.Tensor):
            out = Out((), None)
            result = translator(self.algebra, out, *args, **kwargs)
            return result if isinstance(result, tuple) else None
        out = Out(dims_of(val.shape), val.dtype)
        complex_args = [each for each in args if complex_numbers.is_complex(each)]
        if translator is arithmetic.mul and complex_args:
            result = complex_numbers.product(self.algebra, out, *args)
        elif complex_args and complex_args[0].op == "complex" and COMPLEX_MODES[translator] == "parts":
            result = self._both_parts(translator, out, args, kwargs)
        elif complex_args and not COMPLEX_MODES[translator]:
            return None
        else:
            result = translator(self.algebra, out, *args, **kwargs)
        right = isinstance(result, Value) and (result.shape, result.dtype) == (out.shape, out.dtype)
        return result if right else None

    def _both_parts(
        self, translator: Callable[..., Translated], out: Out, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Value | None:
        real = Out(out.shape, proven(out.dtype).to_real())
        re, im = (translator(self.algebra, real, part, *args[1:], **kwargs) for part in args[0].args)
        return (
            complex_numbers.pair(self.algebra, re, im, out) if isinstance(re, Value) and isinstance(im, Value) else None
        )

    def _opaque(self, node: fx.Node, val: Any, operand: Callable[[fx.Node], Any] | None = None) -> Value:
        """Return the value of `node` with the op that its operator is called, for which no translator is known.

        Equal calls get equal values, except those that write, draw random numbers or return uninitialised memory. `val`
        is the fake result; `operand` gives the value of each argument, by default `_operand`.
        """
        args: list[Value] = []

        def slot(argument: fx.Node) -> Any:
            given = (operand or self._operand)(argument)
            if isinstance(given, tuple):  # results of a call some of which are not canonical
                args.extend(each for each in given if isinstance(each, Value))
                return str(argument)
            if not isinstance(given, Value):
                return str(given) if isinstance(given, fx.Node) else given
            args.append(given)
            return f"%{len(args)}"

        spec = map_arg((node.args, node.kwargs), slot)
        stateful = is_write(node) or is_random(node.target) or reserves(node.target)
        shape, dtype = (dims_of(val.shape), val.dtype) if isinstance(val, torch.Tensor) else ((), None)
        attrs = (repr(spec), node.name if stateful else "")
        return self.algebra.make(str(node.target), args, attrs, shape, dtype)


def _moves(node: fx.Node) -> bool:
    """Return True if the call `node` copies a tensor with dims from another device."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    sources = (each.meta.get("val") for each in node.all_input_nodes)
    return any(isinstance(each, torch.Tensor) and each.dim() and each.device != val.device for each in sources)
