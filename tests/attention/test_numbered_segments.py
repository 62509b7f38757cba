"""Packed tokens of which data says the segment: one call that is told where each ends, or is shown the mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.runtime.verification import relative_error
from tests.attention.test_block_diagonal import (
    inside_of_both,
    numbered_by_bounds,
    put_in_buckets,
    repeated,
    same,
    started,
)

T, N, D = 64, 2, 64
QKV = tuple(torch.randn(T, N, D, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3))
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
OPTIONS = {"target": "ascend910_93", "lower": "torchair"}


def numbered(bounds: Tensor) -> Tensor:
    return (torch.arange(T)[:, None] >= bounds[None]).sum(-1)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def in_order(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Documents of training data: causal within each."""
    segment, i = numbered(bounds), torch.arange(T)
    return attended(q, k, v, (segment[:, None] == segment) & (i <= i[:, None]))


def others_hidden(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """The contrary, filled in."""
    segment = numbered(bounds)
    scores = (q @ k.mT * D**-0.5).masked_fill(segment[:, None] != segment[None], -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def searched(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """By another search."""
    return same(q, k, v, torch.searchsorted(bounds, torch.arange(T), right=True))


def heads_last(form: Form) -> Form:
    """As vision encoders have them, [T, N, D]."""

    def function(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        y = form(*(each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)), bounds)
        return y.squeeze(0).transpose(0, 1).reshape(T, N * D)

    return function


def told(form: Form, bounds: Tensor) -> list[str]:
    """The layout of each call, which must mean what the model does."""
    torch.compiler.reset()
    function = heads_last(form)
    report = fusion.explain(function, *QKV, bounds, options=OPTIONS)
    calls = [each for graph in report.graphs for each in graph.graph.nodes if "attention_score" in str(each.target)]
    fused = torch.compile(function, backend="cann_fusion", options={**OPTIONS, "lower": "eager"})(*QKV, bounds)
    exact, plain = function(*(each.double() for each in QKV), bounds), function(*QKV, bounds)
    assert relative_error(fused, exact) <= 1.5 * relative_error(plain, exact) + 1e-6
    return [str(each.kwargs["input_layout"]) for each in calls]


BOUNDS = torch.tensor([0, 5, 29, 29, T], dtype=torch.int32)


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    "form", [numbered_by_bounds, put_in_buckets, searched, started, repeated, in_order, others_hidden]
)
def test_segments_are_one_call_that_is_told_where_each_ends(form: Form):
    assert told(form, BOUNDS) == ["TND"]


@pytest.mark.rotates(12)
@pytest.mark.parametrize("bounds", [(29, 5), (-3, 0, 7), (7, T + 9), (T,), (1, 2, 3)])
@pytest.mark.parametrize("form", [in_order, others_hidden])
def test_bounds_may_be_any_numbers(form: Form, bounds: tuple[int, ...]):
    """Counted, they part the tokens whatever they are."""
    assert told(form, torch.tensor(bounds)) == ["TND"]


def falling(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """How many bounds are still to come."""
    return same(q, k, v, (torch.arange(T)[:, None] < bounds).sum(-1))


def two_numberings(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """A query is of another segment than its key would be."""
    return attended(q, k, v, numbered(bounds)[:, None] == numbered(bounds[1:] - 3)[None])


def of_parity(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Every second segment sees every second one."""
    return same(q, k, v, numbered(bounds) % 2)


def later_too(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Those before are seen as well."""
    segment = numbered(bounds)
    return attended(q, k, v, segment[:, None] >= segment)


def from_itself_on(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """The contrary order within a segment."""
    segment, i = numbered(bounds), torch.arange(T)
    return attended(q, k, v, (segment[:, None] == segment) & (i >= i[:, None]))


def either(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Of the same segment, or before."""
    segment, i = numbered(bounds), torch.arange(T)
    return attended(q, k, v, (segment[:, None] == segment) | (i <= i[:, None]))


def marked_backwards(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Marks of any sign."""
    marks = torch.zeros(T, dtype=torch.int64).scatter_add(0, bounds[:-1].long(), bounds[:-1].long() - 20)
    return same(q, k, v, marks.cumsum(0))


def of_own_bounds(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Each token counts bounds of its own."""
    i = torch.arange(T)[:, None]
    return same(q, k, v, (i >= bounds[None] * (1 + i * 37 % 3)).sum(-1))


def of_rounded_positions(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Positions that begin again."""
    return same(q, k, v, ((torch.arange(T) % 10)[:, None] >= bounds[None]).sum(-1))


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    "form",
    [
        of_own_bounds,
        of_rounded_positions,
        falling,
        two_numberings,
        of_parity,
        later_too,
        from_itself_on,
        either,
        marked_backwards,
        inside_of_both,
    ],
)
def test_what_is_no_numbering_of_runs_is_shown_the_mask(form: Form):
    assert "TND" not in told(form, BOUNDS)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_mask_may_compare_with_one_number(tokens: int):
    """As a padding mask is, of one token too."""

    def function(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return attended(q, k, v, (padding == 1)[:, None, None])

    args = *(torch.randn(1, 4, tokens, 64).bfloat16() for _ in range(3)), torch.ones(1, tokens, dtype=torch.int64)
    torch.compiler.reset()
    assert fusion.explain(function, *args, options=OPTIONS).ops


def test_numbers_that_come_from_outside_may_fall_again():
    assert "TND" not in told(same, torch.arange(T) % 3)


def test_launches_one_by_one_are_shown_the_mask_and_told_why():
    torch.compiler.reset()
    options = {"target": "ascend910_93", "plan_lower": "eager"}
    report = fusion.explain(heads_last(in_order), *QKV, BOUNDS, options=options)
    assert dict(report.ops) == {"npu::npu_fused_infer_attention_score_v2": 1}
    assert any(
        "set the option plan_lower to torchair or eager with the option lengths='host'" in each.reason
        for each in report.refusals
    )
