"""Packed sequences behind a mask of blocks: of identities of segments, or of where they end, given or known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.runtime.verification import relative_error

pytestmark = pytest.mark.rotates(8)

N, D = 4, 64
SIZES = (5, 11, 8)
S = sum(SIZES)
ENDS = torch.tensor(SIZES).cumsum(0)
SEGMENT = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
BOUNDS = F.pad(ENDS, (1, 0)).to(torch.int32)
FIA = "npu::npu_fused_infer_attention_score_v2"
QKV = tuple(torch.randn(1, N, S, D, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
Form = Callable[..., Tensor]


def same(q: Tensor, k: Tensor, v: Tensor, segment: Tensor) -> Tensor:
    """NaViT, packed rows of training data: tokens of one image, or of one document."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=segment[:, None] == segment[None])


def other_filled(q: Tensor, k: Tensor, v: Tensor, segment: Tensor) -> Tensor:
    """The contrary, filled in, and the softmax in float32."""
    scores = (q @ k.mT * D**-0.5).masked_fill(segment.unsqueeze(1) != segment.unsqueeze(0), float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def numbered_by_bounds(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Segments numbered by how many have ended."""
    segment = (torch.arange(q.shape[2])[:, None] >= bounds[None, 1:]).sum(-1)
    return same(q, k, v, segment)


def put_in_buckets(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """The same by a search."""
    return same(q, k, v, torch.bucketize(torch.arange(q.shape[2]), bounds[1:], right=True))


def inside_of_both(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Pairs that some segment holds both of."""
    i = torch.arange(q.shape[2])[:, None]
    inside = (i >= bounds[:-1]) & (i < bounds[1:])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(inside[:, None] & inside[None]).any(-1))


def started(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Segments numbered by marks where they start."""
    marks = torch.zeros(q.shape[2] + 1, dtype=torch.int64).scatter_add(0, bounds.long(), torch.ones(len(bounds)).long())
    return same(q, k, v, marks.cumsum(0)[: q.shape[2]])


def repeated(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Each number as often as its segment is long."""
    numbers, sizes = torch.arange(len(bounds) - 1), bounds[1:] - bounds[:-1]
    return same(q, k, v, torch.repeat_interleave(numbers, sizes, output_size=q.shape[2]))


def blocks_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Qwen2-VL written out: a mask that is lowered everywhere but in the blocks of known sizes."""
    mask = torch.full((1, S, S), torch.finfo(q.dtype).min, dtype=q.dtype)
    for start, stop in pairwise(accumulate(SIZES, initial=0)):
        mask[..., start:stop, start:stop] = 0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def blocks_joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.block_diag(*map(torch.ones, *_squares())).bool())


def _squares() -> tuple[tuple[int, ...], tuple[int, ...]]:
    return SIZES, SIZES


FORMS = (
    (same, (SEGMENT,)), (other_filled, (SEGMENT,)), (numbered_by_bounds, (BOUNDS,)), (put_in_buckets, (BOUNDS,)),
    (inside_of_both, (BOUNDS,)), (started, (BOUNDS,)), (repeated, (BOUNDS,)), (blocks_written, ()), (blocks_joined, ()),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("form", "more"), FORMS, ids=lambda each: getattr(each, "__name__", ""))
def test_blocks_are_one_call_that_is_shown_the_mask(form: Form, more: tuple[Tensor, ...], dtype: torch.dtype):
    given = tuple(each.to(dtype) for each in QKV)
    report = fusion.explain(form, *given, *more, options={"target": "ascend910_93"})
    assert report.ops == {FIA: 1}, report
    torch._dynamo.reset()
    y = torch.compile(form, backend="cann_fusion", options={"target": "ascend910_93"})(*given, *more)
    parts = (torch.split(each.double(), SIZES, dim=2) for each in given)
    exact = torch.cat([F.scaled_dot_product_attention(*each) for each in zip(*parts, strict=True)], dim=2)
    assert relative_error(y, exact) <= 1.5 * relative_error(form(*given, *more), exact) + torch.finfo(dtype).eps
