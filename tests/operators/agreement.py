"""Comparison of a decomposition with the reference of its operator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusion.operators import OPERATORS, Operator
from tests.operators.cases import OLDER, flat
from tests.operators.pypto_cases import LAYER
from tests.operators.references import REFERENCES
from tests.operators.undocumented import Undocumented

# Root mean square of the error over that of the result: one or two roundings of the dtype's last bit.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 5e-7, torch.float64: 1e-14}
# A whole number may be the one beside it where what was rounded before lies between the two.
TOLERANCE[torch.int8] = TOLERANCE[torch.float8_e4m3fn] = 5e-3
# Times that: four roundings, one after the other, weigh as much as two that are independent.
CHAINS = {
    **dict.fromkeys(("npu_mla_prolog_v3", "npu_mla_prolog_v3_functional", *OLDER, *LAYER), 2),
    "npu_add_layer_norm": 2,  # the mean of a token is near zero, and is a sum of what is not
    **dict.fromkeys(("atb::npu_mla_preprocess.out", "atb::npu_mla_preprocess.functional"), 4),
}
# What a rounding to int8 on the way may do, where what is rounded has been rounded before.
STEP = {"atb::npu_mla_preprocess.out": 4e-3, "atb::npu_mla_preprocess.functional": 4e-3}


def widened(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with float64 for every dtype of floats."""

    def wide(value: Any) -> Any:
        if isinstance(value, list):
            return [wide(each) for each in value]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: wide(value) for name, value in arguments.items()}


def new(result: tuple[Tensor, ...], op: Operator, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the results that are no written arguments."""
    return tuple(each for each in result if not any(each is arguments[name] for name in op.written))


def beside(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """True if int8 are the same; one beside is taken where a quotient lies between two, in float64 of few alone."""
    away = (got.double() - expected).abs()
    return (
        bool(away.max() <= 1 and (away > 0).double().mean() < 0.01) if dtype == torch.float64 else bool(away.max() <= 2)
    )


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the error of `got` over that of `expected`; infinite numbers must be the same."""
    got, expected = got.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(got[~finite], expected[~finite]):
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    got, expected = got[finite], expected[finite]
    return ((got - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


def referred(operator: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return what the reference of `operator` gives of `arguments`; raise Undocumented where that is not known."""
    try:
        return flat(REFERENCES[operator](**widened(arguments)))
    except IndexError as error:
        raise Undocumented("a position that tensors do not have") from error


def require_agreement(name: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Assert that the decomposition of the operator `name` gives, of `arguments`, what its reference gives."""
    op, operator = OPERATORS[name], name.removeprefix("npu::")
    expected = referred(operator, arguments)
    result = flat(op.fallback(**arguments))
    got = (*new(result, op, arguments), *(arguments[each] for each in op.written))
    assert len(got) == len(expected)
    chain, step = CHAINS.get(operator, 1), STEP.get(operator, 0.0)
    if arguments.get("weight_quant_mode") and dtype.itemsize == 2:
        chain *= 4  # what is rounded before it is quantised may become the whole number beside
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        if a.dtype == torch.int8:
            assert not a.numel() or beside(a, b, dtype), f"output {index}"
            continue
        allowed = max(chain * max(TOLERANCE[dtype], TOLERANCE.get(a.dtype, 0.0)), dtype.itemsize == 2 and step)
        assert relative(a, b) <= allowed, f"output {index}"
