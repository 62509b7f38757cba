"""The traced call of a model: its fused graph, and where each input of the graph comes from."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from fusion._torch.operators import higher_order
from fusion._torch.tensors import constant_numbers
from fusion._torch.tracing import copied, dynamo_position
from fusion.errors import FusionError
from fusion.frontend.explain import name_of, positional_arguments, variadic_argument
from fusion.graph.origin import frames, module_path
from fusion.records import Candidate, Prepared
from fusion.report.outcome import GraphReport
from fusion.report.report import Report


@dataclass(frozen=True)
class Weight:
    """Tensor of the model: a Parameter, a buffer or an attribute, by its dotted `path`."""

    path: str


@dataclass(frozen=True)
class Argument:
    """Tensor that the caller passes, by the `expression` that reads it from the arguments."""

    expression: str

    @property
    def root(self) -> str:
        """Name of the argument."""
        return re.split(r"[.\[]", self.expression, maxsplit=1)[0]


@dataclass(frozen=True)
class Constant:
    """Tensor whose `numbers`, in the order of its elements, stand in the code of the model."""

    numbers: tuple[float, ...]
    sources: tuple[str, ...] = ()


Source = Weight | Argument | Constant | Prepared


@dataclass(frozen=True)
class Signature:
    """Names of the arguments of a model.

    Attributes:
        positional: those that may be passed by position, in order.
        variadic: the one that takes all further ones by position (`*args`), or "".
        named: those that the call passes by name.
    """

    positional: tuple[str, ...]
    variadic: str = ""
    named: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of a signature."""
        return *self.positional, *filter(None, [self.variadic]), *sorted(self.named.difference(self.positional))

    def readable(self, name: str) -> str:
        """Replace `args[n]` at the start of the expression `name` by the name of the argument."""
        match = re.match(r"args\[(\d+)\]", name)
        if match is None:
            return name
        number, rest = int(match[1]), name[match.end() :]
        if number < len(self.positional):
            return self.positional[number] + rest
        return f"{self.variadic}[{number - len(self.positional)}]{rest}" if self.variadic else name


def signature_of(model: Callable[..., Any], named: Iterable[str]) -> Signature:
    """Return the names of the arguments of `model`, in a call that passes `named` by name."""
    return Signature(positional_arguments(model), variadic_argument(model), frozenset(named))


