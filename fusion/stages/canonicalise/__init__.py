"""Stage 2, canonicalise: read an FX graph as canonical values, without touching it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch import OpOverload, constant_numbers
from fusion.errors import FusionError
from fusion.facts import Facts
from fusion.graph import Algebra, Graph, Reading, Value, dims_of
from fusion.graph.dims import dim_of
from fusion.graph.overlay import Held
from fusion.mutation import closing_writes, is_write, reserves
from fusion.stages.canonicalise import (
    arithmetic,
    byte_lines,
    choices,
    complex_numbers,
    contractions,
    fixed_scales,
    head_products,
    head_scales,
    logarithms,
    logic,
    page_rows,
    projections,
    quantisation,
    ranges,
    reductions,
    sdpa,
    shapes,
    whole_attention,
    whole_heads,
    whole_products,
    write_readings,
    writes,
    zero_points,
)
from fusion.stages.canonicalise.assumed import Assumed
from fusion.stages.canonicalise.attention import Outcome, attention, stripped
from fusion.stages.canonicalise.folding import Folder
from fusion.stages.canonicalise.head_rows import told_apart
from fusion.stages.canonicalise.indexer import index_selection
from fusion.stages.canonicalise.latents import latents
from fusion.stages.canonicalise.log_sums import log_sums
from fusion.stages.canonicalise.merges import merges
from fusion.stages.canonicalise.pages import paged
from fusion.stages.canonicalise.rotation import rotation
from fusion.stages.canonicalise.rounded_attention import NAME as ROUNDED
from fusion.stages.canonicalise.rounded_attention import rounded_attention
from fusion.stages.canonicalise.translate import Out, Translated, translator_of
from fusion.weights import derived

__all__ = ["canonicalise"]

# Imported for their translators.
_FAMILIES = (
    arithmetic,
    byte_lines,
    choices,
    complex_numbers,
    contractions,
    logarithms,
    logic,
    quantisation,
    ranges,
    reductions,
    sdpa,
    shapes,
    whole_products,
    writes,
)

_ATTENDING = ("matmul", "cast", "reshape", "permute", "mul", "scale")
"""Ops of values that may be attention."""


_Readings = dict[Value, Reading]
_Misses = dict[Value, tuple[str, str]]


def canonicalise(source: fx.Graph, facts: Facts = Facts()) -> Graph:
    """Return the canonical view of `source`, whose nodes must carry fake tensors in `meta["val"]`."""
    walk = _Walk(source)
    for node in source.nodes:
        walk.visit(node)
    folder, fixed = Folder(), derived(source, facts.parameters)
    readings, misses = _rotations(walk)
    _attentions(walk, folder, facts, readings, misses)
    attended = {value: each for value, each in readings.items() if each.op == "softmax_attention"}
    readings |= log_sums(walk.algebra, walk.places, attended)
    merged, odd_merges = merges(walk.algebra, walk.places)
    readings, misses = merged | readings, odd_merges | misses
    found = write_readings.Writes(walk.algebra, folder, walk.written())
    for value in list(walk.places):
        found.visit(value)
    readings, misses = {**found.readings, **readings}, {**found.misses, **misses}
    whole, shifted, odd_whole = _whole_numbers(walk, fixed)
    readings = {**_linears(walk, readings, fixed), **readings, **whole}
    readings |= whole_heads.readings(walk.algebra, readings)
    heads, odd_heads = head_products.readings(walk.algebra, walk.places, fixed)
    pages, odd_pages = page_rows.readings(walk.algebra, folder, walk.places, fixed)
    also = (*heads.items(), *pages.items(), *found.also.items(), *shifted.items())
    misses = {**odd_heads, **odd_pages, **misses, **odd_whole}
    return Graph(
        source, walk.algebra, walk.held, {value: tuple(nodes) for value, nodes in walk.places.items()}, walk.regions,
        readings, misses, fixed, facts, also,
    )  # fmt: skip


def _whole_numbers(walk: _Walk, fixed: set[fx.Node]) -> tuple[_Readings, _Readings, _Misses]:
    """Readings of what is quantised, further readings of what may have one, and why others are none."""
    a, places = walk.algebra, walk.places
    rows, odd_rows = quantisation.readings(a, places)
    heads, odd_heads = head_scales.readings(a, places)
    scaled, odd_scaled = fixed_scales.readings(a, places, rows, odd_rows)
    lines, odd_lines = byte_lines.readings(a, places, rows, odd_rows)
    shifted, odd_shifted = zero_points.readings(a, places)
    products, odd_products = whole_products.readings(a, places, fixed)
    misses = {**odd_rows, **odd_scaled, **odd_lines, **odd_shifted, **odd_heads, **odd_products}
    return {**heads, **rows, **scaled, **lines, **products}, shifted, misses


def _rotations(walk: _Walk) -> tuple[dict[Value, Reading], dict[Value, tuple[str, str]]]:
    readings: dict[Value, Reading] = {}
    misses: dict[Value, tuple[str, str]] = {}
    for value in list(walk.places):
        if value.op not in ("add", "cat", "reshape", "slice_scatter", "cast"):
            continue
        if value.op == "cast" and value.arg in walk.places:
            continue
        outcome = rotation(walk.algebra, value)
        rebuilt = outcome is not None and _holds_one(walk, value, readings)
        if isinstance(outcome, str) and not rebuilt:
            misses[value] = ("rotation", outcome)
        elif isinstance(outcome, Reading) and not (rebuilt and outcome.op == "partial_rotation"):
            readings[value] = outcome
    return readings, misses


def _attentions(
    walk: _Walk, folder: Folder, facts: Facts, readings: dict[Value, Reading], misses: dict[Value, tuple[str, str]]
) -> None:
    assumed = Assumed(walk.algebra, facts.assumed)
    written = [value for value in walk.places if value.op in ("write", "write_rows")]
    for value in list(walk.places):
        if value.op == "aten.scaled_dot_product_attention.default":  # which is written out wherever it can be
            misses[value] = ("softmax_attention", sdpa.left_whole(walk.places[value][0]))
        if value.op not in _ATTENDING or _only_arranges(walk, value):
            continue
        read = partial(attention, walk.algebra, folder, assumed, written)
        outcome = read(value)
        rounded = rounded_attention(walk.algebra, value, read) if outcome is None else None
        outcome = rounded or outcome
        if isinstance(rounded, str):
            misses.update({value: (ROUNDED, rounded)} if _ends(walk, value) else {})
        elif isinstance(outcome, str):
            whole = outcome in whole_attention.REASONS
            misses[value] = ("whole_latent_attention" if whole else "softmax_attention", outcome)
        elif outcome is not None:
            found = _beside(walk, folder, assumed, written, readings, outcome)
            readings.update({each: what for each, what in found.items() if isinstance(what, Reading)})
            lists = any(isinstance(each, str) or each.op == "chosen_keys" for each in outcome.values())
            name = "sparse_attention" if lists else "latent_attention"
            misses.update({each: (name, why) for each, why in found.items() if isinstance(why, str)})


def _ends(walk: _Walk, value: Value) -> bool:
    """Whether what uses a value does more than to scale it, to cast it or to arrange it otherwise."""
    held = [walk.held.get(user) for node in walk.places[value] for user in node.users]
    return not any(isinstance(each, Value) and each.op in _ATTENDING for each in held)


def _beside(
    walk: _Walk,
    folder: Folder,
    assumed: Assumed,
    written: Sequence[Value],
    readings: Mapping[Value, Reading],
    outcome: Outcome,
) -> Outcome:
    """An attention with what its queries, keys and values are, and what lists the keys that its mask shows."""
    found = dict(outcome)
    for root, each in outcome.items():
        if isinstance(each, Reading) and each.op == "softmax_attention":
            found |= told_apart(walk.algebra, root, outcome)
    known = [each for each in found.values() if isinstance(each, Reading)]
    lists = [each for each in known if each.op == "chosen_keys"]
    for each in lists:
        places = each.captures["places"]
        found[places] = index_selection(walk.algebra, folder, assumed, written, places.below("reshape"))
    for each in known:
        parts = latents(walk.algebra, readings, each) if each.op == "softmax_attention" else None
        if isinstance(parts, str):
            found[each.captures["k"]] = parts
        found |= parts if isinstance(parts, dict) else {}
    readings_found = {each: what for each, what in found.items() if isinstance(what, Reading)}
    return {**paged(walk.algebra, folder, readings_found, walk.places), **found}


def _linears(walk: _Walk, readings: Mapping[Value, Reading], fixed: set[fx.Node]) -> dict[Value, Reading]:
    attended = [value for value, reading in readings.items() if reading.op == "softmax_attention"]
    return projections.readings(walk.algebra, walk.places, attended, fixed)


def _only_arranges(walk: _Walk, value: Value) -> bool:
    """Whether a node only passes on a contraction that the node before it holds, in another arrangement."""
    product, _ = stripped(value)
    held = (walk.held.get(source) for source in walk.places[value][0].all_input_nodes)
    return any(isinstance(each, Value) and each.dtype == value.dtype and stripped(each)[0] is product for each in held)


def _holds_one(walk: _Walk, value: Value, readings: Mapping[Value, Reading], depth: int = 3) -> bool:
    """Whether a rotation stands closely below the user's own node, so that this one only carries it along."""
    nodes = walk.places[value][:1]
    for _ in range(depth):
        nodes = [source for node in nodes for source in node.all_input_nodes]
        if any(isinstance(held := walk.held.get(node), Value) and held in readings for node in nodes):
            return True
    return False


