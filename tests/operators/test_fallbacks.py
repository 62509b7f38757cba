"""Every decomposition means what its operator means, in every dtype, and rounds where the kernel rounds."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from fusion.operators import operator, operators
from tests.operators.cases import CASES, DTYPES, Case, described, flat
from tests.operators.references import REFERENCES

# Root mean square of the error over that of the result: one or two roundings of the dtype's last bit.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 5e-7, torch.float64: 1e-14}


def widened(arguments: dict) -> dict:
    wide = {n: v.double() for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return arguments | wide


def relative(got: Tensor, expected: Tensor) -> float:
    if not got.numel() or torch.equal(got.double(), expected.double()):
        return 0.0
    return ((got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_means_what_the_operator_means(case: Case, dtype: torch.dtype):
    arguments = case.arguments(dtype)
    before = [value.clone() for value in arguments.values() if isinstance(value, Tensor)]
    got = flat(operator(case.name).fallback(**arguments))
    expected = flat(REFERENCES[case.operator](**widened(arguments)))
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        assert relative(a, b) <= max(TOLERANCE[dtype], TOLERANCE.get(a.dtype, 0.0)), f"output {index}"
    assert all(map(torch.equal, before, (value for value in arguments.values() if isinstance(value, Tensor))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_writes_the_strides_that_meta_promises(case: Case, dtype: torch.dtype):
    arguments = case.arguments(dtype)
    op = operator(case.name)
    promised = op.meta(**arguments)
    assert list(map(described, flat(op.fallback(**arguments)))) == list(map(described, flat(promised)))


def test_every_operator_has_cases_and_a_reference():
    names = {name.removeprefix("npu::") for name in operators()}
    assert names == {case.operator for case in CASES} == set(REFERENCES)


@pytest.mark.parametrize("name", operators())
def test_fallback_and_meta_take_what_the_schema_names(name: str):
    op = operator(name)
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
    y, _ = operator("npu::npu_rms_norm").fallback(x, gamma)
    rstd = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    once = (x.double() * rstd * gamma.double()).to(dtype)
    twice = ((x.double() * rstd).to(dtype).double() * gamma.double()).to(dtype)
    assert agreeing(y, once) > 0.999
    assert agreeing(once, twice) < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_add_rms_norm_rounds_twice_and_only_float16_normalises_the_rounded_sum(dtype: torch.dtype):
    torch.manual_seed(1)
    x1, x2, gamma = (torch.randn(*s, dtype=torch.float64).to(dtype) for s in ((64, 256), (64, 256), (256,)))
    y, _, x = operator("npu::npu_add_rms_norm").fallback(x1, x2, gamma)
    exact = x1.double() + x2.double()
    assert torch.equal(x, exact.to(dtype))

    def normalised(total: Tensor) -> Tensor:
        unit = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (unit.to(dtype).double() * gamma.double()).to(dtype)

    kernel, other = (exact, x.double()) if dtype == torch.bfloat16 else (x.double(), exact)
    assert agreeing(y, normalised(kernel)) > 0.999
    assert agreeing(y, normalised(other)) < 0.95


def test_rotary_mul_rounds_cos_to_the_dtype_of_the_input_first():
    torch.manual_seed(1)
    x = torch.randn(1, 5, 3, 32).bfloat16()
    cos, sin = torch.rand(1, 5, 1, 32), torch.rand(1, 5, 1, 32)
    fallback = operator("npu::npu_rotary_mul").fallback
    assert torch.equal(fallback(x, cos, sin), fallback(x, cos.bfloat16(), sin.bfloat16()))
