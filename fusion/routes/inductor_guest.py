"""Decomposition of the calls that a pass in Inductor has added, into calls that Inductor lowers at that point.

Inductor applies its table of decompositions before its passes. Of an operator in that table, or of ours, it could only
launch a fallback kernel behind its passes: it refuses the former, and cannot fuse the latter.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import fx

from fusion._torch.functional import functional_graph
from fusion._torch.nested import leaves
from fusion._torch.operators import OpOverload, is_composite
from fusion.graph.subgraphs import bodies
from fusion.operators import decompositions
from fusion.routes.expand import Table, expand
from fusion.routes.inline import replace_calls

_NPU = ("npu", "privateuseone")


def is_on_npu(source: fx.Graph) -> bool:
    """Return True if a tensor of the graph is on an NPU, where the fused operators have kernels."""
    results = leaves([node.meta.get("val") for node in source.nodes])
    return any(isinstance(each, torch.Tensor) and each.device.type in _NPU for each in results)


def decompose_added(source: fx.Graph, table: Table) -> None:
    """Decompose in place the calls that the pass added to `source`, bodies included, by `table`.

    Fused operators are replaced by their decompositions first, unless the graph is on an NPU.
    """
    ours = {} if is_on_npu(source) else decompositions()
    _decompose(source, ours, table)
    for code in dict.fromkeys(each.code for each in bodies(source) if each.is_entered):
        _decompose(cast(fx.GraphModule, code).graph, ours, table)


def _decompose(source: fx.Graph, ours: Table, table: Table) -> None:
    added = [node for node in source.nodes if "fusion" in node.meta and isinstance(node.target, OpOverload)]
    calls = [node for node in added if node.target in ours or node.target in table or is_composite(node.target)]
    replace_calls(cast(fx.GraphModule, source.owning_module), calls, partial(_parts, ours=ours, table=table))


def _parts(alone: fx.GraphModule, ours: Table, table: Table) -> fx.GraphModule:
    """Return the functional graph of `alone`, one call, as AOT autograd would trace it for Inductor.

    It is decomposed by `ours`, the decompositions of our operators, and then by `table`.
    """
    return functional_graph(expand(alone, ours), table)
