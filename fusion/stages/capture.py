"""Stage 1, capture: a graph of Dynamo becomes functional aten with composite operators kept whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.fx as fx

from fusion._torch import Boxed, aot_inference, preserve_composites

Compile = Callable[[fx.GraphModule, Sequence[Any]], Boxed]


def is_training(example_inputs: Sequence[Any]) -> bool:
    """Whether a backward graph would be built for these inputs."""
    return torch.is_grad_enabled() and any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in example_inputs
    )


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> Callable[..., Any]:
    """Trace `gm` for inference and hand the functional graph, with its `copy_` epilogue, to `compile_graph`.

    Composites stay whole only while `gm` is traced: the context is left before anything else is.
    """
    context = ExitStack()

    def compile_once(captured: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        context.close()
        return compile_graph(captured, inputs)

    with context:
        context.enter_context(preserve_composites())
        return aot_inference(gm, example_inputs, compile_once)
