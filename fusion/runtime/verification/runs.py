"""Runs of one call: a graph on copies of the inputs that it writes to, in its own dtype or in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.fakes import TorchDispatchMode
from fusion._torch.memory import copied
from fusion._torch.nested import tree_leaves
from fusion._torch.operators import is_random
from fusion.graph.aliasing import is_written
from fusion.records import Prepared
from fusion.runtime.float64 import run_wide, widened
from fusion.runtime.verification.choices import Choices

_WITH_FLOAT64 = frozenset({"cpu", "cuda"})


@dataclass(frozen=True)
class Call:
    """The inputs of one call, with their contents before the call.

    Attributes:
        inputs: the caller's inputs, which the call itself may have written to.
        written: copies of the inputs that a graph writes to, by position.
        states: the state of each random generator, by device; empty where the graph draws no random numbers.
    """

    inputs: tuple[Any, ...]
    written: dict[int, Tensor]
    states: dict[torch.device, Tensor]

    @staticmethod
    def copying(graphs: Sequence[fx.Graph], inputs: Sequence[Any]) -> Call:
        """Copy the inputs that any of the graphs, which take the same inputs, writes to."""
        places = [node for graph in graphs for node in enumerate(graph.find_nodes(op="placeholder"))]
        written = {place for place, node in places if is_written(node)}
        copies = {place: copied(inputs[place]) for place in sorted(written)}
        draws = any(is_random(node.target) for graph in graphs for node in graph.nodes)
        return Call(tuple(inputs), copies, _states(inputs) if draws else {})

    @property
    def device(self) -> torch.device | None:
        """Device of float64 runs: the host where a device of the inputs has no float64, else None."""
        devices = {each.device.type for each in self.inputs if isinstance(each, Tensor)}
        return None if devices <= _WITH_FLOAT64 else torch.device("cpu")

    def run(self, graph: Callable[..., Any], mode: TorchDispatchMode | None = None) -> list[Any]:
        """Run a graph on copies; return its results, then the inputs that are written to."""
        inputs = [copied(self.written[place]) if place in self.written else x for place, x in enumerate(self.inputs)]
        with self.repeated(), mode or torch.no_grad():
            results = graph(*inputs)
        return self.observed(results, inputs)

    def run_wide(self, gm: fx.GraphModule, choices: Choices) -> list[Any]:
        """Run a graph in float64 with the given `choices`; return its results, then the inputs that are written to."""
        inputs = [
            widened(self.written[place], self.device) if place in self.written else x
            for place, x in enumerate(self.inputs)
        ]
        with self.repeated(), choices:
            results = run_wide(gm, inputs, self.device, choices.at)
        return self.observed(results, inputs)

    def observed(self, results: Any, inputs: Sequence[Any]) -> list[Any]:
        """List the tensors that a caller observes of a call: results, and the inputs that are written to."""
        observed = [*tree_leaves(results), *(inputs[place] for place in self.written)]
        return [torch.tensor(each) if isinstance(each, (int, float)) else each for each in observed]

    def put_back(self) -> None:
        """Restore the contents of the caller's inputs before the call."""
        with torch.no_grad():
            for place, before in self.written.items():
                self.inputs[place].copy_(before)

    @contextmanager
    def repeated(self) -> Generator[None, None, None]:
        """Restore the random generators inside the context, so that the numbers of the call are drawn again."""
        now = {device: _state(device) for device in self.states}
        _set_states(self.states)
        try:
            yield
        finally:
            _set_states(now)


def standalone(gm: fx.GraphModule, prepared: Sequence[Prepared]) -> fx.GraphModule:
    """Copy a rewritten graph, with the computation of its prepared inputs, to take the inputs of the original."""
    alone = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    inputs = {node.name: node for node in alone.graph.find_nodes(op="placeholder")}
    first = next(node for node in alone.graph.nodes if node.op != "placeholder")
    for each in prepared:
        sources = [inputs[name] for name in each.sources]
        placed = dict(zip(each.module.graph.find_nodes(op="placeholder"), sources, strict=True))
        with alone.graph.inserting_before(first):
            made: Any = alone.graph.graph_copy(each.module.graph, placed)
        inputs[each.name].replace_all_uses_with(made)
        alone.graph.erase_node(inputs[each.name])
    alone.graph.lint()
    alone.recompile()
    return alone


def _states(inputs: Sequence[Any]) -> dict[torch.device, Tensor]:
    devices = {torch.device("cpu"), *(each.device for each in inputs if isinstance(each, Tensor))}
    return dict(zip(devices, map(_state, devices), strict=True))


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_states(states: Mapping[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
