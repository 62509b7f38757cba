"""Stage capture: lower a graph of Dynamo to functional aten, with composite operators intact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.tracing import Boxed, aot_inference, preserve_composites

Compile = Callable[[fx.GraphModule, Sequence[Any]], Boxed]


def is_training(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Return True if autograd would build a backward graph: gradients are on, and an input and a result of `gm`
    require them.

    A result without metadata counts as one that does.
    """
    if not torch.is_grad_enabled() or not any(map(_learns, example_inputs)):
        return False
    results = [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]
    return any(each is None or _learns(each) for each in results)


def _learns(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> Callable[..., Any]:
    """Trace `gm` for inference and compile its functional graph by `compile_graph`.

    The graph ends with `copy_` into the inputs that `gm` mutates. Composites are preserved during the trace alone: the
    context ends before `compile_graph` runs.
    """
    context = ExitStack()

    def compile_once(captured: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        context.close()
        return compile_graph(captured, inputs)

    with context:
        context.enter_context(preserve_composites(gm))
        return aot_inference(gm, example_inputs, compile_once)
