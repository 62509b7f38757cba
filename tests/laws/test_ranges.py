"""Every rule of the library keeps the range and the precision of the model, at any scale of its examples' inputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from fusion import Example, Rule, testing
from fusion.frontend.library import installed
from fusion.options import Options
from tests.support.tried import cases

TARGETS = ("ascend910_93", "host")
pytestmark = pytest.mark.rotates(48)

UNDECIDED = {
    ("mla_prolog", "W8A8 pages: two at a slot"): "two rows are written to one slot: either may stay",
    (
        "mla_preprocess",
        "int8 latent, a token, constants",
    ): "one step of an int8 query decides a softmax of large scores",
}
"""Examples whose results at the ends of ranges no rounding decides, with the reason."""
COARSER = {
    ("quantisation", "a bound, and the inverse"): "the model bounds the scale of a row from below, so that rows below "
    "the bound have a coarser grid than the operator gives them, which is nearer to the numbers",
}
"""Examples whose original is further from the numbers that it rounds than the fused graph is, with the reason."""


def settings(*choices: Any) -> Iterator[Any]:
    """Yield every example with every choice."""
    applied = ((rule, each) for rule, each in cases(installed().rules) if not each.refusal or each.instead)
    for (rule, example), choice in product(applied, choices):
        name = f"{rule.name}-{example.name}-{choice}".replace("torch.", "")
        yield pytest.param(rule, example, choice, id=name)


def trial(rule: Rule, example: Example, dtype: torch.dtype, target: str) -> testing.Trial:
    return testing.trial(rule, example, dtype, options=Options(target=target, lower="eager"))


@pytest.mark.parametrize(("rule", "example", "target"), settings(*TARGETS))
def test_float16_stays_in_range(rule: Rule, example: Example, target: str):
    if (rule.name, example.name) in UNDECIDED:
        pytest.skip(UNDECIDED[rule.name, example.name])
    testing.stays_in_range(trial(rule, example, torch.float16, target))


@pytest.mark.rotates
@pytest.mark.parametrize(("rule", "example", "dtype"), settings(torch.bfloat16, torch.float32))
def test_other_floats_are_as_near_to_float64(rule: Rule, example: Example, dtype: torch.dtype):
    if (rule.name, example.name) in COARSER:
        pytest.skip(COARSER[rule.name, example.name])
    testing.stays_in_range(trial(rule, example, dtype, "ascend910_93"))


@pytest.mark.parametrize(("rule", "example", "target"), settings(TARGETS[0]))
def test_float64_is_exact_on_a_host_and_refused_on_a_chip(rule: Rule, example: Example, target: str):
    try:
        host = trial(rule, example, torch.float64, "host")
    except torch._dynamo.exc.TorchRuntimeError:
        pytest.skip("torch itself multiplies groups in bfloat16 alone")
    try:
        host.captured.graph(*host.inputs()[: len(host.captured.inputs)])
    except RuntimeError as error:
        pytest.skip(f"the model itself fails in float64: {error}")
    testing.keeps_float64(host)
    testing.refuses_float64(trial(rule, example, torch.float64, target), bool(host.outcome.chosen))
