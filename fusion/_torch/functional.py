"""Functionalisation of a graph by one trace, as in AOT autograd."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion._torch.fakes import fake_mode_of
from fusion._torch.tracing import trace


def functional_graph(gm: fx.GraphModule, decompositions: Mapping[OpOverload, Callable[..., Any]]) -> fx.GraphModule:
    """Functionalise `gm`, but for `copy_` to its inputs at the end, and decompose by `decompositions`.

    The result is that of AOT autograd for a graph without gradients whose inputs share no memory;
    `torch.func.functionalize` would guard on the values of symbolic sizes.
    Private: `torch._subclasses.functional_tensor`, `torch._functionalize_has_data_mutation`, `torch._sync`,
    `torch._from_functional_tensor`, `torch._dispatch.python.enable_python_dispatcher`.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensor, dispatch_functionalize

    private: Any = torch
    wrapped: list[Any] = []

    def run(*inputs: Any) -> Any:
        wrapped.extend(inputs)
        return fx.Interpreter(gm).run(*inputs)

    def written(*inputs: Any) -> Any:
        results = dispatch_functionalize(run)(*inputs)
        for given, inside in zip(inputs, wrapped, strict=True):
            if isinstance(inside, FunctionalTensor) and private._functionalize_has_data_mutation(inside.elem):
                private._sync(inside)
                given.copy_(private._from_functional_tensor(inside.elem))
        return results

    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = fake_mode_of(gm) or FakeTensorMode()
    with enable_python_dispatcher():
        traced = trace(written, values, mode, decompositions)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced
