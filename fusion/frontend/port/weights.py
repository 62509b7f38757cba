"""Tensors of a port: where each is declared, and the formula of each that is prepared from tensors of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.fx.node import map_arg

from fusion._torch.fakes import without_fakes
from fusion._torch.operators import short_name
from fusion.frontend.port.expressions import call_text, literal, writer
from fusion.frontend.port.frames import Frame, homes
from fusion.frontend.port.names import argument_name, cleaned, distinct
from fusion.frontend.port.traced import Argument, Constant, Traced, Weight, tensor_of
from fusion.graph.aliasing import is_written
from fusion.records import Prepared

aten = torch.ops.aten


@dataclass(frozen=True)
class Tensors:
    """Tensors that a port declares.

    Attributes:
        traced: the traced call.
        paths: dotted path of each placeholder that is no argument, by which the state dict of the port has it.
        homes: the frame that holds all readers of a prepared tensor.
    """

    traced: Traced
    paths: Mapping[fx.Node, str]
    homes: Mapping[fx.Node, Frame]

    def layer_of(self, node: fx.Node) -> str:
        """Return the path of the linear layer or embedding of the port that computes `node`; "" for none."""
        place = {aten.linear.default: 1, aten.embedding.default: 0}.get(node.target)  # pyright: ignore
        weight = node.args[place] if place is not None else None
        path = self.paths.get(weight, "") if isinstance(weight, fx.Node) else ""
        owner = path.removesuffix(".weight")
        bias = [self.paths.get(each) for each in node.args[2:] if isinstance(each, fx.Node)]
        has_bias = f"{owner}.bias" in self.paths.values()
        same = node.target is aten.embedding.default or bias == [f"{owner}.bias"] * has_bias
        data = [each for each in node.args if isinstance(each, fx.Node) and each not in self.paths]
        kind = "Embedding" if node.target is aten.embedding.default else "Linear"
        return owner if path and same and len(data) == 1 and self.layer_kind(path) == kind else ""

    def layer_kind(self, path: str) -> str:
        """Return "Linear" or "Embedding" where the tensor at `path` is the weight or bias of such a layer, else ""."""
        owner, _, name = path.rpartition(".")
        if not owner or name not in ("weight", "bias"):
            return ""
        readers = [user for node, each in self.paths.items() if each == f"{owner}.weight" for user in node.users]
        prepared = any(each == path for node, each in self.paths.items() if node in self.homes)
        if prepared:
            return "Linear" if all(each.target is aten.linear.default for each in readers) else ""
        kind = type(tensor_of(self.traced.model, owner))  # pyright: ignore[reportArgumentType]
        is_known = kind in (nn.Linear, nn.Embedding)
        siblings = {each for each in self.paths.values() if each.startswith(owner + ".")}
        return kind.__name__ if is_known and siblings <= {f"{owner}.weight", f"{owner}.bias"} else ""

    def written(self) -> list[str]:
        """List the paths of tensors of the model that the forward writes to."""
        return [path for node, path in self.paths.items() if is_written(node)]


def inline_prepared(traced: Traced) -> Traced:
    """Return `traced` where tensors prepared from arguments of the call are computed in its graph."""
    inputs = {node.name: node for node in traced.sources}
    sources = dict(traced.sources)
    for node, source in traced.sources.items():
        if not isinstance(source, Prepared) or not any(
            not isinstance(traced.sources[inputs[each]], Weight) for each in source.sources
        ):
            continue
        first = next(each for each in traced.graph.nodes if each in node.users)
        values = {each: inputs[each] for each in source.sources}
        with traced.graph.inserting_before(first):
            made = _copied(traced.graph, source, values, first.meta)
        node.replace_all_uses_with(made)
        sources.pop(node)
        traced.graph.erase_node(node)
    return replace(traced, sources=sources)


def _copied(graph: fx.Graph, prepared: Prepared, inputs: Mapping[str, fx.Node], meta: Mapping[str, Any]) -> fx.Node:
    """Copy the computation of `prepared` into `graph`, with the provenance in `meta`."""
    parameters = prepared.module.graph.find_nodes(op="placeholder")
    placed = dict(zip(parameters, (inputs[each] for each in prepared.sources), strict=True))
    result: Any = prepared.module.graph.output_node().args[0]
    for node in prepared.module.graph.nodes:
        if node.op == "call_function":
            made = placed[node] = graph.node_copy(node, placed.__getitem__)
            made.meta = {**meta, "val": _fake_result(made)}
    return placed[result]


def _fake_result(node: fx.Node) -> Any:
    """Run the call `node` on the fake results of its operands."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return target(*args, **kwargs)


def tensors_of(traced: Traced, root: Frame) -> Tensors:
    """Give each tensor of the port a path: that of the model, or a new one in the innermost frame of its readers."""
    paths = {node: source.path for node, source in traced.sources.items() if isinstance(source, Weight) and node.users}
    placed = homes(root, traced.sources)
    taken = set(paths.values())
    for node, frame in placed.items():
        source: Any = traced.sources[node]
        inputs = {each.name: each for each in traced.sources}
        read = [traced.sources[inputs[each]].path for each in source.sources]  # pyright: ignore
        owner, name = _prepared_name(node, source, read, frame.path)
        home = f"{frame.path}." if frame.path else ""
        there = {each[len(home) :].split(".")[0] for each in taken if each.startswith(home)}
        owner = distinct(owner, there - _twins(taken, home, owner, name))
        paths[node] = f"{home}{owner}.{name}" if name else f"{home}{owner}"
        taken.add(paths[node])
    return Tensors(traced, paths, placed)


