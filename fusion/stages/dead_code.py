"""Stage dead code: erase calls that no result of a graph needs, so that none counts as a reader.

    y = x.float(); assert_tensor_metadata(y, dtype=float32)   →   y = x.float()

`torch.export` leaves unused results in the graph, and asserts the metadata of each tensor that is cast. An assertion
that the fake tensor proves cannot fail and is erased; any other stays.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fusion._torch.operators import given
from fusion.graph import dims_of

_METADATA = torch.ops.aten._assert_tensor_metadata.default


def drop_dead_code(source: fx.Graph) -> bool:
    """Erase from `source` calls without users or effects, and proven assertions; return True if there were any."""
    dropped = False
    for node in reversed(source.nodes):
        if node.op == "call_function" and not node.users and (_is_proven(node) or not node.is_impure()):
            source.erase_node(node)
            dropped = True
    return dropped


def _is_proven(node: fx.Node) -> bool:
    """Return True if `node` asserts metadata of a tensor all of which its fake tensor has."""
    if node.target is not _METADATA:
        return False
    claimed = given(node.target, node.args, node.kwargs)
    tensor = claimed.pop("a")
    val = tensor.meta.get("val") if isinstance(tensor, fx.Node) else None
    if not isinstance(val, torch.Tensor):
        return False
    known = {"dtype": val.dtype, "device": val.device, "layout": val.layout}
    known |= {"size": dims_of(val.shape), "stride": dims_of(val.stride())}
    return all(_comparable(each) == known[name] for name, each in claimed.items() if each is not None)


def _comparable(claim: Any) -> Any:
    return tuple(claim) if isinstance(claim, (list, tuple)) else claim
