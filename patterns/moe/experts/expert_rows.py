"""What one of all experts gives, written for the rows of the experts that are chosen, with the matrices of all.

The experts compute alike, each with a matrix of its own: layers of floats or of int8, between them functions of single
numbers, and quantisation of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from fusion.analysis.rounding import is_float
from fusion.graph import Graph, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof import must, proven
from patterns.linear.read import linear
from patterns.quant.read_matmul import Layers
from patterns.quant.scaled_products import Product

_OF_NUMBERS = ("gelu", "sigmoid", "tanh", "exp", "log", "abs", "relu", "clip", "clamp")
"""Further ops of which each number depends on those at the same place alone."""


class Rows:
    """The same computation with the matrices of all experts, written for the rows of the experts that are chosen."""

    def __init__(self, graph: Graph, places: Value) -> None:
        self.graph, self.a = graph, graph.algebra
        self.experts = self.a.reshape(places, (prod(places.shape[:-1]), places.shape[-1]))
        self.found: dict[Value, Reading] = {}
        self._int8 = Layers(self.a)
        self._known: dict[tuple[Value, ...], Value] = {}

    def of(self, values: Sequence[Value]) -> Value:
        """What one of `values`, that of its own expert, is for each row."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._of(values)
        return self._known[key]

    def _of(self, values: Sequence[Value]) -> Value:
        first = values[0]
        if all(each is first for each in values):
            return self._tokens(first)
        layers = [self._layer(each) for each in values]
        if all(layer is not None for layer in layers):
            return self._product([proven(layer) for layer in layers])
        in_int8 = [self._int8_layer(each) for each in values]
        if all(layer is not None for layer in in_int8):
            return self._int8_product([proven(layer) for layer in in_int8], first.dtype)
        quantised = [self.graph.readings.one(each, "quantise", "token_scale") for each in values]
        if all(reading is not None for reading in quantised):
            return self._quantised([proven(reading) for reading in quantised])
        must(len({(each.op, each.attrs, each.dtype, len(each.args)) for each in values}) == 1)
        must(first.args and all(arg.shape == each.shape for each in values for arg in each.args))
        return self._rebuilt(first, [self.of(args) for args in zip(*(each.args for each in values), strict=True)])

    def _layer(self, x: Value) -> tuple[Value, Value, Value | None] | None:
        """Input, weight and bias of a linear layer, or of some of its lanes."""
        if x.op != "slice" or x.attrs[0] != x.rank - 1:
            return linear(self.a, self.graph.places, x)
        layer = self._layer(x.arg)
        if layer is None:
            return None
        inputs, weight, bias = layer
        lanes = x.attrs[1:]
        return inputs, self.a.cut(weight, 0, *lanes), bias and self.a.cut(bias, 0, *lanes)

    def _int8_layer(self, x: Value) -> Product | None:
        """A layer of int8 with both scales, or some of its lanes."""
        if x.op != "slice" or x.attrs[0] != x.rank - 1:
            found = self._int8.of(x)
            return found if isinstance(found, Product) and found.complete and not found.odd else None
        layer = self._int8_layer(x.arg)
        if layer is None or layer.channels is None:
            return None
        lanes = x.attrs[1:]
        weight, channels = (self.a.cut(each, 0, *lanes) for each in (layer.weight, layer.channels))
        return replace(layer, weight=weight, channels=channels, bias=layer.bias and self.a.cut(layer.bias, 0, *lanes))

    def _tokens(self, x: Value) -> Value:
        count, width = self.experts.shape[0], x.shape[-1]
        must((is_float(x) or x.dtype == torch.int8) and prod(x.shape[:-1]) == count)
        tokens = self.a.reshape(x, (count, width))
        rows = self.a.expand(self.a.reshape(x, (count, 1, width)), (*self.experts.shape, width))
        self.found[rows] = Reading("routed_rows", {"tokens": tokens, "experts": self.experts})
        return rows

    def _product(self, layers: Sequence[tuple[Value, Value, Value | None]]) -> Value:
        inputs, weights, biases = zip(*layers, strict=True)
        must(len({(weight.shape, bias is None) for _, weight, bias in layers}) == 1)
        must(self.graph.is_fixed(*weights, *biases))
        rows = self.of(inputs)
        width = weights[0].shape[0]
        matrices = [self.a.reshape(swapped(self.a, each), (1, *each.shape[::-1])) for each in weights]
        joined = proven(self.a.cat(matrices, 0))
        product = self.a.make("row_product", (rows, joined), (), (*self.experts.shape, width), rows.dtype)
        said: dict[str, Any] = {"x": rows, "weight": joined, "experts": self.experts}
        if all(biases):
            said["bias"] = proven(self.a.cat([self.a.reshape(each, (1, width)) for each in biases], 0))
        self.found[product] = Reading("expert_product", {**said, "is_sorted": False, "is_parameter_only": True})
        return product

    def _int8_product(self, layers: Sequence[Product], dtype: torch.dtype | None) -> Value:
        first, a = layers[0], self.a
        must(len({(each.weight.shape, proven(each.channels).dtype) for each in layers}) == 1)
        biases = [each.bias for each in layers if each.bias is not None]
        must(len(biases) in (0, len(layers)) and all(map(is_float, biases)))
        must(all(each.one is None for each in layers))
        rows = self.of([each.x for each in layers])
        tokens = self.of([a.scale(proven(each.tokens), each.factor) for each in layers])
        width, inputs = first.weight.shape
        matrices = [a.reshape(swapped(a, each.weight), (1, inputs, width)) for each in layers]
        weight = a.cat(matrices, 0)
        scale = a.cat([a.reshape(proven(each.channels), (1, width)) for each in layers], 0)
        must(self.graph.is_fixed(weight, scale, *biases))
        operands = {"x": rows, "tokens": tokens, "weight": weight, "scale": scale}
        product = a.make("row_product", tuple(operands.values()), (), (*self.experts.shape, width), dtype)
        how = {"experts": self.experts, "is_sorted": False, "is_parameter_only": True, "dtype": dtype}
        if biases:
            how["bias"] = proven(a.cat([a.reshape(each, (1, width)) for each in biases], 0))
        self.found[product] = Reading("int8_expert_product", {**operands, **how})
        return product

    def _quantised(self, several: Sequence[Reading]) -> Value:
        """Rows in int8, each with a scale of its own, or these scales."""
        first = several[0]
        how = {name: each for name, each in first.captures.items() if not isinstance(each, Value)}
        must(len({each.op for each in several}) == 1 and "times" not in how)
        must(all(how.items() <= each.captures.items() for each in several))
        must(first.op == "token_scale" or how["scheme"] == "dynamic")
        x, a = self.of([each.captures["x"] for each in several]), self.a
        scale = a.make("token_scale", (x,), (), (*x.shape[:-1], 1), how["dtype"])
        self.found[scale] = Reading("token_scale", {"x": x, "dtype": how["dtype"]})
        if first.op == "token_scale":
            return scale
        int8 = a.make("quantise", (x, scale), (), x.shape, torch.int8)
        self.found[int8] = Reading("quantise", {**how, "x": x, "scale": scale})
        return int8

    def _rebuilt(self, like: Value, args: Sequence[Value]) -> Value:
        a, (x, *rest) = self.a, args
        match like.op:
            case "mul":
                return proven(a.mul(x, *rest))
            case "add":
                return proven(a.add(x, *rest))
            case "cast":
                return a.cast(x, like.dtype)
            case "scale":
                return a.scale(x, like.attrs[0])
            case "shift":
                return a.shift(x, like.attrs[0])
            case "power":
                return a.power(x, like.attrs[0])
            case _:
                must(like.op in _OF_NUMBERS)  # others may mix the rows of tokens
                return a.make(like.op, tuple(args), like.attrs, x.shape, like.dtype)
