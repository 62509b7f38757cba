"""A loop over all experts is the vendor's sequence where its weights are 0 for experts that were not chosen."""

from __future__ import annotations

import re

import pytest
import torch

from tests.moe.experts import EMITTED, ROUTE
from tests.moe.loops import FORMS, OTHERS, Form, added, expected, inputs, next_to_them
from tests.moe.test_experts import distance, left_alone, operators, run

pytestmark = pytest.mark.rotates(6)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, F16: 2e-3, F32: 2e-6}


@pytest.mark.parametrize(
    ("level", "dynamic", "dtype"), [("composite", False, BF16), ("core", True, F32), ("decomposed", False, F16)]
)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_loop_is_the_vendors_sequence(form: Form, level: str, dynamic: bool, dtype: torch.dtype):
    args = inputs(dtype)
    plain, fused, gm, _ = run(form, args, level, dynamic)
    assert operators(gm) == EMITTED
    wanted = expected(*args, form=form)
    assert fused.dtype == dtype
    assert distance(fused, wanted) < max(TOLERANCE[dtype], 1.5 * distance(plain, wanted))


def test_matrices_that_are_passed_in_are_not_joined_at_every_call():
    _, _, gm, outcome = run(added, inputs(BF16, parameters=False))
    assert ROUTE not in operators(gm)
    assert any("Parameters" in str(each.cause) for each in outcome.refusals)


def test_weights_of_the_next_expert_are_those_of_a_device_that_lacks_the_first():
    args = inputs(BF16)
    plain, fused, gm, _ = run(next_to_them, args)
    (route,) = (node for node in gm.graph.nodes if "init_routing" in str(node.target))
    assert route.kwargs["active_expert_range"] == [1, 6]
    exact = next_to_them(*(each.double() for each in args))
    assert distance(fused, exact) < max(TOLERANCE[BF16], 1.5 * distance(plain, exact))


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_it_is_left_alone(name: str):
    form, reason = OTHERS[name]
    said = left_alone(form, inputs(BF16))
    assert any(re.search(reason, each) for each in said) if reason else not said, said
