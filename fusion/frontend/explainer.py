"""The backend of `explain`: it fuses and reports, and runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch.fx.immutable_collections import immutable_dict

from fusion._torch.tracing import Boxed, boxed, copied, inline_regions, specialise_floats
from fusion.errors import StageError
from fusion.frontend.backend import FusionBackend
from fusion.inputs.dynamo_inputs import Known
from fusion.report.failures import stage
from fusion.report.outcome import GraphReport
from fusion.runtime.prepared_weights import foreseen, obstacles
from fusion.stages.capture import capture


@dataclass(frozen=True)
class Explainer:
    """A backend that fuses and reports, and whose graphs return fake results instead of running.

    Attributes:
        backend: the backend that fuses.
        parts: list to which the reports are appended.
        positional: names of the positional arguments of the explained function.
        originals: by the id of a fake tensor, the tensor that it is a copy of.
    """

    backend: FusionBackend
    parts: list[GraphReport]
    positional: tuple[str, ...] = ()
    originals: Mapping[int, torch.Tensor] = immutable_dict()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Append the report of one graph, and return an interpreter of the graph."""
        specialise_floats(gm)
        inline_regions(gm)
        known = Known.from_dynamo(gm, example_inputs, self.positional, self.originals)
        real = [self.originals.get(id(each), each) for each in example_inputs]
        return capture(gm, example_inputs, partial(self._compile, known, obstacles(real)))

    def _compile(self, known: Known, stuck: Sequence[str], gm: fx.GraphModule, example_inputs: Iterable[Any]) -> Boxed:
        original = fx.GraphModule(gm, copied(gm.graph))
        try:
            with stage("capture"):
                facts = known.facts(gm.graph, self.backend.options.assume)
            report = self.backend.reported(known, facts, gm, original)
            with stage("prepare"):
                prepared = foreseen(report.prepared, gm.graph, stuck)
            self.parts.append(replace(report, prepared=prepared))
        except StageError as error:
            self.parts.append(self.backend.failed(original, error))
        return boxed(fx.Interpreter(original).run)
