"""Attention over a latent that gives heads first: the products behind it read them so, whatever their number is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import linear

import fusion
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.runtime.verification import relative_error
from fusion.testing import Trial, capture
from tests.models.latents import differences

pytestmark = pytest.mark.rotates(8)

B, C, R, D, ROOM, SIZE = 2, 512, 64, 128, 64, 16
FIA, PRODUCT = "npu::npu_fused_infer_attention_score_v2", "npu::npu_transpose_batchmatmul"
PAGES = torch.tensor([[7, 2, 5, 0], [1, 6, 3, 4]])


class Attention(nn.Module):
    """Keys and values of all heads, from the rows of a latent or from pages of it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(heads)
        self.heads = heads
        self.up = nn.Parameter(torch.randn(heads * 2 * D, C) / C**0.5, requires_grad=False)

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, hidden: Tensor | None) -> Tensor:
        """q [B, S, N, D + R], latent [B, T, C], rope [B, T, R], hidden [B or 1, 1, S, T]."""
        k, v = linear(latent, self.up).unflatten(-1, (self.heads, -1)).transpose(1, 2).split((D, D), -1)
        k = torch.cat((k, rope[:, None].expand(-1, self.heads, -1, -1)), -1)
        scores = (q.transpose(1, 2) @ k.transpose(-2, -1)).float() * (D + R) ** -0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2).flatten(2)


class Rows(Attention):
    """A cache of rows, filled up to a position."""

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, position: Tensor) -> Tensor:
        at = position + torch.arange(q.shape[1])[:, None]
        return super().forward(q, latent, rope, (torch.arange(latent.shape[1]) > at)[None, None])


class Whole(Attention):
    """Every row."""

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, position: Tensor) -> Tensor:
        return super().forward(q, latent, rope, None)


