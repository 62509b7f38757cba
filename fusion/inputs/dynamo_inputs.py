"""What is known of a captured graph: what Dynamo's graph, its inputs and the user tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from typing import Any

import torch
import torch.fx as fx
from torch.fx.immutable_collections import immutable_dict

from fusion._torch.naming import captured_names, input_name, is_buffer, result_names
from fusion._torch.tracing import argument_path, dynamo_position, results_before
from fusion.facts import Band, Facts
from fusion.graph import dims_of
from fusion.graph.aliasing import is_written, outputs
from fusion.graph.parameter_only import Mark, is_wrapper, marks, parameter_inputs
from fusion.inputs.assumptions import ArgumentPath, facts_of
from fusion.inputs.mask_buffers import band_of
from fusion.inputs.nz_format import may_be_fractal, supposed_fractal


@dataclass(frozen=True)
class Known:
    """What a graph of Dynamo tells of the functional graph that is captured from it.

    Attributes:
        paths: for each input, where it is found in the arguments of the compiled function; empty if not there.
        names: what the model calls each input, as "layers.1.attn.bias" or "past_key_values.layers[0].keys".
        fractal: whether each input, where it may, lies in FRACTAL_NZ as far as can be told.
        bands: which band each input holds that is a buffer, None for the others.
        marked: which inputs are Parameters.
        wrapped: where in the model the Parameters are that wrap other tensors.
        results: what the graph returns: fake tensors as the model gives them when it runs without a compiler.
        result_names: where each of them is in the value that the function returns, as "output.logits".
    """

    paths: Sequence[ArgumentPath]
    names: Sequence[str]
    fractal: Sequence[bool]
    bands: Sequence[Band | None]
    marked: Sequence[Mark | None]
    wrapped: tuple[str, ...]
    results: Sequence[Any]
    result_names: Sequence[str]

    @staticmethod
    def of(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        positional: Sequence[str] = (),
        originals: Mapping[int, torch.Tensor] = immutable_dict(),
    ) -> Known:
        """What this graph tells; items of the argument `args` go by their names in `positional`.

        `originals`: by the id of an input that is a fake copy, what it is a copy of.
        """
        inputs = gm.graph.find_nodes(op="placeholder")
        paths = [_named(argument_path(node), positional) for node in inputs]
        fractal = [supposed_fractal(each) for each in example_inputs]
        real = [originals.get(id(each), each) for each in example_inputs]
        bands = [band_of(each) if is_buffer(node) else None for node, each in zip(inputs, real, strict=True)]
        names = list(map(input_name, inputs))
        wrapped = tuple(name for name, each in zip(names, example_inputs, strict=True) if is_wrapper(each))
        return Known(paths, names, fractal, bands, marks(example_inputs), wrapped, returned(gm), result_names(gm))

    def named(self, source: fx.Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name the inputs and the results of the captured graph as the model does."""
        return captured_names(source, self.names, self.result_names)

    def facts(self, source: fx.Graph, assume: Mapping[str, str]) -> Facts:
        """What is known of the captured graph, with what the user says of its inputs."""
        return self.completed(facts_of(source, self.paths, assume), source)

    def completed(self, told: Facts, source: fx.Graph) -> Facts:
        """What the user says of a graph, which inputs hold Parameters, how they and the results lie."""
        lie = strides_of(self.results, source)
        parameters = parameter_inputs(source, self.marked)
        known = self._held(told, source)
        return replace(known, parameters=parameters, wrapped=self.wrapped, strides=lie, extensible=True)

    def names_in(self, source: fx.Graph) -> dict[str, str]:
        """Name the inputs of the captured graph as the model does."""
        positions = {node.name: dynamo_position(node) for node in source.find_nodes(op="placeholder")}
        return {name: self.names[at] for name, at in positions.items() if at is not None}

    def _held(self, told: Facts, source: fx.Graph) -> Facts:
        """What is known, which inputs lie in FRACTAL_NZ, and which hold a band; of an assumed mask nobody asks."""
        positions = {node: dynamo_position(node) for node in source.find_nodes(op="placeholder")}
        asked = {node: at for node, at in positions.items() if at is not None and node.name not in told.assumed}
        fractal = {node.name: self.fractal[at] for node, at in asked.items() if may_be_fractal(node.meta["val"])}
        found = {node: self.bands[at] for node, at in asked.items()}
        bands = {node.name: band for node, band in found.items() if band is not None and not is_written(node)}
        names = {node.name: self.names[at] for node, at in asked.items() if node.name in fractal or node.name in bands}
        return replace(told, fractal=fractal, bands=bands, arguments=names | dict(told.arguments))


def _named(path: ArgumentPath, positional: Sequence[str]) -> ArgumentPath:
    if path[:1] != ("args",) or int(path[1]) >= len(positional):
        return path
    return positional[int(path[1])], *path[2:]


def returned(gm: fx.GraphModule) -> list[Any]:
    """What a graph of Dynamo returns: fake tensors as the model gives them when it runs without a compiler."""
    return [node.meta.get("example_value") for node in outputs(gm.graph)]


def strides_of(results: Sequence[Any], source: fx.Graph) -> tuple[tuple[Any, ...] | None, ...]:
    """For each result of the captured graph, the strides that it has in `results`; it may return more around them."""
    told = [*[None] * results_before(), *results]
    return tuple(starmap(_strides, zip_longest(outputs(source), told[: len(outputs(source))])))


def _strides(node: fx.Node, eager: Any) -> tuple[Any, ...] | None:
    captured = node.meta.get("val")
    if not isinstance(captured, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return None
    same = dims_of(captured.shape) == dims_of(eager.shape) and captured.dtype == eager.dtype
    return dims_of(eager.stride()) if same else None
