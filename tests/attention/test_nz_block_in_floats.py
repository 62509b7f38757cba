"""A block of grouped heads over bfloat16 pages in lines of NZ: six launches, as no operator attends to such in place.

The gather tells lines from rows by the storage format of the pages, which only an NPU knows: it is supposed, told in
the report, and checked at every call.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.facts import Facts
from fusion.frontend.library import installed
from fusion.inputs import assumptions
from fusion.inputs import dynamo_inputs as known
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.report.report import Report
from fusion.testing import capture
from tests.attention.test_nz_block import BATCH, PAGES, SIZE, inputs, rotated

pytestmark = pytest.mark.rotates(8)

HIDDEN, HEADS, SHARED, WIDTH, LINE = 256, 64, 8, 128, 16
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager"}
GATHER = "npu::npu_gather_pa_kv_cache"
FOUR = {
    "npu::npu_add_rms_norm": 1, "npu::npu_qkv_rms_norm_rope_cache": 1, GATHER: 1,
    "npu::npu_fused_infer_attention_score_v2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Spelling:
    """How the block is written.

    Attributes:
        projections: of queries, keys and values.
        apart: whether lines have a dim of heads.
        rows_first: whether rows of all heads are made of them, then heads.
        gathered: how pages are: by an index, each sequence by itself, or as an embedding.
        normed: whether the heads of queries and keys are.
    """

    projections: int = 1
    apart: bool = False
    rows_first: bool = False
    gathered: str = "index"
    normed: bool = True


class Block(nn.Module):
    """x [B, 1, H] of the tokens at `lengths` - 1, which go to `slots` [B]; pages [Block, .., Size, 16]."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        self.norm, self.q_norm, self.k_norm = (nn.RMSNorm(size, eps=1e-6) for size in (HIDDEN, WIDTH, WIDTH))
        self.lanes = (HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH)
        widths = self.lanes if spelling.projections == 3 else (sum(self.lanes),)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for width in widths)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        generator = torch.Generator().manual_seed(2)
        lines = (SHARED, WIDTH // LINE) if spelling.apart else (SHARED * WIDTH // LINE,)
        for name in ("keys", "values"):
            pages = torch.randn(2 * PAGES, *lines, SIZE, LINE, generator=generator)
            self.register_buffer(name, pages.bfloat16().float())

    def forward(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        residual = residual + x
        parts = [layer(self.norm(residual)) for layer in self.layers]
        parts = parts if len(parts) == 3 else parts[0].split(self.lanes, dim=-1)
        q, k, v = (each.unflatten(-1, (-1, WIDTH)) for each in parts)
        q, k = (self.q_norm(q), self.k_norm(k)) if self.spelling.normed else (q, k)
        q, k = (rotated(each, cos.unsqueeze(2), sin.unsqueeze(2)) for each in (q, k))
        for pages, new in ((self.keys, k), (self.values, v)):
            if self.spelling.apart:
                pages[slots // SIZE, :, :, slots % SIZE] = new.view(BATCH, SHARED, -1, LINE)
            else:
                pages[slots // SIZE, :, slots % SIZE] = new.reshape(BATCH, -1, LINE)
        k, v = (self.rows(self.gathered(pages, table)) for pages in (self.keys, self.values))
        seen = torch.arange(k.shape[2]) < lengths[:, None, None, None]
        y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)), residual

    def gathered(self, pages: Tensor, table: Tensor) -> Tensor:
        """The pages of each sequence [B, P, .., Size, 16]."""
        if self.spelling.gathered == "each":
            return torch.stack([pages[table[number]] for number in range(BATCH)])
        if self.spelling.gathered == "embedding":
            return nn.functional.embedding(table, pages.flatten(1)).unflatten(-1, pages.shape[1:])
        return pages[table]

    def rows(self, lines: Tensor) -> Tensor:
        """Rows [B, M, T, D] of the pages of each sequence."""
        if self.spelling.rows_first:
            lines = lines.flatten(2, -3).transpose(2, 3).reshape(BATCH, PAGES * SIZE, SHARED, WIDTH)
            return lines.transpose(1, 2)
        lines = lines if self.spelling.apart else lines.unflatten(2, (SHARED, -1))
        return lines.permute(0, 2, 1, 4, 3, 5).reshape(BATCH, SHARED, PAGES * SIZE, WIDTH)


def block(spelling: Spelling, dtype: torch.dtype) -> Block:
    torch.manual_seed(0)
    return Block(spelling).bfloat16().to(dtype).eval()


def explained(spelling: Spelling) -> Report:
    with torch.no_grad():
        return fusion.explain(block(spelling, torch.bfloat16), *inputs(torch.bfloat16), options=OPTIONS)


def relative(have: Tensor, want: Tensor) -> Tensor:
    return (have.double() - want).norm() / want.norm()


SPELLINGS = [
    Spelling(), Spelling(3), Spelling(apart=True), Spelling(rows_first=True), Spelling(3, True, True),
    Spelling(gathered="each"), Spelling(rows_first=True, gathered="embedding"),
]  # fmt: skip
PLAIN = Spelling(normed=False)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_a_token_takes_six_launches(spelling: Spelling):
    report = explained(spelling)
    assert dict(report.ops) == FOUR
    assert report.launches[1] == 6
    assert set(report.assumptions.values()) == {"FRACTAL_NZ"}
    assert len(report.assumptions) == 2


def test_without_norms_of_heads_the_rotation_and_the_write_are_calls_of_their_own():
    report = explained(PLAIN)
    one_more = {"npu::npu_apply_rotary_pos_emb": 1, "npu::npu_scatter_pa_kv_cache": 1}
    assert dict(report.ops) == {name: 1 for name in FOUR if "qkv" not in name} | one_more
    assert report.launches[1] == 7


@pytest.mark.parametrize("spelling", [*SPELLINGS, PLAIN], ids=str)
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.rotates)])
def test_results_and_caches_are_as_exact_as_they_were(spelling: Spelling, lower: str):
    torch.compiler.reset()
    exact, plain, fused = (block(spelling, each) for each in (torch.float64, torch.bfloat16, torch.bfloat16))
    options = OPTIONS | {"lower": lower}
    compiled = torch.compile(fused, backend="cann_fusion", options=options, dynamic=False)
    with torch.no_grad():
        want, old = exact(*inputs(torch.float64))[0], plain(*inputs(torch.bfloat16))[0]
        new = compiled(*inputs(torch.bfloat16))[0]
    assert relative(new, want) <= 1.5 * relative(old, want) + torch.finfo(torch.bfloat16).eps
    for name in ("keys", "values"):
        want, old, new = (getattr(each, name) for each in (exact, plain, fused))
        assert relative(new, want) <= 1.5 * relative(old, want)
        changed = (getattr(block(spelling, torch.float64), name) != want).flatten(0, -3).any(0).any(-1).sum()
        assert changed == BATCH  # one slot of each sequence


