"""Rewrite of the outputs of all experts, one value each, to one value for the chosen experts of every token.

The computations of the experts must have one structure: linear layers in floats or int8, each with a matrix of its own,
elementwise functions between them, and quantisation of rows. In the result [T, K, ..] every layer is one product with
the matrices [E, M, N] of all experts.
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
from fusion.graph.proof_steps import must, proven
from patterns.kit.linear_layers import linear
from patterns.moe.experts.expert_lists import Active
from patterns.quant.product_scales import Product
from patterns.quant.read_matmul import Layers

_ELEMENTWISE = ("gelu", "sigmoid", "tanh", "exp", "log", "abs", "relu", "clip", "clamp")
"""Elementwise ops, other than those that `_rebuilt` builds by the algebra."""


class ChosenRows:
    """Rewriter from the outputs of all experts to those of the chosen ones, with the readings of what it builds.

    Attributes:
        experts: the chosen experts [T, K].
        active: the experts with matrices here, as in expert_product.
        readings: the reading of each value that was built: rows of tokens, products, quantised rows.
    """

    def __init__(self, graph: Graph, places: Value, active: Active) -> None:
        self.graph, self.a, self.active = graph, graph.algebra, tuple(active)
        self.experts = self.a.reshape(places, (prod(places.shape[:-1]), places.shape[-1]))
        self.readings: dict[Value, Reading] = {}
        self._int8 = Layers(self.a)
        self._rewritten: dict[tuple[Value, ...], Value] = {}

    def rewrite(self, values: Sequence[Value]) -> Value:
        """Build [T, K, ..] whose row (t, k) is row t of `values`[e], where e is the k-th expert of token t.

        `values` are one value of each of the active experts. The result is memoised; unproven if `values` differ in
        structure.
        """
        key = tuple(values)
        if key not in self._rewritten:
            self._rewritten[key] = self._rewrite(values)
        return self._rewritten[key]

    def _rewrite(self, values: Sequence[Value]) -> Value:
        """Build the rows of `values` by their common form: one and the same value, linear layers, quantised rows, or
        one elementwise op, whose arguments are rewritten in turn.
        """
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
        return self._rebuilt(first, [self.rewrite(args) for args in zip(*(each.args for each in values), strict=True)])

    def _layer(self, x: Value) -> tuple[Value, Value, Value | None] | None:
        """Read `x` as a linear layer of which some output lanes may be sliced.

        Returns its input, the rows [N, M] of its weight and the entries [N] of its bias for these lanes, or None for no
        bias. None if `x` is no linear layer.
        """
        if x.op != "slice" or x.attrs[0] != x.rank - 1:
            return linear(self.a, self.graph.places, x)
        layer = self._layer(x.arg)
        if layer is None:
            return None
        inputs, weight, bias = layer
        lanes = x.attrs[1:]
        return inputs, self.a.cut(weight, 0, *lanes), bias and self.a.cut(bias, 0, *lanes)

    def _int8_layer(self, x: Value) -> Product | None:
        """Read `x` as an int8 layer with scales of tokens and channels, of which some output lanes may be sliced; else
        None.
        """
        if x.op != "slice" or x.attrs[0] != x.rank - 1:
            product = self._int8.of(x)
            return product if isinstance(product, Product) and product.complete and not product.reason else None
        layer = self._int8_layer(x.arg)
        if layer is None or layer.channels is None:
            return None
        lanes = x.attrs[1:]
        weight, channels = (self.a.cut(each, 0, *lanes) for each in (layer.weight, layer.channels))
        return replace(layer, weight=weight, channels=channels, bias=layer.bias and self.a.cut(layer.bias, 0, *lanes))

    def _tokens(self, x: Value) -> Value:
        """Expand tokens `x` [.., H] to rows [T, K, H], one for each expert of a token, with a routed_rows reading."""
        count, width = self.experts.shape[0], x.shape[-1]
        must((is_float(x) or x.dtype == torch.int8) and prod(x.shape[:-1]) == count)
        tokens = self.a.reshape(x, (count, width))
        rows = self.a.expand(self.a.reshape(x, (count, 1, width)), (*self.experts.shape, width))
        self.readings[rows] = Reading("routed_rows", {"tokens": tokens, "experts": self.experts})
        return rows

    def _product(self, layers: Sequence[tuple[Value, Value, Value | None]]) -> Value:
        """Build the product of the chosen rows with the matrices of `layers`, one float layer of every expert."""
        inputs, weights, biases = zip(*layers, strict=True)
        must(len({(weight.shape, bias is None) for _, weight, bias in layers}) == 1)
        must(self.graph.is_fixed(*weights, *biases))
        rows = self.rewrite(inputs)
        width = weights[0].shape[0]
        matrices = [self.a.reshape(swapped(self.a, each), (1, *each.shape[::-1])) for each in weights]
        joined = proven(self.a.cat(matrices, 0))
        product = self.a.make("row_product", (rows, joined), (), (*self.experts.shape, width), rows.dtype)
        captures: dict[str, Any] = {"x": rows, "weight": joined, "experts": self.experts, "active": self.active}
        if all(biases):
            captures["bias"] = proven(self.a.cat([self.a.reshape(each, (1, width)) for each in biases], 0))
        self.readings[product] = Reading("expert_product", {**captures, "is_sorted": False, "is_parameter_only": True})
        return product

    def _int8_product(self, layers: Sequence[Product], dtype: torch.dtype | None) -> Value:
        """Build the product of the chosen rows with the matrices of `layers`, an int8 layer of each expert, in `dtype`.

        Its int8_expert_product reading is added to `readings`. Unproven if layers differ in shapes, if only some have a
        bias, or if a matrix does not come from Parameters.
        """
        first, a = layers[0], self.a
        must(len({(each.weight.shape, proven(each.channels).dtype) for each in layers}) == 1)
        biases = [each.bias for each in layers if each.bias is not None]
        must(len(biases) in (0, len(layers)) and all(map(is_float, biases)))
        must(all(each.one is None for each in layers))
        rows = self.rewrite([each.x for each in layers])
        tokens = self.rewrite([a.scale(proven(each.tokens), each.factor) for each in layers])
        width, inputs = first.weight.shape
        matrices = [a.reshape(swapped(a, each.weight), (1, inputs, width)) for each in layers]
        weight = a.cat(matrices, 0)
        scale = a.cat([a.reshape(proven(each.channels), (1, width)) for each in layers], 0)
        must(self.graph.is_fixed(weight, scale, *biases))
        operands = {"x": rows, "tokens": tokens, "weight": weight, "scale": scale}
        product = a.make("row_product", tuple(operands.values()), (), (*self.experts.shape, width), dtype)
        how: dict[str, Any] = {"experts": self.experts, "active": self.active, "is_sorted": False, "dtype": dtype}
        how["is_parameter_only"] = True
        if biases:
            how["bias"] = proven(a.cat([a.reshape(each, (1, width)) for each in biases], 0))
        self.readings[product] = Reading("int8_expert_product", {**operands, **how})
        return product

    def _quantised(self, several: Sequence[Reading]) -> Value:
        """Build rows that are quantised, or their scales, for the chosen experts.

        `several` are the readings `quantise`, or `token_scale`, of one value of each expert. Unproven if these differ
        in anything but the rows, or if a scale is not dynamic.
        """
        first = several[0]
        how = {name: each for name, each in first.captures.items() if not isinstance(each, Value)}
        must(len({each.op for each in several}) == 1 and "times" not in how)
        must(all(how.items() <= each.captures.items() for each in several))
        must(first.op == "token_scale" or how["scheme"] == "dynamic")
        x, a = self.rewrite([each.captures["x"] for each in several]), self.a
        scale = a.make("token_scale", (x,), (), (*x.shape[:-1], 1), how["dtype"])
        self.readings[scale] = Reading("token_scale", {"x": x, "encoding": how["encoding"], "dtype": how["dtype"]})
        if first.op == "token_scale":
            return scale
        stored = a.make("quantise", (x, scale), (), x.shape, how["encoding"].torch_dtype)
        self.readings[stored] = Reading("quantise", {**how, "x": x, "scale": scale})
        return stored

    def _rebuilt(self, like: Value, args: Sequence[Value]) -> Value:
        """Build the op of `like` on `args`, in the shape of these; unproven unless it is elementwise."""
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
                must(like.op in _ELEMENTWISE)  # any other op may mix the rows of tokens
                return a.make(like.op, tuple(args), like.attrs, x.shape, like.dtype)
