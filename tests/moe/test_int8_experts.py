"""Experts in W8A8 become rows in int8, products of groups with their scales, and a sum, in every spelling."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from fusion.options import Options
from tests.moe.converted import converted
from tests.moe.experts import FINISH, GROUPED, ROUTE
from tests.moe.int8_experts import (
    BOUNDED,
    EMITTED,
    FORMS,
    OTHERS,
    PRODUCT,
    QUANT,
    Form,
    beside_a_shared_expert,
    biased,
    biased_loop,
    biased_sorted,
    biases,
    biases_of_others,
    bounded,
    clipped,
    expected,
    gathered,
    gathered_static,
    inputs,
    listed_static,
    loop,
    other_scales,
)
from tests.moe.test_experts import distance, left_alone, operators, run
from tests.support.torch_npu_host import requires_torch_npu

pytestmark = pytest.mark.rotates(6)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# What rounding before and behind the products may do; where a row is quantised, a number may be the one beside it.
TOLERANCE = {BF16: 1e-2, F16: 5e-3}


@pytest.mark.parametrize(
    ("level", "dynamic", "dtype", "scales"),
    [("composite", False, BF16, F32), ("core", True, BF16, BF16), ("decomposed", False, F16, F32)],
    ids=str,
)
@pytest.mark.parametrize("name", FORMS)
def test_every_spelling_is_the_vendors_sequence(
    name: str, level: str, dynamic: bool, dtype: torch.dtype, scales: torch.dtype
):
    args = inputs(dtype, scales=scales)
    plain, fused, gm, _ = run(FORMS[name], args, level, dynamic)
    assert operators(gm) == EMITTED
    wanted = expected(*args)
    assert fused.dtype == dtype
    assert distance(fused, wanted) < max(TOLERANCE[dtype], 1.5 * distance(plain, wanted))


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_one_token_and_more(tokens: int):
    args = inputs(BF16, tokens)
    plain, fused, gm, _ = run(gathered, args)
    assert operators(gm) == EMITTED
    assert distance(fused, expected(*args)) < max(TOLERANCE[BF16], 1.5 * distance(plain, expected(*args)))


def test_bounds_stand_between_two_products_of_groups():
    args = inputs(BF16)
    plain, fused, gm, _ = run(bounded, args)
    assert operators(gm) == BOUNDED
    wanted = expected(*args, activation=clipped)
    assert distance(fused, wanted) < max(TOLERANCE[BF16], 1.5 * distance(plain, wanted))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(biased, BF16), (biased, F16), (biased_sorted, BF16), (biased_sorted, F16), (biased_loop, BF16)],
)
def test_biases_are_added_to_rows_and_by_the_sum(form: Form, dtype: torch.dtype):
    args = (*inputs(dtype), *biases(dtype))
    plain, fused, gm, _ = run(form, args)
    assert operators(gm) == {ROUTE: 1, GROUPED: 2, "npu::npu_swiglu": 1, QUANT: 1, FINISH: 1}
    wanted = expected(*args)
    assert distance(fused, wanted) < max(TOLERANCE[dtype], 1.5 * distance(plain, wanted))


def test_a_product_that_the_model_rounds_with_its_bias_alone_is_not_held_in_float16():
    said = left_alone(biased_loop, (*inputs(F16), *biases(F16)))
    assert any("float16" in each for each in said)


def test_biases_of_other_experts_are_left_alone():
    said = left_alone(biases_of_others, (*inputs(BF16), *biases(BF16)))
    assert any("what experts add is not proven to be the" in each for each in said), said


def test_tokens_that_others_read_in_int8_are_quantised_once():
    args = inputs(BF16)
    plain, fused, gm, _ = run(beside_a_shared_expert, args)
    assert operators(gm) == EMITTED | {QUANT: 1, PRODUCT: 1}
    assert distance(fused, plain) < TOLERANCE[BF16]


@pytest.mark.parametrize("lower", ["torchair", "eager"])
def test_matrices_that_are_passed_in_are_read_as_they_lie(lower: str):
    args = tuple(each.detach() for each in inputs(BF16))
    plain, fused, gm, _ = run(gathered, args, options=Options(target="ascend910_93", plan_lower=lower))
    assert operators(gm) == {ROUTE: 1, GROUPED: 2, FINISH: 1, "npu::npu_swiglu_quant": 1}
    assert distance(fused, expected(*args)) < max(TOLERANCE[BF16], 1.5 * distance(plain, expected(*args)))


def test_tokens_in_int8_may_have_any_scales():
    plain, fused, gm, _ = run(other_scales, inputs(BF16))
    assert operators(gm) == EMITTED | {QUANT: 1}
    assert distance(fused, plain) < TOLERANCE[BF16]


def test_matrices_that_lie_apart_are_joined_once():
    tokens, logits, *layers = inputs(BF16)
    apart = [[nn.Parameter(each, requires_grad=False) for each in several.detach().unbind()] for several in layers]
    counts = [len(each) for each in apart]

    def form(tokens: Tensor, logits: Tensor, *flat: Tensor) -> Tensor:
        parts, at = [], 0
        for count in counts:
            parts.append(flat[at : at + count])
            at += count
        return loop(tokens, logits, *parts)

    _, fused, gm, outcome = run(form, (tokens, logits, *(each for several in apart for each in several)))
    assert operators(gm) == EMITTED
    assert len(outcome.prepared) == 4
    assert distance(fused, expected(tokens, logits, *layers)) < 3 * TOLERANCE[BF16]


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_it_is_left_alone(name: str):
    form, reason = OTHERS[name]
    said = left_alone(form, inputs(BF16))
    assert any(re.search(reason, each) for each in said), said


@pytest.mark.parametrize("form", [gathered_static, listed_static], ids=lambda each: each.__name__)
def test_one_scale_for_all_rows_is_told_of_each_product(form: Form):
    scales = [nn.Parameter(torch.tensor([each]), requires_grad=False) for each in (0.03, 0.05)]
    said = left_alone(form, (*inputs(BF16), *scales))
    reason = "experts multiply int8 of one static scale"
    assert sum(reason in each for each in said) == 2


@requires_torch_npu
@pytest.mark.parametrize(
    ("form", "operators"),
    [
        ("gathered", {"MoeInitRoutingV3": 1, "GroupedMatmulSwigluQuantV2": 1, "GroupedMatmul": 1}),
        ("bounded", {"MoeInitRoutingV3": 1, "ClippedSwiglu": 1, "DynamicQuant": 1, "GroupedMatmul": 2}),
    ],
)
def test_the_vendors_compiler_takes_the_sequence(form: str, operators: dict[str, int]):
    told = converted("tests.moe.int8_experts", form)
    assert {name: told["operators"].get(name) for name in operators} == operators, told
    assert told["error"] < 2 * TOLERANCE[BF16]
