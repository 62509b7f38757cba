"""Stage 8, verify: a rewritten graph has the same inputs, outputs and writes as before, in a valid order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch import OpOverload, schema_of
from fusion.errors import VerificationError
from fusion.graph import dims_of


@dataclass(frozen=True)
class Contract:
    """What a caller can observe of a graph, apart from its numbers."""

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    writes: tuple[str, ...]


def contract(source: fx.Graph) -> Contract:
    """Inputs by name, outputs by shape and dtype, and writes to memory in order."""
    inputs = tuple(node.name for node in source.nodes if node.op == "placeholder")
    output = next(node for node in source.nodes if node.op == "output")
    writes = tuple(
        f"{node.target} of {[str(each) for each in node.args[:1]]}"
        for node in source.nodes
        if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
    )
    outputs: list[Any] = []
    map_arg(output.args, lambda node: outputs.append(_seen(node.meta.get("val"))))
    return Contract(inputs, tuple(outputs), writes)


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
