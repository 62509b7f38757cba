"""Stage 9, host reads, after reinplace: what an eager launch reads on the host is copied there first, once.

    y = op(q, k, v, lengths)   →   there = lengths.to("cpu"); y = op(q, k, v, there)

Each copy waits for the device. It is made only where the user allows it (`lengths="host"`): nothing else plans such a
call for a compiler that launches it by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fusion.graph.origin import inherit
from fusion.operators import LOWERINGS, Operator, operator_of


def read_on_host(source: fx.Graph, lowering: str) -> int:
    """Copy to the host what the pass's calls read there under `lowering`; return how many copies were made."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(source.nodes):
        operator = operator_of(node.target) if "fusion" in node.meta else None
        if operator is None or lowering not in LOWERINGS or lowering in operator.lowerings:
            continue
        for name in sorted(operator.on_host):
            _move(node, operator, name, copies)
    return len(copies)


def _move(node: fx.Node, operator: Operator, name: str, copies: dict[fx.Node, fx.Node]) -> None:
    value: Any = operator.bind(node.args, node.kwargs)[name]
    if not isinstance(value, fx.Node):
        return
    if value not in copies:
        with node.graph.inserting_after(value):
            copies[value] = node.graph.call_function(
                torch.ops.aten._to_copy.default, (value,), {"device": torch.device("cpu")}
            )
        copies[value].meta["val"] = value.meta["val"].to("cpu")
        inherit(copies[value], node)
        copies[value].meta["fusion"] = dict(node.meta["fusion"])
    node.replace_input_with(value, copies[value])
