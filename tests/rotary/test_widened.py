"""Lanes in a narrow dtype that are rotated in float32 and rounded back, and pairs among lanes that are not rotated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion
from tests.examples.rope import half

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROTARY, BOTH = "npu::npu_rotary_mul", "npu::npu_apply_rotary_pos_emb"


def explained(function: Callable[..., object], *inputs: Tensor) -> fusion.Report:
    return fusion.explain(function, *inputs, options={"target": "ascend910_93", "plan_lower": "eager"})


def rotated_in(report: fusion.Report) -> list[torch.dtype]:
    """The dtypes that rotations are called with."""
    nodes = (node for graph in report.graphs for node in graph.graph.nodes)
    return [
        node.args[0].meta["val"].dtype
        for node in nodes
        if str(node.target).startswith(("npu.npu_rotary", "npu.npu_apply"))
    ]


def cast(wide: torch.dtype, to: torch.dtype | None = None) -> Callable[..., Tensor]:
    """A rotation in `wide`, whose result is put in a dtype, by default that of the lanes."""
    return lambda x, cos, sin: half(x.to(wide), cos, sin).to(to or x.dtype)


def given(
    dtype: torch.dtype, tables: torch.dtype = F32, heads: int = 4, width: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = torch.randn(2, 1, 5, 1, 64).to(tables)
    return torch.randn(2, 5, heads, width).to(dtype), cos, sin


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tables", [F32, BF16])
def test_the_operator_takes_the_lanes_as_they_are(dtype: torch.dtype, tables: torch.dtype):
    report = explained(cast(F32), *given(dtype, tables))
    assert rotated_in(report) == [dtype], report
    assert report.launches[1] == 1 + 2 * (tables != dtype)
    assert not report.refusals, report


@pytest.mark.parametrize(
    ("function", "dtype", "tables", "wide"),
    [
        (cast(F32, F32), BF16, F32, F32),  # the result is not rounded
        (cast(F32, F16), BF16, F32, F32),  # it is rounded otherwise
        (cast(F64), BF16, F64, F64),  # other numbers than the operator computes
        (cast(BF16), F32, BF16, BF16),  # lanes are rounded before
        (cast(F32), F32, F32, F32),  # there is nothing to widen
    ],
)
def test_what_is_rotated_in_another_dtype_stays_in_it(function, dtype: torch.dtype, tables, wide: torch.dtype):
    report = explained(function, *given(dtype, tables))
    assert all(each == wide for each in rotated_in(report)), report


@pytest.mark.parametrize(("dtype", "operators"), [(BF16, {BOTH: 1}), (F16, {ROTARY: 2})])
def test_queries_and_keys_together_where_the_operator_computes_in_float32(dtype: torch.dtype, operators):
    """`npu_apply_rotary_pos_emb` rotates float16 in float16."""
    (q, cos, sin), k = given(dtype), given(dtype, heads=2)[0]
    report = explained(lambda q, k, cos, sin: (cast(F32)(q, cos, sin), cast(F32)(k, cos, sin)), q, k, cos, sin)
    assert dict(report.ops) == operators, report
    assert rotated_in(report) == [dtype] * sum(operators.values())


def pairs(x: Tensor, freqs: Tensor) -> Tensor:
    """Complex rotation of pairs of neighbours, x [B, S, N, D]."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs.view(1, x.shape[1], 1, -1)
    return torch.view_as_real(turned).flatten(3).to(x.dtype)


def among(x: Tensor, freqs: Tensor, start: int, stop: int, end: int | None = None) -> Tensor:
    turned = pairs(x[..., start:stop], freqs)
    return torch.cat((x[..., :start], turned), -1) if start else torch.cat((turned, x[..., stop:end]), -1)


def frequencies() -> Tensor:
    return torch.polar(torch.ones(5, 32), torch.randn(5, 32))


@pytest.mark.rotates(6)
@pytest.mark.parametrize("start", [0, 64])
def test_lanes_beside_rotated_pairs_are_turned_by_no_angle(start: int):
    """Several tensors share the tables, which are made of all lanes at once."""

    def function(freqs: Tensor, *all_x: Tensor):
        return [among(x, freqs, start, start + 64) for x in all_x]

    every = [given(BF16, heads=heads, width=128)[0] for heads in (1, 2, 4, 8)]
    report = explained(function, frequencies(), *every)
    assert dict(report.ops) == {ROTARY: 4}, report
    assert report.launches[1] == 2 + 4, report
    assert {each.rule for each in report.matches} == {"rope"}
    (joined,) = report.graphs[0].graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert len(joined.args[0]) == 4, "both tables are of the rotated lanes and of those on one side of them"
    freqs = frequencies()
    fused = torch.compile(function, backend="cann_fusion", options={"target": "ascend910_93", "lower": "eager"})
    for have, x in zip(fused(freqs, *every), every, strict=True):
        want = among(x, freqs, start, start + 64)
        kept = slice(64, None) if start == 0 else slice(0, 64)
        assert torch.equal(have[..., kept], x[..., kept])
        torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("start", "stop", "end", "width"),
    [
        (0, 64, 96, 128),  # lanes are left out
        (65, 129, None, 129),  # pairs would be others
    ],
)
def test_other_lanes_are_not_turned_along(start: int, stop: int, end: int | None, width: int):
    x = given(BF16, width=width)[0]
    report = explained(lambda x, freqs: among(x, freqs, start, stop, end), x, frequencies())
    assert [each.rule for each in report.matches] == ["rope"], report


def test_other_lanes_come_from_the_same_tensor_along_the_last_dim():
    (x, *_), (y, *_), freqs = given(BF16, width=128), given(BF16, width=128), frequencies()
    report = explained(lambda x, y, f: torch.cat((pairs(x[..., :64], f), y[..., 64:]), -1), x, y, freqs)
    assert [each.rule for each in report.matches] == ["rope"], report
    report = explained(lambda x, f: torch.cat((pairs(x[..., :64], f), x[..., 64:]), -2), x, freqs)
    assert [each.rule for each in report.matches] == ["rope"], report
