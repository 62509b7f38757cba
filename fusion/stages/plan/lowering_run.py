"""Run: the calls that a lowering made on fake tensors, with what each of them reads, moves and computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fusion._torch.nested import leaves, map_only
from fusion.graph.launches import is_data, is_view
from fusion.operators import operator_of
from fusion.planning.cost import aten_flops, call_cost
from fusion.planning.target import Target
from fusion.records import Input, Output, Step


@dataclass(frozen=True)
class Run:
    """The recorded `steps` of a lowering, called with the fake tensors `inputs`."""

    steps: Sequence[Step]
    inputs: Mapping[str, torch.Tensor]

    @cached_property
    def sources(self) -> Sequence[frozenset[str]]:
        """For each step, the names of the inputs that it depends on."""
        sources: list[frozenset[str]] = []
        for step in self.steps:
            read = (_names(each, sources) for each in _references(step))
            sources.append(frozenset[str]().union(*read))
        return sources

    @property
    def used(self) -> frozenset[str]:
        """The names of the inputs that some step depends on."""
        return frozenset[str]().union(*self.sources)

    def origin(self, reference: Input | Output) -> frozenset[str]:
        """Return the names of the inputs that `reference` depends on."""
        return _names(reference, self.sources)

    def lookup(self, reference: Input | Output) -> Any:
        """Return the fake tensor of `reference`, an input or a result of a step."""
        if isinstance(reference, Input):
            return self.inputs[reference.name]
        result = self.steps[reference.step].result
        return result if reference.item is None else result[reference.item]

    def operands(self, step: Step) -> dict[Input | Output, Any]:
        """Return the fake tensor of each reference among the arguments of `step`, each once."""
        return {each: self.lookup(each) for each in _references(step)}

    def is_kernel(self, step: Step) -> bool:
        """Return True if `step` is no view, and its result or an operand has floats or quantised numbers.

        Arithmetic on positions costs nothing.
        """
        return not is_view(step.target) and is_data((step.result, [*self.operands(step).values()]))

    def arguments(self, step: Step) -> tuple[Any, Any]:
        """Return the arguments and keyword arguments of `step`, with fake tensors for references."""
        return map_only((Input, Output), self.lookup, (step.args, step.kwargs))

    def flops(self, step: Step) -> float:
        """Count the floating-point operations of `step`."""
        operator = operator_of(step.target)
        if operator is None:
            return aten_flops(step.target, self.arguments(step)[0], step.result)
        return 0.0 if operator.flops is None else operator.work(*self.arguments(step))

    def skipped(self, step: Step) -> float:
        """Count the bytes of its arguments that the operator of `step` does not read."""
        operator = operator_of(step.target)
        return 0.0 if operator is None or operator.skipped_bytes is None else operator.skipped(*self.arguments(step))

    def cost(self, step: Step, machine: Target, moved: Iterable[Any], result: Any) -> float:
        """Predict the microseconds of `step` on `machine`, given that it reads the tensors `moved` and writes
        `result`.
        """
        return call_cost(step.target, moved, result, machine, self.flops(step), -self.skipped(step))


def _references(step: Step) -> list[Input | Output]:
    return [each for each in leaves(step.args, step.kwargs) if isinstance(each, Input | Output)]


def _names(reference: Input | Output, sources: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset((reference.name,)) if isinstance(reference, Input) else sources[reference.step]