@dataclass(frozen=True)
class Traced:
    """Fused graph of one call of a model.

    Attributes:
        model: the module or function.
        graph: a copy of the fused graph, which may be changed.
        sources: where each placeholder comes from.
        arguments: names of the arguments that the graph reads, in the order of the signature.
        variadic: the one of `arguments` that takes all further ones by position, or "".
        results: for each result its expression in what the model returns, or in an argument that it writes to.
        chosen: the rewrites of the graph.
        target: name of the chip.
        counted: the attributes that the call sets to Python numbers: the graph is of the numbers that they had.
        assumptions: the masks, contents and storage formats of inputs that rewrites rely on.
    """

    model: Callable[..., Any]
    graph: fx.Graph
    sources: Mapping[fx.Node, Source]
    arguments: tuple[str, ...]
    variadic: str
    results: tuple[str, ...]
    chosen: tuple[Candidate, ...] = field(repr=False)
    target: str
    counted: tuple[str, ...]
    assumptions: Mapping[str, str]

    @property
    def name(self) -> str:
        """Class name of the model; of a function its name."""
        return name_of(self.model)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The `arguments` as a signature or a call of the port writes them."""
        return tuple(f"*{each}" if each == self.variadic else each for each in self.arguments)


def traced(model: Callable[..., Any], report: Report, signature: Signature) -> Traced:
    """Return the only graph of `report`, the report of a call of `model`, with its inputs named by `signature`.

    Raises:
        FusionError: the call has no graph, several of them, or one that cannot be written as straight code.
    """
    part = _only_graph(report)
    _check(part.graph.graph)
    graph = copied(part.graph.graph)
    placeholders = graph.find_nodes(op="placeholder")
    sources: dict[fx.Node, Source] = {}
    for node, name in zip(placeholders, part.inputs, strict=False):
        if dynamo_position(node) is None:
            raise FusionError(
                f"porting a model: the call writes to {signature.readable(name)}, which shares its memory with "
                "another input, so that the graph reads their common base; pass copies"
            )
        sources[node] = _source(model, name, signature)
    prepared = {each.name: each for each in part.prepared}
    sources |= {node: prepared[node.name] for node in placeholders[len(sources) :]}
    read = dict.fromkeys(each.root for each in sources.values() if isinstance(each, Argument))
    arguments = sorted(read, key=signature.names.index)
    counted = tuple(map(signature.readable, part.counted))
    constants = zip(graph.find_nodes(op="get_attr"), part.graph.graph.find_nodes(op="get_attr"), strict=True)
    sources |= {node: _constant(original) for node, original in constants}
    results = tuple(map(signature.readable, part.results[-_count(graph) :]))
    return Traced(
        model,
        graph,
        sources,
        tuple(arguments),
        signature.variadic,
        results,
        part.chosen,
        report.target,
        counted,
        report.assumptions,
    )


def _only_graph(report: Report) -> GraphReport:
    """Return the part of `report` that has a graph, of a call that has exactly one and depends on no data."""
    if report.interruption is not None:
        raise FusionError(f"porting a model: the model cannot be traced to the end: {report.interruption}")
    if report.breaks:
        first, more = report.breaks[0], len(report.breaks) - 1
        where = f"{first.where} ({first.reason.rstrip('.')})" + (f" and {more} more places" if more else "")
        raise FusionError(
            f"porting a model: Python leaves the graph at {where}; port the part in front of it and the part behind it "
            "on their own, as package.module:factory"
        )
    if report.guesses:
        where = ", ".join(report.guesses)
        raise FusionError(
            f"porting a model: Python reads numbers from data at {where}, so that the graph is that of a sample; write "
            "this part with tensors, or port the model around it"
        )
    if len(report.parts) != 1:
        raise FusionError(f"porting a model: the call has {len(report.parts)} graphs; a port is written of exactly one")
    if report.parts[0].failures:
        raise FusionError(f"porting a model: the pass failed on its graph: {report.parts[0].failures[0].error}")
    return report.parts[0]


def _check(graph: fx.Graph) -> None:
    """Raise a FusionError for a node of `graph` that has no form in straight code of static sizes."""
    for node in graph.nodes:
        where = f"at {frames(node)[-1]['file']}:{frames(node)[-1]['line']}" if frames(node) else f"at node {node.name}"
        if name := higher_order(node.target):
            raise FusionError(f"porting a model: {name} {where} has graphs of its own, which a port cannot hold yet")
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            inside = module_path(node)
            raise FusionError(
                f"porting a model: a size depends on data {where}{f' in {inside}' if inside else ''}; a port has "
                "static sizes"
            )


def _constant(node: fx.Node) -> Constant:
    """Return the tensor that the `get_attr` node reads."""
    numbers = constant_numbers(node)
    if numbers is None:
        where = next((f" at {each['file']}:{each['line']}" for each in frames(node)[-1:]), "")
        raise FusionError(
            f"porting a model: the numbers of the tensor made{where} are not known, or too many to write; register it "
            "as a buffer of the module"
        )
    return Constant(numbers)


def _count(graph: fx.Graph) -> int:
    returned: Any = graph.output_node().args[0]
    return len(returned) if isinstance(returned, (tuple, list)) else 1


def _source(model: Callable[..., Any], name: str, signature: Signature) -> Source:
    """Return where the input called `name` comes from: an argument, or else a tensor of `model`."""
    argument = Argument(signature.readable(name))
    if argument.expression == name and isinstance(model, nn.Module) and tensor_of(model, name) is not None:
        if argument.root in signature.named:
            raise FusionError(
                f"porting a model: {name} may be a tensor of the module or an argument; pass the argument by position, "
                "or rename it"
            )
        return Weight(name)
    if argument.root not in signature.names or not _is_expression(argument.expression):
        raise FusionError(
            f"porting a model: it reads the tensor {name}, which is no argument and no tensor of the module; pass it, "
            "or register it as a buffer"
        )
    return argument


def _is_expression(name: str) -> bool:
    """Return True if `name` is an expression of Python."""
    try:
        ast.parse(name, mode="eval")
    except SyntaxError:
        return False
    return True


def tensor_of(model: nn.Module, path: str) -> Any:
    """Return the attribute of `model` at a dotted `path`; None where there is none."""
    reached: Any = model
    for step in path.split("."):
        reached = getattr(reached, step, None)
    return reached


def class_name(name: str) -> str:
    """Return the name of a class for the class or function called `name`."""
    if not name[:1].isupper():
        name = "".join(part.capitalize() for part in re.sub(r"\W", "_", name).split("_")) or "Port"
    return f"{name}Port" if name in _IMPORTED else name


_IMPORTED = {"F", "Weights"}
"""Names that the source of a port has for something else."""
