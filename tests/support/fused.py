"""What a trial, a report or a fused graph calls, and the laws that each trial of a test keeps."""

from __future__ import annotations

from collections import Counter

from torch import fx

import fusion
from fusion.report.outcome import live_calls
from fusion.testing import Trial, emits_valid_calls, means_what_it_says

FIA = "npu.npu_fused_infer_attention_score"
Fused = Trial | fusion.Report | fx.GraphModule


def calls(of: Fused, name: str = "") -> list[fx.Node]:
    """Return the calls of targets that have `name`, such as "npu.npu_rms_norm", in their text."""
    nodes = (node for graph in _graphs(of) for node in graph.graph.nodes if node.op == "call_function")
    return [node for node in nodes if name in str(node.target)]


def call(of: Fused, name: str) -> fx.Node:
    """Return the only call of a target that has `name` in its text."""
    (found,) = calls(of, name)
    return found


def targets(of: Fused, name: str = "") -> Counter[str]:
    """Count the targets that have `name` in their text."""
    return Counter(str(node.target) for node in calls(of, name))


def launches(of: fx.GraphModule) -> int:
    """Count the kernels that the calls of a graph launch, without those that no result needs."""
    return sum(each.launches for each in live_calls(of.graph).values())


def checked(t: Trial) -> Trial:
    """Return `t`, after it was required to run without failures, to mean what the model does, and to call legally."""
    assert not t.outcome.failures
    means_what_it_says(t)
    emits_valid_calls(t)
    return t


def _graphs(of: Fused) -> list[fx.GraphModule]:
    if isinstance(of, Trial):
        return [of.fused]
    return [of] if isinstance(of, fx.GraphModule) else list(of.graphs)
