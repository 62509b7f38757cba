"""Where npu_fused_infer_attention_score is left out, the operators that it has replaced: the same numbers, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion

OFF = frozenset({"npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"})
ONE, SEVERAL = "npu::npu_incre_flash_attention", "npu::npu_prompt_flash_attention"


def inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, rows, 64).bfloat16() for heads, rows in ((4, queries), (2, keys), (2, keys)))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, causal=True)


def last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last query sees the last key."""
    rows, keys = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    return sdpa(q, k, v, keys <= rows[:, None] + k.shape[2] - q.shape[2])


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return sdpa(q, k, v, (keys <= rows) & (keys > rows - 3))


def up_to(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    return sdpa(q, k, v, (torch.arange(k.shape[2]) < length[:, None])[:, None, None])


def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: Tensor) -> Tensor:
    """Keys and values in pages [Block, Size, M, D]."""
    k, v = (each[table].flatten(1, 2).transpose(1, 2) for each in (k, v))
    return up_to(q, k, v, length)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With slopes (ALiBi)."""
    away = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    return sdpa(q, k, v, -away.abs() * torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(-1, 1, 1).to(q.dtype))


LENGTHS, TABLE = torch.tensor([5, 8]), torch.tensor([[3, 0], [1, 4]])
PAGES = tuple(torch.randn(5, 128, 2, 64).bfloat16() for _ in range(2))


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    ("function", "args", "operator"),
    [
        (causal, inputs(8, 8), SEVERAL),
        (window, inputs(8, 8), SEVERAL),
        (sdpa, inputs(5, 8), SEVERAL),
        (sdpa, inputs(1, 8), ONE),
        (sdpa, (*inputs(1, 8), torch.rand(2, 1, 1, 8) > 0.4), ONE),
        (up_to, (*inputs(1, 8), LENGTHS), ONE),
        (paged, (inputs(1, 8)[0], *PAGES, TABLE, LENGTHS), ONE),
    ],
)
@pytest.mark.parametrize("lower", ["eager", "torchair"])
def test_the_older_operators_give_the_same(function: Any, args: tuple[Tensor, ...], operator: str, lower: str):
    torch.compiler.reset()
    options = {"target": "ascend910b", "lower": lower, "lengths": "host" if lower == "eager" else "auto"}
    first = fusion.explain(function, *args, options=options)
    assert all("fused_infer_attention_score" in name for name in first.ops)
    report = fusion.explain(function, *args, options={**options, "disable": OFF})
    assert [name.partition(".")[0] for name in report.ops] == [operator]
    assert report.launches == first.launches
    wide = function(*(each.double() if each.is_floating_point() else each for each in args))
    plain = function(*args)
    with torch.no_grad():
        fused = torch.compile(function, backend="cann_fusion", options={**options, "lower": "eager", "disable": OFF})(
            *args
        )
    errors = [(each.double() - wide).square().mean().sqrt() for each in (fused, plain)]
    assert errors[0] <= 1.5 * errors[1] + 1e-6


ATB = "atb::_npu_paged_attention"
EVERY = frozenset({*OFF, "npu_incre_flash_attention", "npu_fusion_attention"})


def filled_by_hand(q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: Tensor) -> Tensor:
    """Grouped heads by einsum, of a sequence without keys NaN."""
    k, v = (each[table].flatten(1, 2) for each in (k, v))
    scores = torch.einsum("bmgd,btmd->bmgt", q.reshape(2, 2, 2, -1), k) * 0.1
    hidden = torch.arange(k.shape[1]) >= length[:, None]
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bmgt,btmd->bmgd", weights, v).reshape(q.shape)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("length", [LENGTHS, torch.tensor([0, 200])])
@pytest.mark.parametrize("function", [paged, filled_by_hand])
@pytest.mark.parametrize("chip", ["ascend910b", "ascend910_93"])
def test_one_query_over_pages_is_that_of_the_transformer_library(function: Any, length: Tensor, chip: str):
    """Rows of no key are 0 or NaN, as the model has them."""
    torch.compiler.reset()
    args = (inputs(1, 8)[0], *PAGES, TABLE, length)
    options = {"target": chip, "lower": "eager", "plan_lower": "eager", "lengths": "host", "disable": EVERY}
    report = fusion.explain(function, *args, options=options)
    assert dict(report.ops) == {ATB: 1}
    wide = function(*(each.double() if each.is_floating_point() else each for each in args))
    plain = function(*args)
    with torch.no_grad():
        fused = torch.compile(function, backend="cann_fusion", options=options)(*args)
    assert torch.equal(fused.isnan(), plain.isnan())
    errors = [(each.double() - wide).nan_to_num().square().mean().sqrt() for each in (fused, plain)]
    assert errors[0] <= 1.5 * errors[1] + 1e-6


@pytest.mark.parametrize("options", [{"lower": "torchair"}, {"lower": "eager", "lengths": "auto"}])
def test_the_transformer_library_reads_lengths_on_the_host(options: dict[str, str]):
    """Which nothing does for torchair, and nothing unasked."""
    torch.compiler.reset()
    args = (inputs(1, 8)[0], *PAGES, TABLE, LENGTHS)
    report = fusion.explain(paged, *args, options={"target": "ascend910_93", "disable": EVERY, **options})
    assert ATB not in report.ops


@pytest.mark.parametrize(
    ("function", "args", "chip"),
    [
        (sdpa, inputs(1, 8), "ascend910_93"),  # which has no operator for one query
        (sdpa, (*inputs(8, 8), torch.rand(2, 1, 8, 8) > 0.4), "ascend910b"),  # a query may see nothing
        (last, inputs(5, 8), "ascend910b"),  # where the order begins is not documented alike
        (up_to, (*inputs(8, 8), LENGTHS), "ascend910b"),  # lengths in a tensor, of several queries
        (paged, (inputs(8, 8)[0], *PAGES, TABLE, LENGTHS), "ascend910b"),  # pages, of several queries
        (biased, inputs(8, 8), "ascend910b"),
    ],
)
@pytest.mark.rotates(4)
def test_what_the_older_operators_do_not_take(function: Any, args: tuple[Tensor, ...], chip: str):
    torch.compiler.reset()
    options = {"target": chip, "lower": "eager", "lengths": "host"}
    first = fusion.explain(function, *args, options=options)
    assert any("fused_infer_attention_score" in name for name in first.ops)
    report = fusion.explain(function, *args, options={**options, "disable": {*OFF, "npu_fusion_attention"}})
    assert not [name for name in report.ops if "attention" in name]
    assert any("the option disable names it" in each.reason for each in report.refusals)
