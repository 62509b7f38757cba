"""What the laws of all operators do not say of the operators of custom_pypto."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusion.operators import OPERATORS, decompositions, ensure, refusal
from fusion.operators.registration import has_default, run_by_default
from tests.operators.cases import flat
from tests.operators.pypto_cases import BEFORE, LAYER, before, layer, reference_layer, sized
from tests.operators.test_meta import called, operators_in, traced


def made(make: Any, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.manual_seed(5)
    return make(dtype)


def test_a_layer_attends_to_2048_of_its_keys():
    call = made(layer((2100, 3), pages=17, size=128, he=24, hcq=16, n=2, d=8, dr=8, hckv=16, m=8, di=8))
    out, *caches = OPERATORS[LAYER[1]].fallback(**call)
    expected, *stored = reference_layer(**call)
    for got, wanted in zip((out, *caches), (expected, *stored), strict=True):
        torch.testing.assert_close(got, wanted)
    every = reference_layer(**call, listed=2100)[0]
    assert not torch.allclose(out[0], every[0])
    torch.testing.assert_close(out[1], every[1])


def test_a_layer_rounds_no_product_before_the_norm_of_keys_and_no_probability():
    call = made(layer((11, 6, 1)), torch.bfloat16)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    keys = OPERATORS[LAYER[1]].fallback(**call)[3]
    exact = reference_layer(**wide)[3]
    lanes = slice(call["sin"].shape[-1], None)  # which no rotation rounds again
    written = call["cache_index"].flatten().long()
    got, wanted = (each.flatten(0, 2)[written][:, lanes] for each in (keys, exact))
    assert torch.equal(got, wanted.bfloat16())


@pytest.mark.parametrize("name", [LAYER[0], BEFORE[0]])
def test_rows_of_other_slots_are_left_alone(name: str):
    call = made(layer((9, 12, 2), rows=2) if name == LAYER[0] else before((3, 7, -1)))
    op = OPERATORS[name]
    slots = call["cache_index" if name == LAYER[0] else "idx_k_cache_index"].flatten()
    caches = {each: call[each].clone() for each in op.written}
    op.fallback(**call)
    for each, old in caches.items():
        changed = (call[each] != old).flatten(0, 2).any(-1).nonzero().flatten()
        assert changed.tolist() == sorted(slots[slots >= 0].tolist())


def test_one_result_of_the_packages_own_overload_is_passed_on_whole():
    ensure()
    library = torch.library.Library("written_unsaid_too", "DEF")
    library.define("once(Tensor x, Tensor cache) -> Tensor")
    library.define("once.in_place(Tensor x, Tensor(a!) cache) -> Tensor")
    library.impl("once", lambda x, cache: x + cache.add_(x), "CPU")
    stand_in = replace(
        OPERATORS[LAYER[0]], schema="written_unsaid_too::once.in_place(Tensor x, Tensor(a!) cache) -> Tensor",
        dims={}, dtypes={}, limits={}, compute=lambda x, cache: (), outputs=lambda: (), flops=None,
    )  # fmt: skip
    cache = torch.ones(2)
    assert run_by_default(stand_in, torch.ones(2), cache=cache).tolist() == [3, 3]
    assert has_default(stand_in)
    assert not has_default(OPERATORS[LAYER[0]])


# Two sizes of one call: a graph traced with the first must serve the second.
GROWING = [
    (LAYER[1], lambda b, s: layer(tuple(range(s, s + b)), rows=2, pages=5, blocks=60)),
    (BEFORE[1], lambda b, s: before(tuple(range(b)))),
]


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("name", "make"), GROWING, ids=[f"{n} {number}" for number, (n, _) in enumerate(GROWING)])
def test_one_symbolic_graph_serves_other_sizes(name: str, make: Any):
    ensure()
    op = OPERATORS[name]
    small, large = (made(make(*sizes)) for sizes in ((2, 3), (5, 7)))
    kept = traced(op.overload(), small)
    inlined = traced(op.overload(), small, decomposition_table=decompositions())
    assert "custom_pypto" in operators_in(kept)
    assert not operators_in(inlined) & {"custom_pypto", "npu"}
    expected = flat(op.fallback(**large))
    for graph in (kept, inlined):
        for got, wanted in zip(flat(called(graph, large)), expected, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.allclose(got.double(), wanted.double(), equal_nan=True)


@pytest.mark.parametrize("lowering", ["eager", "npugraph_ex"])
def test_there_is_no_kernel_to_launch_by_itself(lowering: str):
    call = sized()
    assert f"cannot be lowered by {lowering}; set the option plan_lower to torchair" in str(
        refusal(OPERATORS[LAYER[0]], "ascend910_93", (), call, lowering)
    )
    assert refusal(OPERATORS[LAYER[0]], "ascend910_93", (), call, "torchair") is None
