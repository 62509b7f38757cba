"""Facts about a captured graph: from the graph of Dynamo, its inputs and the options of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from typing import Any

import torch
import torch.fx as fx
from torch.fx.immutable_collections import immutable_dict

from fusion._torch.graph_breaks import is_complete
from fusion._torch.naming import captured_names, counted_in_python, input_name, is_buffer, result_names
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
    """Facts about a graph of Dynamo that its functional graph, captured by AOT autograd, does not have.

    Attributes:
        paths: for each input the path in the arguments of the compiled function; empty if it is not reached from them.
        names: for each input its name in the model, as "layers.1.attn.bias" or "past_key_values.layers[0].keys".
        fractal: for each input True if it is taken to be in FRACTAL_NZ.
        bands: for each input the band that it has, if it is a buffer; None for the others.
        marked: for each input its shape and dtype if it is a Parameter; None for the others.
        wrapped: the names of the Parameters that wrap other tensors.
        results: the results as fake tensors, with the strides of an uncompiled model.
        result_names: for each result its path in the value that the function returns, as "output.logits".
        is_complete: True if the graph is all of the call, not a part of it between graph breaks.
        counted: the attributes that the code sets to Python numbers, as "past_key_values.layers[0].length".
    """

    paths: Sequence[ArgumentPath]
    names: Sequence[str]
    fractal: Sequence[bool]
    bands: Sequence[Band | None]
    marked: Sequence[Mark | None]
    wrapped: tuple[str, ...]
    results: Sequence[Any]
    result_names: Sequence[str]
    is_complete: bool
    counted: tuple[str, ...] = ()

    @staticmethod
    def from_dynamo(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        positional: Sequence[str] = (),
        originals: Mapping[int, torch.Tensor] = immutable_dict(),
    ) -> Known:
        """Collect the facts about `gm`.

        Args:
            gm: a graph of Dynamo.
            example_inputs: its inputs.
            positional: names for the items of the argument `args`.
            originals: by the id of an input that is a fake copy, the tensor that it is a copy of.
        """
        inputs = gm.graph.find_nodes(op="placeholder")
        paths = [_named(argument_path(node), positional) for node in inputs]
        fractal = [supposed_fractal(each) for each in example_inputs]
        real = [originals.get(id(each), each) for each in example_inputs]
        bands = [band_of(each) if is_buffer(node) else None for node, each in zip(inputs, real, strict=True)]
        names = list(map(input_name, inputs))
        wrapped = tuple(name for name, each in zip(names, example_inputs, strict=True) if is_wrapper(each))
        results = returned(gm), result_names(gm)
        state = is_complete(gm), counted_in_python()
        return Known(paths, names, fractal, bands, marks(example_inputs), wrapped, *results, *state)

    def named(self, source: fx.Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name the inputs and the results of the captured graph as the model does."""
        return captured_names(source, self.names, self.result_names)

    def facts(self, source: fx.Graph, assume: Mapping[str, str]) -> Facts:
        """Return the facts about the captured graph `source`, with the masks that the option `assume` declares."""
        return self.completed(facts_of(source, self.paths, assume), source)

    def completed(self, assumed: Facts, source: fx.Graph) -> Facts:
        """Add Parameters, storage formats, bands and result strides of `source` to `assumed`, the facts about masks."""
        strides = strides_of(self.results, source)
        parameters = parameter_inputs(source, self.marked)
        known = self._with_contents(assumed, source)
        return replace(known, parameters=parameters, wrapped=self.wrapped, strides=strides, extensible=True)

    def names_in(self, source: fx.Graph) -> dict[str, str]:
        """Map the names of the inputs of the captured graph to their names in the model."""
        positions = {node.name: dynamo_position(node) for node in source.find_nodes(op="placeholder")}
        return {name: self.names[at] for name, at in positions.items() if at is not None}

    def _with_contents(self, assumed: Facts, source: fx.Graph) -> Facts:
        """Add to `assumed` the inputs in FRACTAL_NZ and those that are bands, but for inputs with an assumed mask."""
        positions = {node: dynamo_position(node) for node in source.find_nodes(op="placeholder")}
        unassumed = {node: at for node, at in positions.items() if at is not None and node.name not in assumed.assumed}
        fractal = {node.name: self.fractal[at] for node, at in unassumed.items() if may_be_fractal(node.meta["val"])}
        candidates = {node: self.bands[at] for node, at in unassumed.items()}
        bands = {node.name: band for node, band in candidates.items() if band is not None and not is_written(node)}
        names = {
            node.name: self.names[at] for node, at in unassumed.items() if node.name in fractal or node.name in bands
        }
        return replace(assumed, fractal=fractal, bands=bands, arguments=names | dict(assumed.arguments))


def _named(path: ArgumentPath, positional: Sequence[str]) -> ArgumentPath:
    if path[:1] != ("args",) or int(path[1]) >= len(positional):
        return path
    return positional[int(path[1])], *path[2:]


def returned(gm: fx.GraphModule) -> list[Any]:
    """Return the results of a graph of Dynamo as fake tensors, with the strides of an uncompiled model."""
    return [node.meta.get("example_value") for node in outputs(gm.graph)]


def strides_of(results: Sequence[Any], source: fx.Graph) -> tuple[tuple[Any, ...] | None, ...]:
    """Return for each result of the captured graph its strides in `results`; None where none is known.

    The graph may return more: mutated inputs before the results, and intermediates after them.
    """
    expected = [*[None] * results_before(), *results]
    return tuple(starmap(_strides, zip_longest(outputs(source), expected[: len(outputs(source))])))


def _strides(node: fx.Node, eager: Any) -> tuple[Any, ...] | None:
    captured = node.meta.get("val")
    if not isinstance(captured, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return None
    same = dims_of(captured.shape) == dims_of(eager.shape) and captured.dtype == eager.dtype
    return dims_of(eager.stride()) if same else None
