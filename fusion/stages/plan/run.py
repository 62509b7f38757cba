"""Run: what a lowering called on fake tensors, and what each of its calls reads, moves and computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fusion._torch.tensors import leaves, map_only
from fusion.graph.launches import is_data, is_view
from fusion.operators import operator_of
from fusion.planning.cost import aten_flops, call_cost
from fusion.planning.target import Target
from fusion.records import Input, Output, Step


@dataclass(frozen=True)
class Run:
    """What was run on these inputs."""

    steps: Sequence[Step]
    inputs: Mapping[str, torch.Tensor]

    @cached_property
    def sources(self) -> Sequence[frozenset[str]]:
        """For each step, the inputs that it depends on."""
        found: list[frozenset[str]] = []
        for step in self.steps:
            read = (_names(each, found) for each in _references(step))
            found.append(frozenset[str]().union(*read))
        return found

    @property
    def used(self) -> frozenset[str]:
        """The inputs that some step reads."""
        return frozenset[str]().union(*self.sources)

    def origin(self, reference: Input | Output) -> frozenset[str]:
        """The inputs on which an argument depends."""
        return _names(reference, self.sources)

    def lookup(self, reference: Input | Output) -> Any:
        """The fake tensor that an argument stands for."""
        if isinstance(reference, Input):
            return self.inputs[reference.name]
        result = self.steps[reference.step].result
        return result if reference.item is None else result[reference.item]

    def operands(self, step: Step) -> dict[Input | Output, Any]:
        """The tensors that a step reads, each once."""
        return {each: self.lookup(each) for each in _references(step)}

    def is_kernel(self, step: Step) -> bool:
        """Whether a step makes or reads data by more than a view; arithmetic on positions is bookkeeping."""
        return not is_view(step.target) and is_data((step.result, [*self.operands(step).values()]))

    def arguments(self, step: Step) -> tuple[Any, Any]:
        """What a step is called with."""
        return map_only((Input, Output), self.lookup, (step.args, step.kwargs))

    def flops(self, step: Step) -> float:
        """The arithmetic of a step."""
        operator = operator_of(step.target)
        if operator is None:
            return aten_flops(step.target, self.arguments(step)[0], step.result)
        return 0.0 if operator.flops is None else operator.work(*self.arguments(step))

    def unread(self, step: Step) -> float:
        """Bytes of what a step is given that it does not read."""
        operator = operator_of(step.target)
        return 0.0 if operator is None or operator.unread is None else operator.left(*self.arguments(step))

    def cost(self, step: Step, machine: Target, moved: Iterable[Any], result: Any) -> float:
        """Predicted microseconds of a step that moves these tensors and its result."""
        return call_cost(step.target, moved, result, machine, self.flops(step), -self.unread(step))


def _references(step: Step) -> list[Input | Output]:
    return [each for each in leaves(step.args, step.kwargs) if isinstance(each, Input | Output)]


def _names(reference: Input | Output, sources: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset((reference.name,)) if isinstance(reference, Input) else sources[reference.step]
