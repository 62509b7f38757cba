"""Functions captured as the graphs that a backend would see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch
import torch.fx as fx
from torch.fx.immutable_collections import immutable_dict

from fusion._torch.operators import core_table
from fusion._torch.tracing import Boxed, aot_inference, boxed, preserve_composites
from fusion.facts import Facts
from fusion.inputs.dynamo_inputs import Known
from fusion.language import Example

Level = Literal["composite", "decomposed", "core"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Captured:
    """A functional aten graph and the tensors (and sizes) that it takes, parameters included.

    `assumed` names inputs of the graph of which a user says what they are, as `Facts.assumed`; `known` is what Dynamo's
    graph tells of it.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    known: Known
    assumed: Mapping[str, str] = immutable_dict()

    @property
    def facts(self) -> Facts:
        """What is known of the inputs, and how the results lie when the function runs without a compiler."""
        return self.known.completed(Facts(assumed=self.assumed), self.graph.graph)


class _Stop(Exception):  # noqa: N818 - carries the result out of a compiled function
    def __init__(self, captured: Captured) -> None:
        self.captured = captured


def capture(
    function: Callable[..., Any],
    args: Sequence[Any],
    level: Level = "composite",
    *,
    dynamic: bool | None = False,
    **kwargs: Any,
) -> Captured:
    """Trace the call `function(*args, **kwargs)` for inference; nothing is run and no input is written to.

    `level` says how far operators are decomposed: "composite" as the backend captures, "decomposed" as torch does it
    without a table, "core" to the core aten operators. Resets Dynamo, so that captures do not depend on each other.

    Raises:
        torch._dynamo.exc.Unsupported: the call is not one graph.
    """
    table = core_table() if level == "core" else {}

    def compile_graph(known: Known, gm: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        def stop(*inputs: Any) -> Any:
            raise _Stop(Captured(gm, inputs, known))

        return boxed(stop)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with preserve_composites() if level == "composite" else nullcontext():
            return aot_inference(gm, example_inputs, partial(compile_graph, Known.of(gm, example_inputs)), table)

    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    except _Stop as stop:
        return stop.captured
    raise AssertionError(f"capturing {function}: it computes nothing on tensors")


@lru_cache(maxsize=512)
def captured(example: Example, dtype: torch.dtype, level: Level = "composite") -> Captured:
    """What `capture` gives for an example, once: whoever changes a graph changes a copy.

    Sizes that the inputs mark as dynamic for Dynamo are symbolic.
    """
    return capture(example.function, example.inputs(dtype), level, dynamic=None)