def _twins(taken: set[str], home: str, owner: str, name: str) -> set[str]:
    """Return {owner} if `taken` has other tensors of the layer `owner`, but none called `name`, which joins them (as a
    bias the weight); else an empty set.
    """
    there = {each for each in taken if each.startswith(f"{home}{owner}.")}
    return {owner} if name and there and f"{home}{owner}.{name}" not in there else set()


def _prepared_name(node: fx.Node, prepared: Prepared | Constant, read: Sequence[str], home: str) -> tuple[str, str]:
    """Name the tensor that is prepared from the tensors at the paths `read`: layer and name, which is "" for a tensor
    without a layer.
    """
    nodes = prepared.module.graph.nodes if isinstance(prepared, Prepared) else ()
    used = [short_name(each.target) for each in nodes if each.op == "call_function"]
    if not read:
        return argument_name(node) or cleaned(used[-1] if used else "") or "table", ""
    split = [each.rpartition(".") for each in read]
    owners = [owner for owner, _, _ in split]
    if len(read) == 1 and argument_name(node):
        return argument_name(node), ""
    if len(read) == 1:
        hint = next((_HINTS[each] for each in used if each in _HINTS), "prepared")
        owner, _, name = split[0]
        if owner and owner != home:
            return cleaned(f"{owner.rpartition('.')[2]}_{hint}"), name
        return f"{name}_{hint}", ""
    leaves = [each.rpartition(".")[2] for each in owners]
    ends = {name for _, _, name in split}
    if len(set(owners)) == 1:
        return cleaned("_".join(name for _, _, name in split)), ""
    return joined_name(leaves), ends.pop() if len(ends) == 1 else "weight"


_HINTS = {"slice": "part", "_to_copy": "cast", "permute": "t", "transpose": "t", "t": "t", "mul": "scaled"}
"""Ends of the names of tensors that are prepared from one of the model, by an operator of the formula."""


def joined_name(leaves: Sequence[str]) -> str:
    """Join the names of layers: q_proj, k_proj, v_proj give qkv_proj."""
    parts = [each.split("_") for each in leaves]
    shared = [
        steps[0] for steps in takewhile(lambda steps: len(set(steps)) == 1, zip(*map(reversed, parts), strict=False))
    ]
    suffix = "".join(f"_{each}" for each in reversed(shared))
    heads = [each.removesuffix(suffix) for each in leaves]
    short = all(len(each) <= 1 for each in heads)
    return cleaned(("" if short else "_").join(heads) + suffix)


def constant_text(constant: Constant, like: torch.Tensor, device: str) -> str:
    """Return the expression that makes `constant`, with shape and dtype of `like`."""
    with without_fakes():
        numbers = torch.tensor(constant.numbers, dtype=like.dtype).reshape(like.shape).tolist()
    return f"torch.tensor({literal(numbers)}, dtype={like.dtype}, device={device})"


def fold_single_numbers(traced: Traced) -> None:
    """Write constants of one element as numbers in the graph of `traced`, in place: operands of `where`, and zeros
    that are added.
    """
    for node, source in traced.sources.items():
        if isinstance(source, Weight | Argument) or source.sources or node.meta["val"].numel() != 1:
            continue
        with without_fakes():
            number = source.numbers[0] if isinstance(source, Constant) else source.module().item()
        for user in list(node.users):
            if user.target is aten.where.self and user.meta["val"].dtype == node.meta["val"].dtype:
                user.args = tuple(number if each is node and place else each for place, each in enumerate(user.args))
            elif user.target is aten.add.Tensor and user.args[1] is node and number == 0 and not user.kwargs:
                _drop_zero(user)


def _drop_zero(node: fx.Node) -> None:
    """Replace x + 0, which `node` computes, by x where shape and dtype are those of x."""
    source: Any = node.args[0]
    before, after = source.meta["val"], node.meta["val"]
    if before.shape == after.shape and before.dtype == after.dtype and not before.dtype.is_floating_point:
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def made_text(
    source: Prepared | Constant, node: fx.Node, values: Sequence[torch.Tensor], texts: Sequence[str], device: str
) -> str:
    """Return the expression that makes the tensor `node`, with the expressions `texts` of its sources `values`."""
    if isinstance(source, Constant):
        return constant_text(source, node.meta["val"], device)
    return formula(source, values, texts, device)


def formula(prepared: Prepared, values: Sequence[torch.Tensor], texts: Sequence[str], device: str) -> str:
    """Return the expression that computes `prepared` from tensors like `values` with the expressions `texts`."""
    graph = fx.Graph()
    graph.graph_copy(prepared.module.graph, mapping := dict[fx.Node, fx.Node]())
    written: dict[fx.Node, str] = {}
    for node, val, text in zip(graph.find_nodes(op="placeholder"), values, texts, strict=True):
        node.meta["val"], written[node] = val, text
    result: Any = prepared.module.graph.output_node().args[0]
    write = writer(written.__getitem__)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = _fake_result(node)
            written[node] = call_text(node, write, lambda: device)
    return written[mapping[result]]


def subscripted(path: str) -> str:
    """Write the numbers in a dotted `path` as subscripts: "layers[0].attn"."""
    return re.sub(r"(?:^|\.)(\d+)(?=\.|$)", r"[\1]", path)
