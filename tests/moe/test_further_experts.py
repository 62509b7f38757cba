"""Rows listed choice by choice, weights before a product, and experts of one device are the vendor's sequence too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.moe import expert_parallel as parallel
from tests.moe import listed_by_choice as by_choice
from tests.moe.experts import EMITTED, EXPERTS, ROUTE, Form, expected, inputs
from tests.moe.test_experts import distance, operators, run

pytestmark = pytest.mark.rotates(12)
BF16, F16 = torch.bfloat16, torch.float16
LEVELS = [("composite", False), ("core", True), ("decomposed", False)]


def local(dtype: torch.dtype, tokens: int = 5) -> tuple[Tensor, ...]:
    """Inputs with the matrices of one device."""
    x, logits, *matrices = inputs(dtype, tokens)
    own = (each[parallel.FIRST : parallel.LAST].clone() for each in matrices)
    logits[:, 2] = logits.amax(-1) + logits[:, 2] / 8  # one expert of the device is chosen by all tokens
    return x, logits, *(nn.Parameter(each, requires_grad=False) for each in own)


def check(form: Form, args: tuple[Tensor, ...], wanted: Tensor, level: str = "composite", dynamic: bool = False):
    plain, fused, gm, _ = run(form, args, level, dynamic)
    assert operators(gm) == EMITTED
    assert distance(fused, wanted) < max(1e-2, 1.5 * distance(plain, wanted))
    return gm


@pytest.mark.parametrize(("level", "dynamic"), LEVELS)
@pytest.mark.parametrize("form", by_choice.FORMS, ids=lambda form: form.__name__)
def test_rows_by_choice_and_weights_before(form: Form, level: str, dynamic: bool):
    args = inputs(BF16)
    check(form, args, expected(*args, form), level, dynamic)


@pytest.mark.parametrize("form", by_choice.FORMS[:2] + by_choice.FORMS[3:], ids=lambda form: form.__name__)
@pytest.mark.parametrize("tokens", [1, 2])
def test_as_many_tokens_as_choices_and_fewer(form: Form, tokens: int):
    args = inputs(BF16, tokens)
    check(form, args, expected(*args, form))


def test_weights_before_the_first_product_of_one_choice():
    args = inputs(BF16)
    gm = check(by_choice.weighed_before_the_first_product, args, by_choice.weighed_first(*args))
    (finish,) = (node for node in gm.graph.nodes if "finalize_routing" in str(node.target))
    assert finish.args[4] is None  # no weights are left behind the experts


def test_weights_before_the_second_product_stay_there_in_float16():
    _, _, gm, outcome = run(by_choice.weighed_before_in_half, inputs(F16))
    assert ROUTE not in operators(gm)
    assert any("before the second product, in float16" in each.reason for each in outcome.refusals)
    args = inputs(BF16)
    check(by_choice.weighed_before_in_half, args, expected(*args, by_choice.weighed_before_in_half))


@pytest.mark.parametrize("name", by_choice.OTHERS)
def test_what_only_looks_like_rows_by_choice_is_left_with_its_reason(name: str):
    form, reason = by_choice.OTHERS[name]
    _, _, gm, outcome = run(form, inputs(BF16))
    assert ROUTE not in operators(gm)
    assert any(reason in each.reason for each in outcome.refusals)


@pytest.mark.parametrize(("level", "dynamic"), LEVELS)
@pytest.mark.parametrize("form", parallel.FORMS, ids=lambda form: form.__name__)
def test_experts_of_one_device(form: Form, level: str, dynamic: bool):
    args = local(BF16)
    gm = check(form, args, parallel.expected(*args), level, dynamic)
    (route,) = (node for node in gm.graph.nodes if "init_routing" in str(node.target))
    assert route.kwargs["active_expert_range"] == [parallel.FIRST, parallel.LAST]
    assert route.kwargs["expert_num"] == EXPERTS


@pytest.mark.parametrize("dtype", [F16, torch.float32], ids=str)
@pytest.mark.parametrize("form", [parallel.looped, parallel.at_once], ids=lambda form: form.__name__)
def test_experts_of_one_device_in_other_dtypes(form: Form, dtype: torch.dtype):
    args = local(dtype)
    check(form, args, parallel.expected(*args))


def test_no_token_chose_an_expert_of_the_device():
    tokens, logits, *matrices = local(BF16)
    logits[:, parallel.FIRST : parallel.LAST] = -9
    plain, fused, gm, _ = run(parallel.looped, (tokens, logits, *matrices))
    assert operators(gm) == EMITTED
    assert torch.equal(fused, torch.zeros_like(plain))


@pytest.mark.parametrize("name", parallel.OTHERS)
def test_what_only_looks_like_one_device_is_left_with_its_reason(name: str):
    form, reason = parallel.OTHERS[name]
    _, _, gm, outcome = run(form, local(BF16))
    assert ROUTE not in operators(gm)
    assert any(reason in each.reason for each in outcome.refusals), [each.reason for each in outcome.refusals]
