"""A context in pages whose latents are expanded: one gather for both caches, unless attention reads the pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

import fusion
from fusion.frontend.library import library_for
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.runtime.verification import relative_error
from fusion.testing import capture

pytestmark = pytest.mark.rotates(8)

N, D, C, R, BLOCKS, SIZE, PAGES = 8, 128, 512, 64, 9, 128, 3
TABLE = torch.tensor([[3, 6, 0], [5, 8, 2]])
GATHER = "npu::npu_gather_pa_kv_cache"
FIA = "npu::npu_fused_infer_attention_score_v2"


class Context(nn.Module):
    """Queries of a chunk over a context that is older: keys and values of all heads from the rows of a latent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Parameter(torch.randn(N * 2 * D, C) / C**0.5, requires_grad=False)

    def forward(self, q: Tensor, latents: Tensor, ropes: Tensor, table: Tensor) -> Tensor:
        """q [B, N, S, D + R], pages [Blocks, Size, C] and [Blocks, Size, R], table [B, most]."""
        rows, turned = (pages[table].flatten(1, 2) for pages in (latents, ropes))
        k, v = linear(rows, self.up).unflatten(-1, (N, -1)).transpose(1, 2).split((D, D), -1)
        k = torch.cat((k, turned[:, None].expand(-1, N, -1, -1)), -1)
        return scaled_dot_product_attention(q, k, v, scale=(D + R) ** -0.5)


def inputs(queries: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(queries)
    shapes = ((2, N, queries, D + R), (BLOCKS, SIZE, C), (BLOCKS, SIZE, R))
    return *(torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes), TABLE.clone()


def explained(queries: int, **options: object) -> fusion.Report:
    how = {"target": "ascend910_93", "plan_lower": "eager", **options}
    return fusion.explain(Context().bfloat16(), *inputs(queries, torch.bfloat16), options=how)


@pytest.mark.parametrize(("queries", "gathers"), [(8, 0), (16, 0), (2048, 1)])
def test_the_cost_decides_whether_pages_are_gathered(queries: int, gathers: int):
    report = explained(queries)
    assert report.ops[FIA] == 1, report
    assert report.ops.get(GATHER, 0) == gathers, report
    called = {str(node.target) for gm in report.graphs for node in gm.graph.nodes}
    assert "aten.index.Tensor" not in called


def test_torchair_has_no_form_of_it():
    report = explained(2048, plan_lower="torchair")
    assert not report.ops.get(GATHER)
    reasons = " ".join(each.reason for each in report.refusals)
    assert "cannot be lowered by torchair" in reasons


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.rotates)])
def test_numbers(lower: str):
    """Rules of attention left out, so that what is gathered is used by the model's own."""
    torch.compiler.reset()
    model, exact = Context().bfloat16(), Context().bfloat16().double()
    options = {"target": "host", "lower": lower, "rules": {"page_gather"}}
    compiled = torch.compile(model, backend="cann_fusion", options=options, dynamic=False, fullgraph=True)
    given = inputs(5, torch.bfloat16)
    kept = [each.clone() for each in given]
    with torch.no_grad():
        have, own, want = compiled(*given), model(*given), exact(*inputs(5, torch.float64))
    assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps
    assert all(map(torch.equal, given, kept))


def gathered(q: Tensor, latents: Tensor, ropes: Tensor, table: Tensor) -> Tensor:
    rows, turned = (pages[table].flatten(1, 2)[:, :300] for pages in (latents, ropes))
    return q + rows.sum() + turned.sum()


def test_one_graph_serves_any_number_of_sequences():
    q, latents, ropes, table = inputs(2, torch.float32)
    torch._dynamo.mark_dynamic(q, 0)
    torch._dynamo.mark_dynamic(table, 0)
    captured = capture(gathered, (q, latents, ropes, table), dynamic=None)
    options = Options(target="host", lower="eager", rules=frozenset({"page_gather"}))
    outcome = fuse_graph(captured.graph.graph, library_for(options), options)
    assert [each.match.rule.name for each in outcome.chosen] == ["page_gather"]
    captured.graph.recompile()
    more = torch.randint(0, BLOCKS, (5, PAGES))
    queries = torch.randn(5, N, 2, D + R)
    given = [each if isinstance(each, Tensor) else 5 for each in captured.inputs]
    own = {table: more, q: queries}
    given = [next((new for old, new in own.items() if old is each), each) for each in given]
    want = gathered(queries, latents, ropes, more)
    torch.testing.assert_close(captured.graph(*given)[0], want)


def test_rows_that_could_be_lines_of_nz_are_told():
    """Heads of 16 lanes, 16 of them: off an NPU such pages are supposed to lie in FRACTAL_NZ, where rows are lines."""

    def both(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return tuple(pages[table].flatten(1, 2).sum(1) for pages in (keys, values))

    pages = torch.zeros(2, BLOCKS, SIZE, 16, 16, dtype=torch.bfloat16)
    report = fusion.explain(both, *pages, TABLE.clone(), options={"target": "ascend910_93", "plan_lower": "eager"})
    assert not report.ops
    assert "could be lines of NZ" in report.refusals[0].reason
