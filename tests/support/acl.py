"""npugraph_ex behind the stubs, for a child process: the FX graph that it captures, after its own passes."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

_optimized: list[fx.GraphModule] = []


def install() -> None:
    """Let npugraph_ex run without a device, and record its graphs."""
    import torch_npu  # noqa: F401  (makes npugraph_ex importable)
    from npugraph_ex._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    optimize = AclConcreteGraph.optimize_graph_without_runtime

    @functools.wraps(optimize)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = optimize(self, *args, **kwargs)
        _optimized.append(self.fx_graph)
        return result

    AclConcreteGraph.optimize_graph_without_runtime = recorded


def optimized() -> list[fx.GraphModule]:
    """Return every graph compiled since `install`, in order."""
    return list(_optimized)