def test_an_npu_that_keeps_them_otherwise_has_them_turned(monkeypatch: pytest.MonkeyPatch):
    """Rows of lines are gathered and turned by two copies; the format is checked at every call too."""
    monkeypatch.setattr(known, "supposed_fractal", lambda x: False)
    report = explained(Spelling())
    assert report.launches[1] == 8
    assert report.ops[GATHER] == 1
    assert set(report.assumptions.values()) == {"ND"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lies", [False, True])
def test_a_call_that_passes_another_format_runs_the_plain_graph(monkeypatch: pytest.MonkeyPatch, lies: bool):
    torch.compiler.reset()
    monkeypatch.setattr(known, "supposed_fractal", lambda x: not lies)
    plain, fused = block(Spelling(), torch.bfloat16), block(Spelling(), torch.bfloat16)
    compiled = torch.compile(fused, backend="cann_fusion", options=OPTIONS, dynamic=False)
    monkeypatch.setattr(assumptions, "is_fractal", lambda x: lies)
    said = f"the storage format {'ND' if lies else 'FRACTAL_NZ'}, but this call passes it in another one"
    with torch.no_grad():
        with pytest.warns(UserWarning, match=said):
            have = compiled(*inputs(torch.bfloat16))
        with warnings.catch_warnings():  # once
            warnings.simplefilter("error")
            compiled(*inputs(torch.bfloat16))
        want = plain(*inputs(torch.bfloat16))
    assert all(map(torch.equal, have, want))
    assert torch.equal(plain.keys, fused.keys)


def test_of_a_format_that_nobody_checks_nothing_is_gathered():
    """A pass that never sees a call supposes nothing."""
    captured = capture(block(Spelling(), torch.bfloat16), inputs(torch.bfloat16))
    outcome = fuse_graph(captured.graph.graph, installed(), Options(**OPTIONS), Facts())
    called = {str(node.target) for node in captured.graph.graph.nodes}
    assert not any("gather_pa" in each for each in called)
    assert "they are lines of NZ, whose storage format" in " ".join(str(each.reason) for each in outcome.refusals)


@pytest.mark.filterwarnings("error")
def test_pages_that_a_write_makes_anew_are_no_input():
    """The caller keeps its pages; the new ones are without blocks, and attention is fused all the same."""

    def step(keys: Tensor, values: Tensor, new: Tensor, slots: Tensor, table: Tensor, q: Tensor):
        place = (slots // SIZE)[:, None], torch.arange(SHARED * WIDTH // LINE), (slots % SIZE)[:, None]
        keys, values = (pages.index_put(place, new) for pages in (keys, values))
        k, v = (pages[table].transpose(2, 3).reshape(BATCH, -1, SHARED, WIDTH) for pages in (keys, values))
        y = nn.functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)
        return y, keys, values

    torch.compiler.reset()
    pages = torch.randn(2, 2 * PAGES, SHARED * WIDTH // LINE, SIZE, LINE).bfloat16()
    q, new = torch.randn(BATCH, HEADS, 1, WIDTH).bfloat16(), torch.randn(BATCH, SHARED * WIDTH // LINE, LINE).bfloat16()
    given = (*pages, new, torch.tensor([SIZE + 3, 9]), torch.tensor([[3, 1], [0, 2]]), q)
    report = fusion.explain(step, *given, options=OPTIONS)
    assert report.ops["npu::npu_fused_infer_attention_score_v2"] == 1
    assert not report.assumptions
    have = torch.compile(step, backend="cann_fusion", options=OPTIONS, dynamic=False)(*given)
    want, exact = step(*given), step(*(each.double() if each.is_floating_point() else each for each in given))
    assert all(map(torch.equal, have[1:], want[1:]))
    assert relative(have[0], exact[0]) <= 1.5 * relative(want[0], exact[0])
