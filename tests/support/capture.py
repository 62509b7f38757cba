"""A model as lowering receives it: functional aten with whole composites, through torch.compile's own machinery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified

from fusion._torch.tracing import Boxed, preserve_composites

Inner = Callable[[fx.GraphModule, Sequence[Any]], Boxed]


class Backend:
    """A torch.compile backend that gives every captured graph to `inner`, and keeps them in `graphs`."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        preserving = ExitStack()

        def compiler(captured: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            preserving.close()
            self.graphs.append(captured)
            return self.inner(captured, inputs)

        with preserving:
            preserving.enter_context(preserve_composites(gm))
            return aot_module_simplified(
                gm,
                example_inputs,
                fw_compiler=compiler,
                inference_compiler=compiler,
                decompositions={},
                keep_inference_input_mutations=True,
            )


def compiled(model: Callable[..., Any], inner: Inner, *, dynamic: bool | None = False) -> tuple[Any, Backend]:
    """`model` compiled through `inner`, and the backend that saw its graphs."""
    torch._dynamo.reset()
    backend = Backend(inner)
    return torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True), backend
