"""A block of grouped heads over int8 pages in lines of NZ, from the residual add to the output projection: five."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.report.report import Report
from tests.support.torch_npu_host import answer, requires_torch_npu

pytestmark = pytest.mark.rotates(6)

HIDDEN, HEADS, SHARED, WIDTH = 256, 64, 8, 128
BATCH, SIZE, PAGES, LINE = 2, 128, 2, 32
TABLE = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}
FIVE = {
    "npu::npu_add_rms_norm": 1, "npu::npu_qkv_rms_norm_rope_cache_functional": 1,
    "npu::npu_fused_infer_attention_score_v2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Spelling:
    """How the block is written: its projections, and where the heads of queries and keys stand."""

    projections: int
    heads_first: bool


class Block(nn.Module):
    """x [B, 1, H] of the tokens at `lengths` - 1, which go to `slots` [B]."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        self.norm, self.q_norm, self.k_norm = (nn.RMSNorm(size, eps=1e-6) for size in (HIDDEN, WIDTH, WIDTH))
        lanes = (HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH)
        widths = lanes if spelling.projections == 3 else (sum(lanes),)
        self.lanes = lanes
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for width in widths)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        generator = torch.Generator().manual_seed(2)
        for name in ("keys", "values"):
            pages = torch.randint(-99, 99, (2 * PAGES, SHARED * WIDTH // LINE, SIZE, LINE), generator=generator)
            self.register_buffer(name, pages.to(torch.int8))
        scales = torch.rand(2, SHARED, WIDTH, generator=generator) / 64 + 2**-6
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        residual = residual + x
        rows = self.norm(residual)
        parts = [layer(rows) for layer in self.layers]
        parts = parts if len(parts) == 3 else parts[0].split(self.lanes, dim=-1)
        q, k, v = (each.unflatten(-1, (-1, WIDTH)) for each in parts)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.spelling.heads_first:
            q, k = (rotated(each.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)) for each in (q, k))
            k = k.transpose(1, 2)
        else:
            q, k = (rotated(each, cos.unsqueeze(2), sin.unsqueeze(2)) for each in (q, k))
            q = q.transpose(1, 2)
        for pages, scale, new in ((self.keys, self.scales[0], k), (self.values, self.scales[1], v)):
            whole = (new / scale).round().clamp(-128, 127).to(torch.int8).view(BATCH, -1, LINE)
            pages[slots // SIZE, :, slots % SIZE] = whole
        k, v = (read(each, scale, table) for each, scale in zip((self.keys, self.values), self.scales, strict=True))
        seen = torch.arange(k.shape[2]) < lengths[:, None, None, None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)), residual


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def read(pages: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    """Rows [B, M, T, D] of the pages of each sequence."""
    lines = pages[table].unflatten(2, (SHARED, -1)).permute(0, 2, 1, 4, 3, 5)
    return lines.reshape(BATCH, SHARED, PAGES * SIZE, WIDTH).to(scale.dtype) * scale[:, None]


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([SIZE + 3, 9])
    x, residual = (torch.randn(BATCH, 1, HIDDEN, generator=generator) for _ in range(2))
    angles = ((lengths - 1)[:, None, None] / 10000.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)).repeat(1, 1, 2)
    last = lengths - 1
    slots = TABLE.long().gather(1, (last // SIZE)[:, None])[:, 0] * SIZE + last % SIZE
    floats = (each.bfloat16().to(dtype) for each in (x, residual, angles.cos(), angles.sin()))
    return *floats, slots, TABLE, lengths


def block(spelling: Spelling, dtype: torch.dtype) -> Block:
    torch.manual_seed(0)
    return Block(spelling).bfloat16().to(dtype).eval()


def explained(spelling: Spelling) -> Report:
    with torch.no_grad():
        return fusion.explain(block(spelling, torch.bfloat16), *inputs(torch.bfloat16), options=OPTIONS)


SPELLINGS = [Spelling(projections, first) for projections in (1, 3) for first in (False, True)]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_a_token_takes_five_launches(spelling: Spelling):
    report = explained(spelling)
    assert dict(report.ops) == FIVE
    assert report.launches[1] == 5 + 2  # the caches that GE writes in place are copied back in the graph


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_results_and_caches_are_as_exact_as_they_were(spelling: Spelling):
    torch._dynamo.reset()
    exact, plain, fused = (block(spelling, each) for each in (torch.float64, torch.bfloat16, torch.bfloat16))
    compiled = torch.compile(fused, backend="cann_fusion", options=OPTIONS, dynamic=False)
    with torch.no_grad():
        want, old = exact(*inputs(torch.float64))[0], plain(*inputs(torch.bfloat16))[0].double()
        new = compiled(*inputs(torch.bfloat16))[0].double()
    assert (new - want).norm() <= 1.5 * (old - want).norm() + torch.finfo(torch.bfloat16).eps * want.norm()
    for name in ("keys", "values"):
        want, old, new = (getattr(each, name).int() for each in (exact, plain, fused))
        assert (new - want).abs().max() <= 1
        assert (new != want).sum() <= (old != want).sum() + 1


GE = """
import json, torch
from tests.attention import test_nz_block as of
from tests.support import ge
ge.install()
block = of.block(of.Spelling(3, True), torch.bfloat16)
options = {"target": "ascend910_93", "lower": "torchair"}
compiled = torch.compile(block, backend="cann_fusion", options=options, dynamic=False)
with torch.no_grad():
    compiled(*of.inputs(torch.bfloat16))
print(json.dumps(ge.operators()))
"""


@pytest.mark.rotates(8)
@requires_torch_npu
def test_a_token_reaches_ge_as_five_operators():
    found = answer(GE)
    assert found["QkvRmsNormRopeCache"] == found["AddRmsNorm"] == found["FusedInferAttentionScore"] == 1, found
    parts = {"RmsNorm", "AscendQuantV2", "ApplyRotaryPosEmb", "ScatterNdUpdate", "ScatterPaKvCache"}
    assert not parts & set(found), found
