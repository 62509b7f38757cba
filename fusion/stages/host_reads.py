"""Stage host reads, behind reinplace: copy to the host, once, each tensor that an eager launch reads there.

    y = op(q, k, v, lengths)   →   on_host = lengths.to("cpu"); y = op(q, k, v, on_host)

Each copy synchronises with the device. Calls that need one are planned only where the user allows it
(`lengths="host"`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fusion.graph.origin import inherit
from fusion.operators import LOWERINGS, Operator, operator_of


def read_on_host(source: fx.Graph, lowering: str) -> int:
    """Copy to the host the arguments that the pass's calls read there under the compiler `lowering`.

    Return the number of copies: one per tensor, however many calls read it.
    """
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