class Paged(Attention):
    """Pages of both, filled up to a length of each sequence."""

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, position: Tensor) -> Tensor:
        rows = (each.view(B * ROOM // SIZE, SIZE, -1)[PAGES].flatten(1, 2) for each in (latent, rope))
        at = position[:, None, None, None] + torch.arange(q.shape[1])[:, None]
        return super().forward(q, *rows, torch.arange(ROOM) > at)


class Shown(Attention):
    """Rows that a mask of the caller's hides."""

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, hidden: Tensor) -> Tensor:
        return super().forward(q, latent, rope, hidden)


def inputs(heads: int, queries: int, kind: type[Attention], dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(queries)
    room = ROOM - 13 if kind is Whole else ROOM
    shapes = ((B, queries, heads, D + R), (B, room, C), (B, room, R))
    tensors = [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]
    hidden = torch.rand((B, 1, queries, ROOM), generator=generator) < 0.5
    return *tensors, {Shown: hidden, Paged: torch.tensor([29, 7])}.get(kind, torch.tensor(29))


def layouts(report: fusion.Report) -> set[tuple[Any, ...]]:
    nodes = [node for graph in report.graphs for node in graph.graph.nodes]
    return {
        (node.kwargs.get("input_layout"), tuple(node.kwargs.get("perm_x1") or ()))
        for node in nodes
        if str(node.target).startswith(("npu.npu_fused", "npu.npu_transpose"))
    }


FIRST, BEHIND = (0, 1, 2), (1, 0, 2)
OPTIONS: dict[str, Any] = {
    "target": "ascend910_93",
    "lower": "eager",
    "disable": frozenset({"npu_multi_head_latent_attention"}),
}
CASES = [
    *((128, queries, kind) for kind in (Rows, Paged, Whole) for queries in (1, 4)),
    (128, 20, Whole),
    (128, 4, Shown),
]


@pytest.mark.parametrize(("heads", "queries", "kind"), CASES)
def test_what_the_kernel_cannot_turn_is_given_heads_first(heads: int, queries: int, kind: type[Attention]):
    model, given = kind(heads).bfloat16(), inputs(heads, queries, kind, torch.bfloat16)
    report = fusion.explain(model, *given, options=OPTIONS)
    assert {name: report.ops.get(name) for name in (FIA, PRODUCT)} == {FIA: 1, PRODUCT: 1}, report
    layout = "BSND_NBSD" if 1 < queries <= 16 else "TND_NTD"
    assert layouts(report) == {(layout, ()), (None, FIRST)}


@pytest.mark.parametrize("kind", [Rows, Paged, Whole])
def test_fewer_heads_are_turned_by_the_kernel(kind: type[Attention]):
    report = fusion.explain(kind(64).bfloat16(), *inputs(64, 1, kind, torch.bfloat16), options=OPTIONS)
    assert layouts(report) == {("BSND", ()), (None, BEHIND)}, report


def test_one_query_beside_a_mask_is_multiplied():
    """No layout gives heads first there, so a batched product and a copy remain."""
    model = Shown(128).bfloat16()
    report = fusion.explain(model, *inputs(128, 1, Shown, torch.bfloat16), options=OPTIONS)
    assert layouts(report) == {("BSND", ())}, report
    assert any("K * W < 65536" in each.reason for each in report.refusals)


@pytest.mark.parametrize(("heads", "queries", "kind"), CASES)
def test_the_formulas_are_the_same_in_float64(heads: int, queries: int, kind: type[Attention]):
    captured = capture(kind(heads).bfloat16(), inputs(heads, queries, kind, torch.bfloat16))
    fused = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    options = Options(target="ascend910_93", lower="eager", plan_lower="torchair", disable=OPTIONS["disable"])
    outcome = fuse_graph(fused.graph, installed(), options, captured.facts)
    assert any("heads first" in each.lowering for each in outcome.chosen)
    fused.recompile()
    errors = differences(Trial(installed(), captured, fused, outcome))
    assert max(errors) < 1e-12, errors


@pytest.mark.parametrize(("heads", "queries", "kind"), CASES)
def test_numbers(heads: int, queries: int, kind: type[Attention]):
    torch.compiler.reset()
    model = kind(heads).bfloat16()
    exact = kind(heads).bfloat16().double()
    given = inputs(heads, queries, kind, torch.bfloat16)
    kept = [each.clone() for each in given]
    compiled = torch.compile(model, backend="cann_fusion", options=OPTIONS, dynamic=False, fullgraph=True)
    with torch.no_grad():
        have, own, want = compiled(*given), model(*given), exact(*inputs(heads, queries, kind, torch.float64))
    have, own, want = (each.nan_to_num() for each in (have, own, want))
    assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps
    assert all(map(torch.equal, given, kept))


class Prompt(nn.Module):
    """A prompt whose queries come from one product for each head, so that heads lie first."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(heads)
        self.attention = Attention(heads)
        self.query = nn.Parameter(torch.randn(heads, 64, D + R) / 8, requires_grad=False)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """x [B, S, 64]."""
        queries = x.shape[1]
        q = torch.matmul(x[:, None], self.query).transpose(1, 2)
        hidden = torch.ones(queries, queries, dtype=torch.bool).triu(1)
        return self.attention(q, latent, rope, hidden[None, None])


def prompt(batch: int, queries: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(queries)
    shapes = ((batch, queries, 64), (batch, queries, C), (batch, queries, R))
    return tuple(torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes)


@pytest.mark.parametrize(("batch", "layout"), [(1, "NTD_TND"), (2, "BSND")])
def test_a_long_prompt_is_expanded_from_products_of_each_head(batch: int, layout: str):
    report = fusion.explain(
        Prompt(8).bfloat16(), *prompt(batch, 4096, torch.bfloat16), options={"target": "ascend910_93"}
    )
    assert layouts(report) == {(layout, ())}, report


@pytest.mark.rotates(3)
def test_numbers_of_a_prompt():
    torch.compiler.reset()
    model, exact = Prompt(2).bfloat16(), Prompt(2).bfloat16().double()
    given = prompt(1, 2048, torch.bfloat16)
    options = {**OPTIONS, "rules": {"latent_attention"}}
    assert layouts(fusion.explain(model, *given, options=options)) == {("NTD_TND", ())}
    compiled = torch.compile(model, backend="cann_fusion", options=options, dynamic=False, fullgraph=True)
    with torch.no_grad():
        have, own, want = compiled(*given), model(*given), exact(*prompt(1, 2048, torch.float64))
    assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps
