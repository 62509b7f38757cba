"""Exported programs: conversion to graphs that write at the end, as graphs of AOT autograd do, and back."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from functools import reduce
from itertools import count
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, fx

from fusion._torch.operators import OpOverload, schema_of
from fusion._torch.tracing import casts_itself, copied

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import ExportGraphSignature, InputSpec

aten = torch.ops.aten


def is_exported(value: object) -> TypeGuard[ExportedProgram]:
    """Return True if `value` is an ExportedProgram; does not import torch.export."""
    module = sys.modules.get("torch.export")
    return module is not None and isinstance(value, module.ExportedProgram)


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes what `program` does, with a functional graph of its own.

    `run_decompositions({})` functionalises a program of `torch.export.export`, and keeps composite operators.
    Private: `ExportedProgram.dialect`.
    """
    targets = (node.target for node in program.graph.nodes if isinstance(node.target, OpOverload))
    if program.dialect == "TRAINING" or any(schema_of(each).is_mutable for each in targets):
        return program.run_decompositions({})
    gm = fx.GraphModule(program.graph_module, copied(program.graph))
    return _with_graph(program, gm, copy.deepcopy(program.graph_signature), program.state_dict)


def cast_inside(program: ExportedProgram) -> list[fx.Node]:
    """List the calls of composite operators whose operands autocast casts inside of the operator, such as aten.einsum.

    `run_decompositions` of torch traces a composite in one piece, and so computes these without the casts.
    """
    regions = program.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.wrap_with_autocast
    )
    calls: list[fx.Node] = []
    for region in regions:
        device, _, _, _, body, *_ = region.args
        code = getattr(program.graph_module, str(cast(fx.Node, body).target))
        calls += [node for node in code.graph.nodes if _is_cast_inside(node, str(device))]
    return calls


def _is_cast_inside(node: fx.Node, device: str) -> bool:
    if not isinstance(node.target, OpOverload) or casts_itself(node.target, device):
        return False
    vals = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    dtypes = [each.dtype for each in vals if isinstance(each, Tensor) and each.is_floating_point()]
    is_cast = len(dtypes) > 1 and dtypes[0] != reduce(torch.promote_types, dtypes[1:])
    return is_cast and node.target._can_decompose()


def parameters(signature: ExportGraphSignature) -> frozenset[str]:
    """Name the inputs that hold Parameters that the program does not write to."""
    written = set(signature.parameters_to_mutate.values())
    targets = signature.inputs_to_parameters.items()
    return frozenset(name for name, target in targets if target not in written)


def write_at_end(gm: fx.GraphModule, signature: ExportGraphSignature) -> None:
    """Replace each result that is the new content of an input by a `copy_` to that input, at the end of `gm`."""
    nodes = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    output = gm.graph.output_node()
    results: Any = output.args[0]
    pairs = list(zip(_written(signature), results, strict=True))
    with gm.graph.inserting_before(output):
        for place, result in pairs:
            if place:
                write = gm.graph.call_function(aten.copy_.default, (nodes[place], result))
                write.meta["val"] = nodes[place].meta["val"]
    output.args = (tuple(result for place, result in pairs if not place),)


def return_writes(gm: fx.GraphModule, signature: ExportGraphSignature) -> None:
    """Undo `write_at_end`, in place: return the sources of the copies to inputs, and erase the copies.

    A value that is written to two inputs is cloned, because a signature refers to results by their names.
    """
    writes: dict[Any, Any] = {node.args[0]: node for node in gm.graph.nodes if node.target is aten.copy_.default}
    contents = {place.name: write.args[1] for place, write in writes.items()}
    for write in writes.values():
        gm.graph.erase_node(write)
    output = gm.graph.output_node()
    others = iter(cast(tuple[Any, ...], output.args[0]))
    results: list[Any] = []
    for place in _written(signature):
        result = contents[place] if place else next(others)
        results.append(_clone(result) if place and result in results else result)
    output.args = (tuple(results),)


def with_buffers(program: ExportedProgram, gm: fx.GraphModule, buffers: Mapping[str, Tensor]) -> ExportedProgram:
    """Return `program` with the graph `gm`, whose further inputs become buffers; the verifier of torch checks it.

    Parameters that only `program` reads are removed from the state dict.

    Args:
        program: the original program, functional.
        gm: its new graph, which becomes part of the result.
        buffers: the tensor for each further input.
    """
    from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

    signature, tensors = copy.deepcopy(program.graph_signature), dict(program.state_dict)
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    for name in _dropped_parameters(program, gm):
        del tensors[str(specs.pop(name).target)]
    targets = (f"prepared_{number}" for number in count())
    for name, tensor in buffers.items():
        target = next(each for each in targets if each not in tensors)
        tensors[target] = tensor
        specs[name] = InputSpec(InputKind.BUFFER, TensorArgument(name), target, persistent=True)
    signature.input_specs = _in_order(gm.graph, specs, InputKind.USER_INPUT)
    return _with_graph(program, gm, signature, tensors)


def _dropped_parameters(program: ExportedProgram, gm: fx.GraphModule) -> list[str]:
    """Name the inputs for Parameters that a node of `program` reads and none of `gm`."""
    read = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
    now = {node.name for node in gm.graph.find_nodes(op="placeholder") if node.users}
    return [name for name in parameters(program.graph_signature) if name in read - now]


def _in_order(source: fx.Graph, specs: Mapping[str, InputSpec], last: Any) -> list[InputSpec]:
    """Erase the placeholders of `source` that `specs` does not name, and move those of the kind `last` behind the
    others.

    Returns the specs of the remaining ones, in order.
    """
    placeholders = source.find_nodes(op="placeholder")
    remaining = [node for node in placeholders if node.name in specs]
    ordered = sorted(remaining, key=lambda node: specs[node.name].kind == last)
    for node in reversed(ordered):
        next(iter(source.nodes)).prepend(node)
    for node in placeholders:
        if node.name not in specs:
            source.erase_node(node)
    return [specs[node.name] for node in ordered]


def _written(signature: ExportGraphSignature) -> list[str]:
    """Return for each result in `signature` the input whose new content it is; "" for a result of the model."""
    from torch.export.graph_signature import OutputKind

    writes = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    inputs = {spec.target or spec.arg.name: spec.arg.name for spec in signature.input_specs}
    return [inputs[str(spec.target)] if spec.kind in writes else "" for spec in signature.output_specs]


def _clone(node: fx.Node) -> fx.Node:
    with node.graph.inserting_before(node.graph.output_node()):
        clone = node.graph.call_function(aten.clone.default, (node,))
    clone.meta = dict(node.meta)
    return clone


def _with_graph(
    program: ExportedProgram, gm: fx.GraphModule, signature: ExportGraphSignature, tensors: Mapping[str, Any]
) -> ExportedProgram:
    """Update `program` to `gm`, `signature` and the state dict `tensors`. Private: `ExportedProgram._update`."""
    return program._update(gm, signature, state_dict=dict(tensors), constants=dict(program.constants))
