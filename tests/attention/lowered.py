"""What attention becomes on the target, and by which lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusion import testing
from fusion.options import Options
from fusion.testing import Level, Trial, capture

Form = Callable[..., Any]


def tried(form: Form, inputs: Sequence[Tensor], level: Level = "composite") -> Trial:
    options = Options(target="ascend910_93", lower="eager", plan_cache="off")
    return testing.trial_of(capture(form, tuple(inputs), level), options)


def lowerings(t: Trial) -> list[str]:
    """Those of each attention, without what was chosen of their variants."""
    return [each.lowering.partition("[")[0] for each in t.outcome.chosen if each.match.rule.name == "attention"]
