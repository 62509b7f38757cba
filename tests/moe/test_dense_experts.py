"""Products of all experts are the vendor's sequence where their weights are 0 for experts that were not chosen."""

from __future__ import annotations

import pytest
import torch

from tests.moe.experts import EMITTED, EXPERTS, Form, expected, inputs
from tests.moe.stacks import OTHERS, STACKS, biased, every, with_biases
from tests.moe.test_experts import distance, left_alone, operators, run

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, F16: 2e-3, F32: 2e-6}


@pytest.mark.parametrize("form", STACKS[::4], ids=lambda form: form.__name__)
def test_stacks_are_the_vendors_sequence(form: Form):
    check(form, "composite", False, BF16)


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("level", "dynamic", "dtype"), [("composite", False, BF16), ("core", True, F32), ("decomposed", False, F16)]
)
@pytest.mark.parametrize("form", STACKS, ids=lambda form: form.__name__)
def test_every_stack_is_the_vendors_sequence(form: Form, level: str, dynamic: bool, dtype: torch.dtype):
    check(form, level, dynamic, dtype)


def check(form: Form, level: str, dynamic: bool, dtype: torch.dtype) -> None:
    args = inputs(dtype)
    plain, fused, gm, _ = run(form, args, level, dynamic)
    assert operators(gm) == EMITTED
    wanted = expected(*args, form)
    assert fused.dtype == dtype
    assert distance(fused, wanted) < max(TOLERANCE[dtype], 1.5 * distance(plain, wanted))


def test_biases_of_stacked_products_are_those_of_the_rows():
    args = inputs(BF16)
    plain, fused, gm, _ = run(with_biases, args)
    assert operators(gm) == EMITTED
    wanted = biased(*args)
    assert distance(fused, wanted) < max(TOLERANCE[BF16], 1.5 * distance(plain, wanted))


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
def test_what_only_looks_like_it_is_left_alone(form: Form):
    said = left_alone(form, inputs(BF16))
    assert any(OTHERS[form] in each for each in said) if OTHERS[form] else not said, said


def test_weights_that_are_added_up_are_no_sum_of_experts():
    """The loss that balances experts."""

    def balance(tokens, logits, gate_up, down):
        return ((tokens @ gate_up[0, :EXPERTS].mT) * every(logits)).sum(0)

    assert not left_alone(balance, inputs(BF16))
