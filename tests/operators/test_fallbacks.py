"""Every decomposition means what its operator means, in every dtype, and rounds where the kernel rounds."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from fusion.operators import OPERATORS
from tests.operators.agreement import new, require_agreement
from tests.operators.cases import CASES, DTYPES, Case, described, flat
from tests.operators.references import REFERENCES

pytestmark = pytest.mark.rotates(32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_means_what_the_operator_means(case: Case, dtype: torch.dtype):
    arguments = case.arguments(dtype)
    op = OPERATORS[case.name]
    kept = [value for name, value in arguments.items() if isinstance(value, Tensor) and name not in op.written]
    before = [value.clone() for value in kept]
    require_agreement(case.name, arguments, dtype)
    assert all(map(torch.equal, before, kept))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_writes_the_strides_that_meta_promises(case: Case, dtype: torch.dtype):
    arguments = case.arguments(dtype)
    op = OPERATORS[case.name]
    promised = op.meta(**arguments)
    assert list(map(described, flat(op.fallback(**arguments)))) == list(map(described, flat(promised)))


def turned(x: Tensor, dims: tuple[int, int]) -> Tensor:
    """The same numbers, two dims of which lie in memory the other way round."""
    return x if x.dim() <= max(1, *dims) else x.transpose(*dims).contiguous().transpose(*dims)


@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (-1, -2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_writes_the_strides_that_meta_promises_for_inputs_that_lie_otherwise(case: Case, dims: tuple[int, int]):
    given = case.arguments(torch.float32)
    together = "cache" if "NZ" in str(given.get("cache_mode")) else None  # lines of NZ are read where they lie
    tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
    arguments = given | {name: turned(x, dims) for name, x in tensors.items() if not together or together not in name}
    op = OPERATORS[case.name]
    promised = op.meta(**arguments)
    assert list(map(described, flat(op.fallback(**arguments)))) == list(map(described, flat(promised)))


def test_every_operator_has_cases_and_a_reference():
    assert set(OPERATORS) == {case.name for case in CASES}
    assert {case.operator for case in CASES} == set(REFERENCES)


@pytest.mark.parametrize("name", OPERATORS)
def test_fallback_and_meta_take_what_the_schema_names(name: str):
    op = OPERATORS[name]
    for function in (op.fallback, op.meta):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == list(op.arguments)
        for argument in op.arguments.values():
            default = parameters[argument.name].default
            assert default == (argument.default_value if argument.has_default_value() else inspect.Parameter.empty)


def agreeing(a: Tensor, b: Tensor) -> float:
    return (a == b).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_rounds_once(dtype: torch.dtype):
    torch.manual_seed(1)
    x, gamma = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((64, 256), (256,)))
    y, _ = OPERATORS["npu::npu_rms_norm"].fallback(x, gamma)
    rstd = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    once = (x.double() * rstd * gamma.double()).to(dtype)
    twice = ((x.double() * rstd).to(dtype).double() * gamma.double()).to(dtype)
    assert agreeing(y, once) > 0.999
    assert agreeing(once, twice) < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_add_rms_norm_rounds_twice_and_only_float16_normalises_the_rounded_sum(dtype: torch.dtype):
    torch.manual_seed(1)
    x1, x2, gamma = (torch.randn(*s, dtype=torch.float64).to(dtype) for s in ((64, 256), (64, 256), (256,)))
    y, _, x = OPERATORS["npu::npu_add_rms_norm"].fallback(x1, x2, gamma)
    exact = x1.double() + x2.double()
    assert torch.equal(x, exact.to(dtype))

    def normalised(total: Tensor) -> Tensor:
        unit = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (unit.to(dtype).double() * gamma.double()).to(dtype)

    kernel, other = (exact, x.double()) if dtype == torch.bfloat16 else (x.double(), exact)
    assert agreeing(y, normalised(kernel)) > 0.999
    assert agreeing(y, normalised(other)) < 0.95


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_add_layer_norm_normalises_the_sum_before_it_is_rounded(dtype: torch.dtype):
    torch.manual_seed(1)
    x1, x2, gamma, beta = (
        torch.randn(*s, dtype=torch.float64).to(dtype) for s in ((64, 256), (64, 256), (256,), (256,))
    )
    y, _, _, x = OPERATORS["npu::npu_add_layer_norm"].fallback(x1, x2, gamma, beta, additional_output=True)
    exact = x1.double() + x2.double()
    assert torch.equal(x, exact.to(dtype))

    def normalised(total: Tensor) -> Tensor:
        unit = (total - total.mean(-1, keepdim=True)) * (total.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        return (unit * gamma.double() + beta.double()).to(dtype)

    assert agreeing(y, normalised(exact)) > 0.999
    assert agreeing(y, normalised(x.double())) < 0.95


def test_rotary_mul_rounds_cos_to_the_dtype_of_the_input_first():
    torch.manual_seed(1)
    x = torch.randn(1, 5, 3, 32).bfloat16()
    cos, sin = torch.rand(1, 5, 1, 32), torch.rand(1, 5, 1, 32)
    fallback = OPERATORS["npu::npu_rotary_mul"].fallback
    assert torch.equal(fallback(x, cos, sin), fallback(x, cos.bfloat16(), sin.bfloat16()))


def test_a_position_outside_the_cache_is_an_error_and_never_another_row():
    cache, rows = torch.zeros(2, 3, 4), torch.ones(1, 4)
    for place in ([0, 3], [0, -1], [2, 0], [-1, 0]):
        for name in ("npu_scatter_nd_update", "npu_scatter_nd_update_"):
            with pytest.raises(IndexError):
                OPERATORS[f"npu::{name}"].fallback(cache, torch.tensor([place]), rows)
    assert not cache.any()
    for start in (2, -1):
        for name in ("scatter_update", "scatter_update_"):
            with pytest.raises(IndexError):
                OPERATORS[f"npu::{name}"].fallback(cache, torch.tensor([start]), torch.ones(1, 2, 4), 1)
    for slot in (12, -1):
        arguments = dict.fromkeys(("key", "value"), torch.ones(1, 2, 8))
        pages = dict.fromkeys(("key_cache", "value_cache"), torch.zeros(3, 4, 2, 8))
        with pytest.raises(IndexError):
            OPERATORS["npu::npu_scatter_pa_kv_cache"].fallback(
                **arguments, **pages, slot_mapping=torch.tensor([slot]), cache_mode="Norm"
            )
        assert not pages["key_cache"].any()
    assert not cache[:, 1].any()
    assert not cache[1].any(), "the next sequence"


@pytest.mark.parametrize("name", [name for name in OPERATORS if OPERATORS[name].in_place])
def test_the_in_place_form_takes_the_same_and_writes_what_the_other_returns(name: str):
    functional = OPERATORS[name]
    in_place = OPERATORS[functional.in_place]
    assert list(in_place.arguments) == list(functional.arguments)
    for case in CASES:
        if case.name == name:
            arguments = case.arguments(torch.float32)
            expected = flat(functional.fallback(**arguments))
            results = new(flat(in_place.fallback(**arguments)), in_place, arguments)
            got = (*results, *(arguments[each] for each in in_place.written))
            assert len(got) == len(expected)
            assert all(map(torch.equal, got, expected))
