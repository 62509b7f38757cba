"""Operators that are handed over beside rules: planned, limited, run by their decomposition, keyed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fusion
from fusion import Library, Limit, Operator, Rule, lowering, pattern, tensor
from fusion.errors import OperatorError, RuleError
from fusion.language.cache_keys import keys_of
from fusion.operators import OPERATORS, provide

HALF = frozenset({torch.bfloat16, torch.float16})


def _squared(x: Tensor) -> Tensor:
    return (x.float().relu().square()).to(x.dtype)


SQUARED_RELU = Operator(
    schema="own_space::squared_relu(Tensor x) -> Tensor",
    compute=_squared,
    outputs=lambda x: torch.empty_like(x),
    dims={"x": "*B D"},
    dtypes={"x": HALF},
    limits={"host": (), "ascend910_93": (Limit("D % 16 == 0", because="rows are read in blocks of 32 bytes"),)},
    source="this test",
    summary="y = relu(x)²",
)


class SquaredRelu(Rule):
    """The squared ReLU of Primer."""

    def reference(self, x: Tensor) -> Tensor:
        """The meaning: x [*B, D]."""
        return x.relu().square()

    @pattern
    def written(self, p, x=tensor("*B D")):
        """relu(x)²."""
        return p.square(p.op("relu", x))

    @lowering
    def own(self, x):
        """The operator."""
        return torch.ops.own_space.squared_relu(x)


OWN = Library((SquaredRelu(),), (), (SQUARED_RELU,))
A3 = {"target": "ascend910_93", "plan_cache": "off"}


def model(x: Tensor) -> Tensor:
    return x.relu().square()


def test_it_is_planned_and_its_limits_are_asked():
    fine, odd = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(3, 60, dtype=torch.bfloat16)
    rules = fusion.installed() + OWN
    assert fusion.explain(model, fine, rules=rules, options=A3).ops == {"own_space::squared_relu": 1}
    report = fusion.explain(model, odd, rules=rules, options=A3)
    assert not report.ops
    assert any("blocks of 32 bytes" in each.reason for each in report.refusals)


def test_it_runs_by_its_decomposition():
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    backend = fusion.FusionBackend(options={"target": "host", "lower": "eager"}, rules=[SquaredRelu(), SQUARED_RELU])
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        assert torch.equal(run(x), torch.ops.own_space.squared_relu(x))
        torch.testing.assert_close(run(x), model(x))


def test_a_second_operator_of_its_name_is_refused_and_nothing_is_lost():
    provide([SQUARED_RELU])
    other = copy.copy(SQUARED_RELU)
    with pytest.raises(OperatorError, match="own_space::squared_relu: another operator of this name"):
        provide([other])
    with pytest.raises(RuleError, match="the operator 'own_space::squared_relu' is provided twice"):
        Library((), (), (SQUARED_RELU, other))
    assert OPERATORS[SQUARED_RELU.name] is SQUARED_RELU


def test_its_code_is_part_of_the_key():
    changed = replace(SQUARED_RELU, summary="y = max(x, 0)²")
    keys = [keys_of(Library((SquaredRelu(),), (), each)) for each in ((), (SQUARED_RELU,), (changed,))]
    assert None not in keys
    assert len({*keys}) == 3


def test_a_function_that_names_no_arguments_is_named():
    with pytest.raises(OperatorError, match="names no arguments; wrap it"):
        replace(SQUARED_RELU, outputs=torch.empty_like)
