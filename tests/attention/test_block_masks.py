"""Packed tokens behind constant masks of blocks along the diagonal: one call, told where segments end, and no mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.report.report import Report
from fusion.runtime.verification import relative_error

N, T, D = 4, 512, 64
ENDS = (0, 160, 400, T)
OPTIONS = {"target": "ascend910_93", "plan_cache": "off"}
ATTENTION = "npu::npu_fused_infer_attention_score_v2"
Mask = Callable[[torch.dtype], Tensor]


def filled(low: Callable[[torch.dtype], float], *blocks: tuple[int, int, int, int], value: float = 0.0) -> Mask:
    """Qwen2-VL's eager code: slices of a mask that is full of a low number."""

    def mask(dtype: torch.dtype) -> Tensor:
        made = torch.full([1, T, T], low(dtype), dtype=dtype)
        for first, last, start, stop in blocks:
            made[..., first:last, start:stop] = value
        return made

    return mask


def flat(dtype: torch.dtype) -> Tensor:
    """Pixtral's: rows and columns alone, of which the first block stands at the start of both."""
    made = torch.full((T, T), fill_value=torch.finfo(dtype).min, dtype=dtype)
    for start, stop in pairwise(ENDS):
        made[start:stop, start:stop] = 0
    return made[None, None, :, :].expand(1, 1, -1, -1)


def truths(dtype: torch.dtype) -> Tensor:
    made = torch.zeros([1, T, T], dtype=torch.bool)
    for start, stop in pairwise(ENDS):
        made[..., start:stop, start:stop] = True
    return made


def causal(dtype: torch.dtype) -> Tensor:
    number = torch.cat([torch.full((stop - start,), start) for start, stop in pairwise(ENDS)])
    return (number[:, None] == number) & torch.ones(T, T, dtype=torch.bool).tril()


def least(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min


def infinite(dtype: torch.dtype) -> float:
    return -math.inf


SQUARES = tuple((start, stop, start, stop) for start, stop in pairwise(ENDS))
BLOCKS: dict[str, Mask] = {
    "least": filled(least, *SQUARES), "infinite": filled(infinite, *SQUARES), "truths": truths, "causal": causal,
    "flat": flat,
}  # fmt: skip
OTHERS: dict[str, Mask] = {
    "a block that reaches into the next": filled(least, *SQUARES[1:], (0, 160, 0, 161)),
    "a key that one query does not see": filled(least, *SQUARES[1:], (0, 159, 0, 160), (159, 160, 0, 159)),
    "the same of -inf": filled(infinite, *SQUARES[1:], (0, 159, 0, 160), (159, 160, 0, 159)),
    "a query that sees no key": filled(infinite, *SQUARES[1:], (0, 159, 0, 160)),
    "a key of another segment": filled(least, *SQUARES, (0, 1, 200, 201)),
    "two numbers beside 0": lambda dtype: flat(dtype).clone().index_fill_(3, torch.tensor([3]), -1.0),
    "a block that is lowered a little": filled(least, *SQUARES[1:], (0, 160, 0, 160), (160, 161, 0, 160), value=-1.0),
}


def whole(mask: Mask) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q.dtype))


def written(mask: Mask) -> Callable[..., Tensor]:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * D**-0.5 + mask(q.dtype)
        return scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype) @ v

    return form


def heads(dtype: torch.dtype, batch: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(6)
    made = (torch.randn(batch, T, N, D, generator=generator).bfloat16().to(dtype) for _ in range(3))
    return tuple(each.transpose(1, 2) for each in made)


def explained(form: Callable[..., Tensor], batch: int = 1) -> tuple[Report, str]:
    report = fusion.explain(form, *heads(torch.bfloat16, batch), options=OPTIONS)
    return report, next((each.lowering for each in report.matches if each.rule == "attention"), "")


def is_exact(form: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(form, backend="cann_fusion", options=dict(OPTIONS, lower="eager"))
    have, own = compiled(*heads(torch.bfloat16)), form(*heads(torch.bfloat16))
    truth = form(*heads(torch.float64))
    have, own, truth = (each.nan_to_num(7.0) for each in (have, own, truth))  # a query that sees no key
    assert relative_error(have, truth) <= 1.5 * relative_error(own, truth) + torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.rotates(4)
def test_sdpa_is_one_call_without_a_mask(name: str):
    report, way = explained(whole(BLOCKS[name]))
    assert dict(report.ops) == {ATTENTION: 1}
    assert way.startswith("packed")
    is_exact(whole(BLOCKS[name]))


@pytest.mark.parametrize("name", ["least", "infinite"])
def test_so_is_attention_that_is_written_out(name: str):
    report, way = explained(written(BLOCKS[name]))
    assert report.launches[1] <= 2
    assert way.startswith("packed")
    is_exact(written(BLOCKS[name]))


@pytest.mark.rotates(6)
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_no_segments(name: str):
    _, way = explained(whole(OTHERS[name]))
    assert not way.startswith("packed")
    is_exact(whole(OTHERS[name]))


def test_sequences_that_stand_beside_each_other_are_no_segments_of_one():
    _, way = explained(whole(truths), batch=2)
    assert not way.startswith("packed")
