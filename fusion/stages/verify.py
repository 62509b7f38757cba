"""Stage 9, verify: a rewritten graph has the same inputs, outputs and writes as before, in a valid order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion.cost import is_view
from fusion.errors import VerificationError
from fusion.graph import dims_of
from fusion.mutation import closing_writes, is_write, written_by


@dataclass(frozen=True)
class Contract:
    """What a caller can observe of a graph, apart from its numbers.

    `written` are the inputs that are written to, in the order of the inputs; `between` are the writes in the middle of
    the graph that are the user's own, by input, in their order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    written: tuple[str, ...]
    between: tuple[str, ...]


def contract(source: fx.Graph) -> Contract:
    """Inputs by name, outputs by shape and dtype, and the inputs that are written to."""
    inputs = tuple(node.name for node in source.nodes if node.op == "placeholder")
    output = next(node for node in source.nodes if node.op == "output")
    writes = [node for node in source.nodes if is_write(node)]
    closing = closing_writes(source)
    own = [node for node in writes if node not in closing and "fusion" not in node.meta]
    named = {name for node in writes for name in _targets(node)}
    outputs: list[Any] = []
    map_arg(output.args, lambda node: outputs.append(_seen(node.meta.get("val"))))
    return Contract(
        inputs,
        tuple(outputs),
        tuple(name for name in inputs if name in named),
        tuple(f"{node.target} of {_targets(node)}" for node in own),
    )


def _targets(node: fx.Node) -> list[str]:
    """The inputs, or other nodes, whose memory a call writes into."""
    return [_root(each).name for each in written_by(node)]


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a view, or the result of a write, is."""
    source = node.args[0] if node.args else None
    aliases = node.op == "call_function" and (is_view(node.target) or is_write(node))
    return _root(source) if aliases and isinstance(source, fx.Node) else node


def _seen(val: Any) -> Any:
    return (dims_of(val.shape), val.dtype, str(val.device)) if isinstance(val, torch.Tensor) else type(val).__name__


def verify(source: fx.Graph, before: Contract, added: Sequence[fx.Node], prepared: Sequence[str] = ()) -> None:
    """Check a rewritten graph against the contract of the original, and its new nodes against their own operators.

    `prepared` names the inputs that it has beyond those of the original, in order.

    Raises:
        VerificationError: they differ; the graph must not be used.
    """
    before = replace(before, inputs=(*before.inputs, *prepared))
    after = contract(source)
    if after != before:
        raise VerificationError(
            f"verifying the rewritten graph: it has {after} where the original has {before}; "
            "this is a defect of a rule: run with fuel=0, 1, ... to find which rewrite it is, and report it"
        )
    source.lint()
    order = {node: position for position, node in enumerate(source.nodes)}
    for node in added:
        if node in order and node.meta.get("val") is None:
            raise VerificationError(f"verifying the rewritten graph: new node {node.name} has no shape")