class _Walk:
    """One pass over the nodes."""

    def __init__(self, source: fx.Graph) -> None:
        self.source = source
        self.algebra = Algebra()
        self.held: dict[fx.Node, Held] = {}
        self.places: dict[Value, list[fx.Node]] = {}
        self.regions: dict[fx.Node, int] = {}
        self._region = 0
        self._closing = closing_writes(source)

    def visit(self, node: fx.Node) -> None:
        """Give `node` its value and its region."""
        self.regions[node] = self._region
        if node.op in ("placeholder", "get_attr"):
            self._hold(node, self._leaf(node))
        elif node.op == "call_function":
            self._hold(node, self._call(node))
            if is_write(node) and node not in self._closing:
                self._region += 1

    def written(self) -> frozenset[Value]:
        """The inputs that the closing writes change."""
        places = [self.held.get(each) for node in self._closing for each in node.args[:1] if isinstance(each, fx.Node)]
        return frozenset(each for each in places if isinstance(each, Value) and each.op == "input")

    def _hold(self, node: fx.Node, held: Held | None) -> None:
        if held is None:
            return
        self.held[node] = held
        if isinstance(held, Value):
            self.places.setdefault(held, []).append(node)

    def _leaf(self, node: fx.Node) -> Value | None:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            known = self._constant(val, constant_numbers(node)) if node.op == "get_attr" else None
            place = (node.name, self._region)
            return known or self.algebra.make("input", (), place, dims_of(val.shape), val.dtype)
        if val is None and node.op == "placeholder" and node.users:
            raise FusionError(
                f"reading the graph: node {node.name} has no shape in meta['val']; "
                "trace the graph under fake tensors (or run torch.fx.passes.fake_tensor_prop) before the pass"
            )
        return None

    def _constant(self, val: torch.Tensor, numbers: tuple[float, ...] | None) -> Value | None:
        """A tensor that the graph holds, whose numbers are known."""
        if not numbers or math.isnan(numbers[0]):  # NaN is not equal to itself
            return None
        shape = dims_of(val.shape)
        if val.is_floating_point() or not shape:
            return logic.constant(self.algebra, numbers[0], shape, val.dtype)
        return self.algebra.make("constant", (), (numbers,), shape, val.dtype)

    def _operand(self, argument: Any) -> Any:
        """A value for a tensor, a dim for a symbolic number, anything else as it is."""
        if not isinstance(argument, fx.Node):
            return argument
        val = argument.meta.get("val")
        if isinstance(val, torch.SymInt):
            return dim_of(val)
        held = self.held.get(argument)
        stale = self.regions[argument] != self._region or (is_write(argument) and argument not in self._closing)
        if stale and isinstance(val, torch.Tensor):  # written to since, perhaps: an input of what follows
            leaf = self.algebra.make("input", (), (argument.name, self._region), dims_of(val.shape), val.dtype)
            self.places.setdefault(leaf, [argument])
            return leaf
        return held if held is not None else argument

    def _call(self, node: fx.Node) -> Held | None:
        val = node.meta.get("val")
        if getattr(node.target, "__name__", "") == "getitem":
            held = self.held.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
            known = held[node.args[1]] if isinstance(held, tuple) and isinstance(node.args[1], int) else None
            return known if known is not None else self._opaque(node, val)
        if not isinstance(node.target, OpOverload):
            return self._opaque(node, val) if isinstance(val, torch.Tensor) else None
        args, kwargs = map_arg((node.args, node.kwargs), self._operand)
        translator = translator_of(node.target, args)
        if translator is not None and not is_write(node) and not _moves(node):
            translated = self._translate(translator, val, args, kwargs)
            if translated is not None:
                return translated
        return self._opaque(node, val)

    def _translate(
        self, translator: Callable[..., Translated], val: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Held | None:
        if not isinstance(val, torch.Tensor):
            out = Out((), None)
            result = translator(self.algebra, out, *args, **kwargs)
            return result if isinstance(result, tuple) else None
        out = Out(dims_of(val.shape), val.dtype)
        complex_args = [each for each in args if complex_numbers.is_complex(each)]
        if translator is arithmetic.mul and complex_args:
            result = complex_numbers.product(self.algebra, out, *args)
        elif complex_args and complex_args[0].op == "complex" and translator.__module__ == shapes.__name__:
            result = self._both_parts(translator, out, args, kwargs)
        elif complex_args and translator.__module__ not in (complex_numbers.__name__, shapes.__name__):
            return None
        else:
            result = translator(self.algebra, out, *args, **kwargs)
        right = isinstance(result, Value) and (result.shape, result.dtype) == (out.shape, out.dtype)
        return result if right else None

    def _both_parts(
        self, translator: Callable[..., Translated], out: Out, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Value | None:
        assert out.dtype is not None
        real = Out(out.shape, out.dtype.to_real())
        both = [translator(self.algebra, real, part, *args[1:], **kwargs) for part in args[0].args]
        if not (isinstance(both[0], Value) and isinstance(both[1], Value)):
            return None
        return complex_numbers.pair(self.algebra, both[0], both[1], out)

    def _opaque(self, node: fx.Node, val: Any) -> Value:
        """A value known only by its operator and arguments; equal calls are equal unless they have a state."""
        args: list[Value] = []

        def slot(argument: fx.Node) -> Any:
            operand = self._operand(argument)
            if not isinstance(operand, Value):
                return str(operand) if isinstance(operand, fx.Node) else operand
            args.append(operand)
            return f"%{len(args)}"

        spec = map_arg((node.args, node.kwargs), slot)
        stateful = isinstance(node.target, OpOverload) and (
            is_write(node) or torch.Tag.nondeterministic_seeded in node.target.tags or reserves(node.target)
        )
        shape, dtype = (dims_of(val.shape), val.dtype) if isinstance(val, torch.Tensor) else ((), None)
        attrs = (repr(spec), node.name if stateful else "")
        return self.algebra.make(str(node.target), args, attrs, shape, dtype)


def _moves(node: fx.Node) -> bool:
    """Whether a call takes tensors from one device to another."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    sources = (each.meta.get("val") for each in node.all_input_nodes)
    return any(isinstance(each, torch.Tensor) and each.dim() and each.device != val.device for each in sources)
