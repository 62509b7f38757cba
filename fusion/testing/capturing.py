"""Capture of functions as the graphs that a backend would see."""

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
from fusion.graph import Value
from fusion.inputs.dynamo_inputs import Known
from fusion.language import Example
from fusion.stages.canonicalise import canonicalise

Level = Literal["composite", "decomposed", "core"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Captured:
    """A functional aten graph and its input tensors (and sizes), parameters included.

    Attributes:
        graph: the graph.
        inputs: its inputs.
        known: the facts about the graph of Dynamo.
        assumed: kinds of masks of inputs, as `Facts.assumed`.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    known: Known
    assumed: Mapping[str, str] = immutable_dict()

    @property
    def facts(self) -> Facts:
        """Facts about the inputs, and the strides of the results in the uncompiled function."""
        return self.known.completed(Facts(assumed=self.assumed), self.graph.graph)

    @property
    def canonical(self) -> str:
        """Text of the canonical values, which forms are matched against: op, operands, attributes and type of each."""
        graph = canonicalise(self.graph.graph, self.facts)
        return "\n".join(map(_described, sorted(graph.owners, key=lambda value: value.id)))


def _described(value: Value) -> str:
    """Describe `value` in a line, e.g. `v3 = mul(v1, v2)  f32[4, 8]`; attributes follow the operands."""
    inside = ", ".join([*(f"v{each.id}" for each in value.args), *map(repr, value.attrs)])
    return f"v{value.id} = {value.op}({inside})  {str(value).partition(' ')[2]}"


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

    Resets Dynamo, so that captures do not depend on each other.

    Args:
        function: the function.
        args: its arguments.
        level: degree of decomposition: "composite" as in the backend, "decomposed" by torch without a table, "core" to
            the core aten operators.
        dynamic: as in `torch.compile`.
        kwargs: its keyword arguments.

    Raises:
        torch._dynamo.exc.Unsupported: the call is not one graph.
    """
    table = core_table() if level == "core" else {}

    def compile_graph(known: Known, gm: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        def stop(*inputs: Any) -> Any:
            raise _Stop(Captured(gm, inputs, known))

        return boxed(stop)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with preserve_composites(gm) if level == "composite" else nullcontext():
            return aot_inference(
                gm, example_inputs, partial(compile_graph, Known.from_dynamo(gm, example_inputs)), table
            )

    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    except _Stop as stop:
        return stop.captured
    raise AssertionError(f"capturing {function}: it computes nothing on tensors")


@lru_cache(maxsize=512)
def captured(example: Example, dtype: torch.dtype, level: Level = "composite") -> Captured:
    """Return the memoised `capture` of an example; callers must copy a graph before they change it.

    Sizes that the inputs mark as dynamic for Dynamo are symbolic.
    """
    return capture(example.function, example.inputs(dtype), level, dynamic=None)
